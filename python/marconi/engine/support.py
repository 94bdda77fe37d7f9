"""Settings of SGLang that this cache does not support on a hybrid model: building the cache refuses each in one line.

docs/status.md lists the same settings (`test/engine/test_support.py` compares them). A reason says what would break.
Settings that cannot be tested without a device are refused, too.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

from marconi.engine.policies import CHUNK_END
from marconi.engine.speculation import STEP_ALGORITHMS, TRACKING_ALGORITHMS
from marconi.engine.version import Refusal
from marconi.policy.catalog import SERVED


class Setting(NamedTuple):
    """A setting of `ServerArgs` with the reason to report."""

    field: str
    is_wanted: Callable[[Any], bool]
    """Whether the value asks for more than the default."""
    reason: str

    @property
    def option(self) -> str:
        """Its option on the command line."""
        return "--" + self.field.replace("_", "-")

    def given_in(self, server_args: Any) -> str | None:
        """The option with its value, or None for a value that needs no report."""
        value = getattr(server_args, self.field, None)
        if not self.is_wanted(value):
            return None
        return self.option if value is True else f"{self.option} {value}"


class Unsupported(Setting):
    """A setting that ends the start."""

    __slots__ = ()


class Noted(Setting):
    """A supported setting with a limitation, logged at the start."""

    __slots__ = ()


def _more_than_one(value: Any) -> bool:
    return value is not None and value > 1


def _other_drafts(algorithm: str | None) -> bool:
    return algorithm is not None and algorithm.upper() not in (*STEP_ALGORITHMS, *TRACKING_ALGORITHMS)


def _tracked_drafts(algorithm: str | None) -> bool:
    return algorithm is not None and algorithm.upper() in TRACKING_ALGORITHMS


NO_STORE: Final = "a store beyond the host finds entries by the hash of a node, and this cache does not hash nodes"
_STAGING = "the host then only stages copies for a store and keeps nothing"
_HISPARSE = "it moves KV to the host by itself, but this cache evicts whole prefixes on the device"
_STAGES = "a stage holds only the states of its own layers, and no tick reaches the next stage"
_PARTS = "it splits a prompt among ranks, and no rank computes a complete state"
_DRAFTS = (
    f"the states after its drafts are not known; supported are {', '.join((*STEP_ALGORITHMS, *TRACKING_ALGORITHMS))}"
)

UNSUPPORTED: Final = (
    Unsupported("hicache_storage_backend", bool, NO_STORE),
    Unsupported("hicache_host_memory_mode", lambda mode: mode == "buffer_only", _STAGING),
    Unsupported("enable_hisparse", bool, _HISPARSE),
    Unsupported("speculative_algorithm", _other_drafts, _DRAFTS),
    Unsupported("dllm_algorithm", bool, "it samples a block of tokens repeatedly, and so recomputes the states"),
    Unsupported("pp_size", _more_than_one, _STAGES),
    Unsupported("attn_cp_size", _more_than_one, _PARTS),
    Unsupported("dcp_size", _more_than_one, _PARTS),
    Unsupported("enable_two_batch_overlap", bool, "it splits batches, and a cut prefill cannot be split again"),
    Unsupported("enable_pdmux", bool, "a cut prefill cannot share the device with a decode"),
    Unsupported("enable_linear_replayssm", bool, "a request's state then lags behind its tokens"),
    Unsupported("enable_linear_replayssm_spec", bool, "a request's state then lags behind its tokens"),
    Unsupported("enable_streaming_session", bool, "it would add a session's KV to the tree without a state"),
    Unsupported(
        "disaggregation_decode_enable_radix_cache",
        bool,
        "a decode server computes no prompts, so it has no states to keep in its tree",
    ),
    Unsupported("enable_pd_role_switch", bool, "a server that changes its role would need a different cache"),
)

NOTED: Final = (
    Noted(
        "enable_session_radix_cache",
        bool,
        "demotes what only a session left, once it is closed: while it is open, --marconi-eviction ranks its states as "
        "all others",
    ),
    Noted(
        "speculative_algorithm",
        _tracked_drafts,
        "keeps for the end of an answer the last state that SGLang tracked, which is some tokens before it",
    ),
    Noted(
        "radix_eviction_policy",
        lambda policy: policy not in (None, "lru"),
        "has no effect: --marconi-eviction decides what is evicted",
    ),
    Noted(
        "hicache_write_policy",
        lambda policy: policy not in (None, "write_through"),
        "has no effect on what the host holds: copies are made ahead of evictions",
    ),
    Noted(
        "tokenizer_worker_num",
        _more_than_one,
        "loads no plugin in these processes: they have no GET /marconi, and a request that no model can answer ends "
        "the scheduler, as in stock",
    ),
    Noted(
        "mamba_max_states_per_path",
        lambda cap: cap is not None and cap >= 0,
        "has no effect: --marconi-eviction decides how many states a path keeps, and which",
    ),
    Noted(
        "enable_int8_mamba_checkpoint",
        bool,
        "rounds each state that is kept, once: an answer that starts from one may differ from one that is computed "
        "anew",
    ),
    Noted(
        "enable_mamba_cache_stochastic_rounding",
        bool,
        "rounds states at random while decoding: an answer differs from run to run, whether a state is reused or not",
    ),
    Noted(
        "kv_events_config",
        bool,
        "publishes only KV, but a request can use KV only up to the last state on its path: --marconi-events also "
        "publishes states, to the same consumers",
    ),
)


def refusals(server_args: Any, *, has_sliding_window: bool = False) -> Iterator[str]:
    """One line per refused setting or kind of model."""
    for each in UNSUPPORTED:
        if given := each.given_in(server_args):
            yield f"{given} is not supported with --radix-cache-backend marconi on this model: {each.reason}"
    if has_sliding_window:
        yield (
            "a model with recurrent layers and sliding windows is not supported with --radix-cache-backend marconi: "
            "leave the backend out"
        )


def notes(server_args: Any) -> Iterator[str]:
    """One line per supported setting with a limitation."""
    for each in NOTED:
        if given := each.given_in(server_args):
            yield f"{given} {each.reason}"


def require_whole_locks(skips_decode_lock: bool) -> None:
    """Raise `Refusal` if SGLang unlocks a state before decoding (`SGLANG_OPT_MAMBA_SKIP_DECODE_LOCK`)."""
    if skips_decode_lock:
        raise Refusal(
            "SGLANG_OPT_MAMBA_SKIP_DECODE_LOCK=1 is not supported with --radix-cache-backend marconi on this "
            "model: it reuses the slot of a state that a decoding request's KV still needs"
        )


def require_overlapped(strategy: str, disables_overlap: bool) -> None:
    """Raise `Refusal` where SGLang ends a server with an assertion when it sizes its pools."""
    if strategy == "extra_buffer_lazy" and disables_overlap:
        raise Refusal(
            "--mamba-radix-cache-strategy must be extra_buffer where scheduling does not overlap, got "
            "extra_buffer_lazy: --disable-overlap-schedule, or drafts on a CPU, turn that off"
        )


def require_locked_states(strategy: str, admission: str) -> None:
    """Raise `Refusal` if SGLang keeps states itself and unlocks a state to reuse its slot for another one."""
    if strategy == "extra_buffer_lazy" and admission == CHUNK_END:
        raise Refusal(
            "--mamba-radix-cache-strategy extra_buffer_lazy is only supported with --marconi-admission judicious and "
            "models whose prefills can be cut: where SGLang keeps states itself, it reuses the slot of a state that a "
            "running request's KV still needs"
        )


def require_one_rank(num_ranks: int, role: str) -> None:
    """Raise `Refusal` if several ranks of a server that sends states on to another share one pool.

    Transfers, which each rank sees end at a different time, forbid SGLang to close gaps in it.
    """
    if num_ranks > 1 and role != "null":
        raise Refusal(
            f"--enable-unified-memory with --disaggregation-mode {role} is only supported with 1 rank per cache, got "
            f"{num_ranks}: what SGLang's pool can allocate depends on when each rank's transfers end"
        )


def require_followed_drafts(algorithm: str | None) -> None:
    """Raise `Refusal` if a server with one pool drafts by an algorithm with which entries that move are untested."""
    if _tracked_drafts(algorithm):
        raise Refusal(
            f"--speculative-algorithm {algorithm} is not supported with --enable-unified-memory and "
            "--radix-cache-backend marconi: it drafts only on a GPU, where entries that move have not been tested"
        )


def require_plain(server_args: Any, admission: str) -> None:
    """Raise `Refusal` if a server with checkpoints in int8 is asked for what does not know of a pool of their own."""
    given = {
        "--enable-unified-memory": server_args.enable_unified_memory,
        "--enable-hierarchical-cache": server_args.enable_hierarchical_cache,
        "--speculative-algorithm": server_args.speculative_algorithm is not None,
        "--disaggregation-mode": server_args.disaggregation_mode != "null",
        "--mamba-radix-cache-strategy extra_buffer_lazy": server_args.mamba_radix_cache_strategy == "extra_buffer_lazy",
        f"--marconi-admission {CHUNK_END}": admission == CHUNK_END,
    }
    if refused := [option for option, is_given in given.items() if is_given]:
        raise Refusal(
            f"--enable-int8-mamba-checkpoint is not supported with {', '.join(refused)} and --radix-cache-backend "
            "marconi: checkpoints then have a pool of their own, which that does not know of"
        )


def require_two_pools(has_one_pool: bool) -> None:
    """Raise `Refusal` if a server with one pool has a host tier."""
    if has_one_pool:
        raise Refusal(
            "--enable-hierarchical-cache is not supported with --enable-unified-memory and --radix-cache-backend "
            "marconi: it splits the host's memory like the device's, and the device has one pool: give one of them"
        )


def require_host_room(server_args: Any) -> None:
    """Raise `Refusal` unless the host tier has a positive and finite size."""
    ratio = server_args.hicache_ratio
    is_by_ratio = server_args.enable_hierarchical_cache and server_args.hicache_size <= 0 and ratio is not None
    if is_by_ratio and not 0 < ratio < math.inf:
        raise Refusal(f"--hicache-ratio must be above 0, such as 2 for twice the device's pools, got {ratio:g}")


def require_host_rule(eviction: str) -> None:
    """Raise `Refusal` where a server with a host tier evicts by a rule that ranks by requests."""
    if not SERVED[eviction].ranks_copies:
        able = ", ".join(policy.name for policy in SERVED.values() if policy.ranks_copies)
        raise Refusal(
            f"--marconi-eviction {eviction} is not supported with --enable-hierarchical-cache: it ranks by requests, "
            f"which copies on the host do not record; it must be one of {able}"
        )


def require_loadable_drafts(algorithm: str | None) -> None:
    """Raise `Refusal` if a server with a host tier drafts by an algorithm with which no load has been tested."""
    if _tracked_drafts(algorithm):
        raise Refusal(
            f"--speculative-algorithm {algorithm} is not supported with --enable-hierarchical-cache and "
            "--radix-cache-backend marconi: it drafts only on a GPU, where no load from the host has been tested; "
            f"supported are {', '.join(STEP_ALGORITHMS)}"
        )


def require_planned_states(admission: str) -> None:
    """Raise `Refusal` if SGLang keeps states itself in one pool: it reserves no slots for them, and may end."""
    if admission == CHUNK_END:
        raise Refusal(
            "--enable-unified-memory is only supported with --marconi-admission judicious and models whose prefills "
            "can be cut: where SGLang keeps states itself, it takes slots that are not reserved for them"
        )
