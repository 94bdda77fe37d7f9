"""Settings of SGLang that do not go with this cache on a hybrid model: each is refused in one line when it is built.

docs/status.md says the same (`test/engine/test_support.py` holds them together). A reason says what would break;
what cannot be tested without a device is refused rather than hoped for.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

from marconi.engine.policies import CHUNK_END
from marconi.engine.speculation import STEP_ALGORITHMS, TRACKING_ALGORITHMS
from marconi.engine.version import Refusal
from marconi.policy.catalog import SERVED


class Setting(NamedTuple):
    """A setting of `ServerArgs`, and what there is to say of it."""

    field: str
    is_wanted: Callable[[Any], bool]
    """Whether the value asks for more than the default."""
    reason: str

    @property
    def option(self) -> str:
        """The setting on the command line."""
        return "--" + self.field.replace("_", "-")

    def given_in(self, server_args: Any) -> str | None:
        """The setting as it was given; None where its value asks for nothing."""
        value = getattr(server_args, self.field, None)
        if not self.is_wanted(value):
            return None
        return self.option if value is True else f"{self.option} {value}"


class Unsupported(Setting):
    """A setting that is refused."""

    __slots__ = ()


class Noted(Setting):
    """A setting that is served, in a way that a user had better know."""

    __slots__ = ()


def _more_than_one(value: Any) -> bool:
    return value is not None and value > 1


def _other_drafts(algorithm: str | None) -> bool:
    return algorithm is not None and algorithm.upper() not in (*STEP_ALGORITHMS, *TRACKING_ALGORITHMS)


def _tracked_drafts(algorithm: str | None) -> bool:
    return algorithm is not None and algorithm.upper() in TRACKING_ALGORITHMS


NO_STORE: Final = (
    "what is stored beyond the host would have to be found by the hash of a node, and nodes are not hashed here"
)
_STAGING = "the host is then a way to a store and keeps nothing"
_HISPARSE = "it moves KV to the host by itself, and this cache evicts whole victims on the device"
_STAGES = "a stage has the states of its own layers alone, and no tick reaches the next one"
_PARTS = "a prompt is split among ranks, and what a rank computes of it ends at no state"
_DRAFTS = f"the states behind its drafts are not known here; {', '.join((*STEP_ALGORITHMS, *TRACKING_ALGORITHMS))} go"

UNSUPPORTED: Final = (
    Unsupported("hicache_storage_backend", bool, NO_STORE),
    Unsupported("hicache_host_memory_mode", lambda mode: mode == "buffer_only", _STAGING),
    Unsupported("enable_hisparse", bool, _HISPARSE),
    Unsupported("speculative_algorithm", _other_drafts, _DRAFTS),
    Unsupported("dllm_algorithm", bool, "a block of tokens is drawn again and again, and its states with it"),
    Unsupported("pp_size", _more_than_one, _STAGES),
    Unsupported("attn_cp_size", _more_than_one, _PARTS),
    Unsupported("dcp_size", _more_than_one, _PARTS),
    Unsupported("enable_two_batch_overlap", bool, "a prefill that is cut cannot be split in two once more"),
    Unsupported("enable_pdmux", bool, "a prefill that is cut cannot share the device with a decode"),
    Unsupported("enable_int8_mamba_checkpoint", bool, "kept states would not be those that the model left"),
    Unsupported("enable_linear_replayssm", bool, "a request's state then lags behind its tokens"),
    Unsupported("enable_linear_replayssm_spec", bool, "a request's state then lags behind its tokens"),
    Unsupported("enable_session_radix_cache", bool, "it asks for references to nodes that are not counted here"),
    Unsupported("enable_streaming_session", bool, "a session's KV would join the tree without a state"),
    Unsupported(
        "disaggregation_decode_enable_radix_cache",
        bool,
        "a decode server computes no prompt, so nothing leaves the states that its tree would need",
    ),
    Unsupported("enable_pd_role_switch", bool, "a server that changes its role would need another cache"),
)

NOTED: Final = (
    Noted(
        "speculative_algorithm",
        _tracked_drafts,
        "leaves at the end of an answer the state that SGLang tracked last, which is some tokens before it",
    ),
    Noted(
        "mamba_max_states_per_path",
        lambda cap: cap is not None and cap >= 0,
        "has no effect: how many states a path keeps, and which, their worth decides (--marconi-eviction)",
    ),
    Noted(
        "enable_mamba_cache_stochastic_rounding",
        bool,
        "rounds states at random while decoding: an answer differs from run to run, whether a state is reused or not",
    ),
    Noted(
        "kv_events_config",
        bool,
        "tells of KV alone, of which a request can use what lies before the last state on its path: --marconi-events "
        "tells the same consumers of states, too",
    ),
)


def refusals(server_args: Any, *, has_sliding_window: bool = False) -> Iterator[str]:
    """A line for every setting, and every kind of model, that is refused."""
    for each in UNSUPPORTED:
        if given := each.given_in(server_args):
            yield f"{given} does not go with --radix-cache-backend marconi on this model: {each.reason}"
    if has_sliding_window:
        yield (
            "a model with recurrent layers and sliding windows is not served by --radix-cache-backend marconi: "
            "leave the backend out"
        )


def notes(server_args: Any) -> Iterator[str]:
    """A line for every setting that is served in a way that a user had better know."""
    for each in NOTED:
        if given := each.given_in(server_args):
            yield f"{given} {each.reason}"


def require_whole_locks(skips_decode_lock: bool) -> None:
    """Raise `Refusal` where SGLang gives a state's lock back before decoding (`SGLANG_OPT_MAMBA_SKIP_DECODE_LOCK`)."""
    if skips_decode_lock:
        raise Refusal(
            "SGLANG_OPT_MAMBA_SKIP_DECODE_LOCK=1 does not go with --radix-cache-backend marconi on this model: "
            "it counts on the slot of a state that a decoding request's KV still needs"
        )


def require_locked_states(strategy: str, admission: str) -> None:
    """Raise `Refusal` where SGLang keeps states itself and gives a state's lock back for the slot of another one."""
    if strategy == "extra_buffer_lazy" and admission == CHUNK_END:
        raise Refusal(
            "--mamba-radix-cache-strategy extra_buffer_lazy goes with --marconi-admission judicious alone, and with "
            "models whose prefills can be cut: where SGLang keeps states itself, it counts on the slot of a state that "
            "a running request's KV still needs"
        )


def require_one_rank(num_ranks: int) -> None:
    """Raise `Refusal` where several ranks of a GPU share one pool: what that can lend hangs on the device."""
    if num_ranks > 1:
        raise Refusal(
            f"--enable-unified-memory goes with 1 rank a cache on a GPU, got {num_ranks}: SGLang lends what was freed "
            "once a pass has ended there, which each rank sees at a time of its own"
        )


def require_no_drafts(algorithm: str | None) -> None:
    """Raise `Refusal` where a server with one pool decodes speculatively."""
    if algorithm is not None:
        raise Refusal(
            f"--speculative-algorithm {algorithm} does not go with --enable-unified-memory and --radix-cache-backend "
            "marconi: entries of the one pool move while drafts are verified, and this cache was not tried there"
        )


def require_two_pools(has_one_pool: bool) -> None:
    """Raise `Refusal` where a server with one pool is to have a host tier."""
    if has_one_pool:
        raise Refusal(
            "--enable-hierarchical-cache does not go with --enable-unified-memory and --radix-cache-backend marconi: "
            "its pools on the host are split as the device's are, and the device has one: give one of them"
        )


def require_host_room(server_args: Any) -> None:
    """Raise `Refusal` for a host tier that would hold nothing, or more than there can be."""
    ratio = server_args.hicache_ratio
    is_by_ratio = server_args.enable_hierarchical_cache and server_args.hicache_size <= 0 and ratio is not None
    if is_by_ratio and not 0 < ratio < math.inf:
        raise Refusal(f"--hicache-ratio must be above 0, such as 2 for twice the device's pools, got {ratio:g}")


def require_host_rule(eviction: str) -> None:
    """Raise `Refusal` where a server with a host tier evicts by a rule that ranks by requests."""
    if not SERVED[eviction].ranks_copies:
        able = ", ".join(entry.name for entry in SERVED.values() if entry.ranks_copies)
        raise Refusal(
            f"--marconi-eviction {eviction} does not go with --enable-hierarchical-cache: it ranks by requests, and "
            f"copies on the host are told of none; one of {able} goes"
        )


def require_plain_serving(server_args: Any) -> None:
    """Raise `Refusal` where a server with a host tier does more than serve: it was not tried there."""
    for option, value, plain in (
        ("--speculative-algorithm", server_args.speculative_algorithm, None),
        ("--disaggregation-mode", server_args.disaggregation_mode, "null"),
    ):
        if value != plain:
            raise Refusal(
                f"{option} {value} does not go with --enable-hierarchical-cache and --radix-cache-backend marconi: "
                "loads from the host were not tried there"
            )


def require_planned_states(admission: str) -> None:
    """Raise `Refusal` where SGLang keeps states itself in one pool: it has no slot set aside for them, and may end."""
    if admission == CHUNK_END:
        raise Refusal(
            "--enable-unified-memory goes with --marconi-admission judicious alone, and with models whose prefills can "
            "be cut: where SGLang keeps states itself, it takes slots that nothing has set aside for them"
        )
