"""Reasons why a server with this backend is not started, in tables of one form, with three callers.

    `plugin/startup.py`    before a process is started          raises the first reason of the arguments
    `plugin/backend.py`    when a scheduler builds its cache    raises the first reason of the cache, then of the pools
    `marconi check`        without a device or a server         shows them all

A row is a setting of SGLang that this cache does not support on a hybrid model, with what would break, or a condition
and its line, which may name a field of the launch. What the cache has to know of a server beside its arguments is
`Facts`: the backend takes them from the model that is loaded, `marconi check` from the model's configuration, and
nothing else may decide. Settings that cannot be tested without a device are refused, too.
docs/status.md lists the same settings (`test/engine/test_support.py` compares them).
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Final, NamedTuple, TypeAlias

from sglang.srt.arg_groups.overrides import resolved_view
from sglang.srt.runtime_context import derive_attn_tp_size, num_dp_ranks_of

from marconi.engine.cache.speculation import CHAIN_ALGORITHMS, TREE_ALGORITHMS, drafts_a_chain
from marconi.engine.events.sockets import require_tellable
from marconi.engine.launch.flags import BACKEND, Flags
from marconi.engine.launch.policies import CHUNK_END, JUDICIOUS
from marconi.engine.launch.storage import has_wrong_size
from marconi.engine.version import Refusal
from marconi.policy.catalog import SERVED


@dataclass(frozen=True, slots=True)
class Facts:
    """A server beside its arguments."""

    is_hybrid: bool
    """True if the model has recurrent layers; one without gets SGLang's own cache."""
    has_sliding_window: bool = False
    why_not_planned: str | None = None
    """Why the model's prefills can keep no planned states; None if they can."""
    is_cache_disabled: bool = False
    has_one_pool: bool = False
    """True if KV and states share one pool."""
    has_host_tier: bool = False
    """`--enable-hierarchical-cache`."""
    has_int8_checkpoints: bool = False
    """`--enable-int8-mamba-checkpoint`."""
    skips_decode_lock: bool = False
    """`SGLANG_OPT_MAMBA_SKIP_DECODE_LOCK`."""
    num_ranks: int = 1
    """Ranks that share a cache."""
    captures_layers: bool = False
    """True if the segments of the prefill graph hold recurrent layers (`prefill/verified.py`)."""
    has_side_states: bool = False
    """True if states beside those of its recurrent layers belong to a prefix (`prefill/side_states.py`)."""
    is_on_cpu: bool = False
    """True on the platform `marconi_cpu`, where every rank sees at once what a pass has freed."""

    @property
    def has_own_cache(self) -> bool:
        """True if the cache is this project's."""
        return self.is_hybrid and not self.is_cache_disabled

    def admission(self, given: Flags) -> str:
        """Where states are kept: what is asked for, as far as the model's prefills can."""
        return CHUNK_END if self.why_not_planned is not None else given.admission

    def falls_back(self, given: Flags) -> bool:
        """True if planned states are asked for in vain."""
        return self.has_own_cache and given.admission == JUDICIOUS != self.admission(given)


class Launch(NamedTuple):
    """A server that is about to start: SGLang's arguments, our flags, and the facts."""

    server_args: Any
    given: Flags
    facts: Facts = Facts(is_hybrid=True)

    @property
    def admission(self) -> str:
        """Where states are kept."""
        return self.facts.admission(self.given)


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

    def line_for(self, launch: Launch) -> str | None:
        """The line for `launch`; None if that does not ask for it."""
        given = self.given_in(launch.server_args)
        if given is None:
            return None
        return f"{given} is not supported with --radix-cache-backend marconi on this model: {self.reason}"


Condition: TypeAlias = Callable[[Launch], Any]


class Refused(NamedTuple):
    """A condition that ends the start, and its line."""

    when: Condition
    line: str

    def line_for(self, launch: Launch) -> str | None:
        """The line for `launch`; None unless the condition holds."""
        if not self.when(launch):
            return None
        return self.line.format(launch)


def _more_than_one(value: Any) -> bool:
    return value is not None and value > 1


def _other_drafts(algorithm: str | None) -> bool:
    return algorithm is not None and algorithm.upper() not in (*TREE_ALGORITHMS, *CHAIN_ALGORITHMS)


_STORES: Final = ("file", "mooncake")
_OTHER_STORE = f"of SGLang's stores behind the host this cache reads and writes {' and '.join(_STORES)} alone"
_STAGING = "the host then only stages copies for a store and keeps nothing"
_HISPARSE = "it moves KV to the host by itself, but this cache evicts whole prefixes on the device"
_STAGES = "a stage holds only the states of its own layers, and no tick reaches the next stage"
_PARTS = "it splits a prompt among ranks, and no rank computes a complete state"
_FULL_PRECISION = "the states of SGLang's one pool are in full precision"
_NOT_COPIED = "SGLang copies no checkpoint in int8 to the host"
_NO_LIVE_SLOT = "a request then takes slots while it decodes, and no eviction gives one in full precision back"
_NOT_COPIED_YET = "the KV of a page is dealt out among ranks, whose parts have not been copied there in a test"
_NOT_SENT = "a window has not been sent to another server in a test"
_NOT_DEALT = "a window whose KV is dealt out among ranks has not been tested"
_NO_CHECKPOINT_SLOT = "where SGLang itself keeps states, the scheduler ends if no checkpoint has a free slot"
_DRAFTS = f"the states after its drafts are not known; supported are {', '.join((*TREE_ALGORITHMS, *CHAIN_ALGORITHMS))}"

UNSUPPORTED: Final = (
    Unsupported("hicache_storage_backend", lambda name: name not in (None, *_STORES), _OTHER_STORE),
    Unsupported("hicache_host_memory_mode", lambda mode: mode == "buffer_only", _STAGING),
    Unsupported("enable_hisparse", bool, _HISPARSE),
    Unsupported("speculative_algorithm", _other_drafts, _DRAFTS),
    Unsupported("dllm_algorithm", bool, "it samples a block of tokens repeatedly, and so recomputes the states"),
    Unsupported("pp_size", _more_than_one, _STAGES),
    Unsupported("attn_cp_size", _more_than_one, _PARTS),
    Unsupported("enable_two_batch_overlap", bool, "it splits batches, and a cut prefill cannot be split again"),
    Unsupported("enable_pdmux", bool, "a cut prefill cannot share the device with a decode"),
    Unsupported("enable_linear_replayssm", bool, "a request's state then lags behind its tokens"),
    Unsupported("enable_streaming_session", bool, "it would add a session's KV to the tree without a state"),
    Unsupported(
        "disaggregation_decode_enable_radix_cache",
        bool,
        "a decode server computes no prompts, so it has no states to keep in its tree",
    ),
    Unsupported("enable_pd_role_switch", bool, "a server that changes its role would need a different cache"),
)

NOTED: Final = (
    Setting(
        "enable_session_radix_cache",
        bool,
        "demotes what only a session left, once it is closed: while it is open, --marconi-eviction ranks its states as "
        "all others",
    ),
    Setting(
        "radix_eviction_policy",
        lambda policy: policy not in (None, "lru"),
        "has no effect: --marconi-eviction decides what is evicted",
    ),
    Setting(
        "hicache_write_policy",
        lambda policy: policy not in (None, "write_through"),
        "has no effect on what the host holds: copies are made ahead of evictions",
    ),
    Setting(
        "tokenizer_worker_num",
        _more_than_one,
        "loads no plugin in these processes: they have no GET /marconi, and a request that no model can answer ends "
        "the scheduler, as in stock",
    ),
    Setting(
        "mamba_max_states_per_path",
        lambda cap: cap is not None and cap >= 0,
        "has no effect: --marconi-eviction decides how many states a path keeps, and which",
    ),
    Setting(
        "enable_int8_mamba_checkpoint",
        bool,
        "rounds each state that is kept, once: an answer that starts from one may differ from one that is computed "
        "anew",
    ),
    Setting(
        "enable_mamba_cache_stochastic_rounding",
        bool,
        "rounds states at random while decoding: an answer differs from run to run, whether a state is reused or not",
    ),
    Setting(
        "kv_events_config",
        bool,
        "publishes only KV, but a request can use KV only up to the last state on its path: --marconi-events also "
        "publishes states, to the same consumers",
    ),
)
"""Supported settings with a limitation, logged at the start."""


def _has_no_room(server_args: Any) -> bool:
    ratio = server_args.hicache_ratio
    is_by_ratio = server_args.enable_hierarchical_cache and server_args.hicache_size <= 0 and ratio is not None
    return is_by_ratio and not 0 < ratio < math.inf


def _is_lazy(launch: Launch) -> bool:
    return bool(launch.server_args.mamba_radix_cache_strategy == "extra_buffer_lazy")


def _asks_for(field: str) -> Condition:
    return lambda launch: getattr(launch.server_args, field)


def _with_int8(is_given: Condition) -> Condition:
    return lambda launch: launch.facts.has_int8_checkpoints and is_given(launch)


def _with_windows(is_given: Condition) -> Condition:
    return lambda launch: launch.facts.has_sliding_window and is_given(launch)


def _with_dcp(is_given: Condition) -> Condition:
    return lambda launch: (
        launch.facts.has_host_tier and _more_than_one(launch.server_args.dcp_size) and is_given(launch)
    )


REFUSED_ARGUMENTS: Final = (
    # Each puts another cache in the place of the unified radix cache, which is what this backend extends.
    *(
        Refused(
            _asks_for(field),
            f"--{field.replace('_', '-')} and --radix-cache-backend {BACKEND} are two caches: give one of them",
        )
        for field in ("enable_lmcache", "enable_flexkv", "enable_unified_cache_external_linker")
    ),
    Refused(
        lambda launch: launch.server_args.disable_radix_cache,
        f"--disable-radix-cache leaves --radix-cache-backend {BACKEND} nothing to do: give one of them",
    ),
    Refused(
        lambda launch: _has_no_room(launch.server_args),
        "--hicache-ratio must be above 0, such as 2 for twice the device's pools, got {0.server_args.hicache_ratio:g}",
    ),
    Refused(
        lambda launch: (
            bool(launch.server_args.hicache_storage_backend) and not launch.server_args.enable_hierarchical_cache
        ),
        "--hicache-storage-backend: a store is read and written through the host's memory: give "
        "--enable-hierarchical-cache as well",
    ),
    Refused(
        lambda launch: (
            bool(launch.server_args.hicache_storage_backend) and launch.server_args.disaggregation_mode != "null"
        ),
        "--hicache-storage-backend: --disaggregation-mode must be null, got {0.server_args.disaggregation_mode}",
    ),
    Refused(
        lambda launch: has_wrong_size(launch.server_args.hicache_storage_backend_extra_config),
        "--hicache-storage-backend-extra-config: sizes must be such as 2T or 500Gi, got "
        "{0.server_args.hicache_storage_backend_extra_config}",
    ),
    Refused(
        lambda launch: launch.server_args.hicache_storage_backend == "mooncake" and find_spec("mooncake") is None,
        "--hicache-storage-backend mooncake: its client must be installed: pip install mooncake-transfer-engine",
    ),
    Refused(
        lambda launch: launch.given.explain_text and launch.server_args.tokenizer_worker_num > 1,
        "--marconi-explain text: --tokenizer-worker-num must be 1, got {0.server_args.tokenizer_worker_num}: processes "
        "without this plugin would log the tokens",
    ),
    Refused(
        lambda launch: launch.given.events is not None and launch.server_args.disaggregation_mode == "decode",
        "--marconi-events: a decode server keeps no prefixes, so there is nothing to publish; leave it out",
    ),
)
"""On any model."""
REFUSED_WITHOUT_CACHE: Final = (
    Refused(
        lambda launch: launch.given.events is not None and not launch.facts.is_hybrid,
        "--marconi-events: this model has no recurrent layers, its cache is SGLang's own: --kv-events-config "
        "publishes its contents",
    ),
    Refused(
        lambda launch: launch.given.record is not None and not launch.facts.has_own_cache,
        "--marconi-record: the cache is SGLang's own here, whose requests are not recorded: leave it out",
    ),
)
REFUSED_CACHES: Final[tuple[Unsupported | Refused, ...]] = (
    Refused(
        lambda launch: launch.facts.captures_layers,
        "--cuda-graph-backend-prefill must be disabled for this model, got breakable, SGLang's default: its "
        "recurrent layers lie inside the segments that the graph captures, and would replay the capture's prompts",
    ),
    *UNSUPPORTED,
    Refused(
        lambda launch: (
            launch.server_args.enable_linear_replayssm_spec
            and not drafts_a_chain(launch.server_args.speculative_algorithm)
        ),
        "--enable-linear-replayssm-spec: --speculative-algorithm must be "
        f"{' or '.join(CHAIN_ALGORITHMS)}, got {{0.server_args.speculative_algorithm}}: elsewhere a request's state "
        "may lag behind its tokens",
    ),
    *(
        Refused(
            _with_windows(is_given),
            f"{option} is not supported with --radix-cache-backend marconi on a model with sliding windows: {reason}",
        )
        for option, is_given, reason in (
            ("--enable-hierarchical-cache", _asks_for("enable_hierarchical_cache"), "windows are not copied to a host"),
            ("--disaggregation-mode", lambda launch: launch.server_args.disaggregation_mode != "null", _NOT_SENT),
            ("--dcp-size", lambda launch: _more_than_one(launch.server_args.dcp_size), _NOT_DEALT),
        )
    ),
    Refused(
        lambda launch: launch.facts.skips_decode_lock,
        "SGLANG_OPT_MAMBA_SKIP_DECODE_LOCK=1 is not supported with --radix-cache-backend marconi on this model: it "
        "reuses the slot of a state that a decoding request's KV still needs",
    ),
    # SGLang ends such a server with an assertion when it sizes its pools.
    Refused(
        lambda launch: _is_lazy(launch) and resolved_view(launch.server_args).disable_overlap_schedule,
        "--mamba-radix-cache-strategy must be extra_buffer where scheduling does not overlap, got extra_buffer_lazy: "
        "--disable-overlap-schedule, or drafts on a CPU, turn that off",
    ),
    Refused(
        lambda launch: _is_lazy(launch) and launch.admission == CHUNK_END,
        "--mamba-radix-cache-strategy extra_buffer_lazy is only supported with --marconi-admission judicious and "
        "models whose prefills can be cut: where SGLang keeps states itself, it reuses the slot of a state that a "
        "running request's KV still needs",
    ),
    *(
        Refused(
            _with_int8(is_given),
            f"--enable-int8-mamba-checkpoint is not supported with {option} and --radix-cache-backend marconi: "
            f"{reason}",
        )
        for option, is_given, reason in (
            ("--enable-unified-memory", _asks_for("enable_unified_memory"), _FULL_PRECISION),
            ("--enable-hierarchical-cache", _asks_for("enable_hierarchical_cache"), _NOT_COPIED),
            ("--mamba-radix-cache-strategy extra_buffer_lazy", _is_lazy, _NO_LIVE_SLOT),
            (f"--marconi-admission {CHUNK_END}", lambda launch: launch.admission == CHUNK_END, _NO_CHECKPOINT_SLOT),
        )
    ),
    Refused(
        lambda launch: (
            launch.facts.has_host_tier
            and launch.facts.has_one_pool
            and launch.server_args.disaggregation_mode != "null"
        ),
        "--enable-hierarchical-cache is not supported with --enable-unified-memory, --disaggregation-mode and "
        "--radix-cache-backend marconi: while KV is sent to a decode server, no room can be made for what is loaded",
    ),
    Refused(
        lambda launch: launch.facts.has_host_tier and not SERVED[launch.given.eviction.name].ranks_copies,
        "--marconi-eviction {0.given.eviction.name} is not supported with --enable-hierarchical-cache: it ranks by "
        "requests, which copies on the host do not record; it must be one of "
        + ", ".join(policy.name for policy in SERVED.values() if policy.ranks_copies),
    ),
    *(
        Refused(
            _with_dcp(is_given),
            f"--dcp-size {{0.server_args.dcp_size}} is not supported with {options} and --radix-cache-backend marconi: "
            f"{_NOT_COPIED_YET}",
        )
        for options, is_given in (
            ("--enable-hierarchical-cache, --enable-unified-memory", lambda launch: launch.facts.has_one_pool),
            ("--hicache-storage-backend", _asks_for("hicache_storage_backend")),
        )
    ),
    Refused(
        lambda launch: launch.facts.has_one_pool and launch.facts.has_side_states,
        "--enable-unified-memory is not supported by SGLang for this model, which keeps states beside those of its "
        "recurrent layers",
    ),
    Refused(
        lambda launch: launch.facts.has_one_pool and launch.admission == CHUNK_END,
        "--enable-unified-memory is only supported with --marconi-admission judicious and models whose prefills can "
        "be cut: where SGLang keeps states itself, it takes slots that are not reserved for them",
    ),
    Refused(
        lambda launch: launch.facts.has_one_pool and drafts_a_chain(launch.server_args.speculative_algorithm),
        "--speculative-algorithm {0.server_args.speculative_algorithm} is not supported with --enable-unified-memory "
        "and --radix-cache-backend marconi: it drafts only on a GPU, where entries that move have not been tested",
    ),
)
"""On a hybrid model whose cache is this project's."""


def notes(server_args: Any) -> Iterator[str]:
    """One line per supported setting with a limitation."""
    for each in NOTED:
        if given := each.given_in(server_args):
            yield f"{given} {each.reason}"


def against_arguments(server_args: Any, given: Flags) -> Iterator[str]:
    """One line per argument that the backend does not support on any model."""
    yield from _lines(REFUSED_ARGUMENTS, Launch(server_args, given))
    if given.events is not None:
        try:
            require_tellable(given, num_ranks=num_dp_ranks_of(server_args), http_port=server_args.port)
        except Refusal as refusal:
            yield str(refusal)


def against_cache(server_args: Any, given: Flags, facts: Facts) -> Iterator[str]:
    """A line for everything that keeps the cache from being built for this model."""
    launch = Launch(server_args, given, facts)
    yield from _lines(REFUSED_WITHOUT_CACHE, launch)
    if facts.has_own_cache:
        yield from _lines(REFUSED_CACHES, launch)


def _lines(rows: Iterable[Unsupported | Refused], launch: Launch) -> Iterator[str]:
    for row in rows:
        if line := row.line_for(launch):
            yield line


def against_room(num_slots: int, num_tracking_slots: int, num_tokens: int, page_tokens: int) -> Iterator[str]:
    """A line for every pool in which no request leaves or starts from a state."""
    num_working = 1 + num_tracking_slots
    if num_slots <= num_working:
        yield (
            f"--max-mamba-cache-size must give at least {num_working + 1} state slots, {num_working} for a running "
            f"request and one for the state that it starts from, got {num_slots}"
        )
    if num_tokens < 2 * page_tokens:
        yield f"--max-total-tokens must be at least 2 pages of {page_tokens} KV tokens, got {num_tokens} tokens"


def num_attention_ranks(server_args: Any) -> int:
    """Ranks that share a cache, those of one group of attention, by SGLang's resolved arguments."""
    view = resolved_view(server_args)
    return derive_attn_tp_size(tp_size=view.tp_size, attn_cp_size=view.attn_cp_size, attn_dp_size=view.attn_dp_size)


def require(reasons: Iterator[str]) -> None:
    """Raise `Refusal` with the first of `reasons`, if there is one."""
    for line in reasons:
        raise Refusal(line)
