"""Reasons why a server with this backend is not started: one list, with three callers.

    startup          before a process is started      raises the first reason of the arguments
    backend          when a scheduler builds its cache      raises the first reason of the cache, then of the pools
    marconi check    without a device or a server      shows them all

What the cache has to know of a server beside its arguments is `Facts`: `backend` takes them from the model that is
loaded, `marconi check` from the model's configuration, and nothing else may decide.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from sglang.srt.arg_groups.overrides import resolved_view
from sglang.srt.runtime_context import derive_attn_tp_size, num_dp_ranks_of

from marconi.engine.events.sockets import require_tellable
from marconi.engine.flags import BACKEND, Flags
from marconi.engine.policies import CHUNK_END, JUDICIOUS
from marconi.engine.support import (
    refusals,
    require_followed_drafts,
    require_host_room,
    require_host_rule,
    require_loadable_drafts,
    require_locked_states,
    require_one_rank,
    require_overlapped,
    require_plain,
    require_planned_states,
    require_two_pools,
    require_whole_locks,
)
from marconi.engine.version import Refusal

# Each puts another cache in the place of the unified radix cache, which is what this backend extends.
_OTHER_CACHES: Final = ("enable_lmcache", "enable_flexkv", "enable_unified_cache_external_linker")
_UNSAVED: Final = (
    *("speculative_algorithm", "enable_lora", "lora_paths", "enable_memory_saver"),
    *("kv_events_config", "enable_int8_mamba_checkpoint"),
)
"""Arguments with which states are not saved yet."""


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


def against_arguments(server_args: Any, given: Flags) -> Iterator[str]:
    """One line per argument that the backend does not support on any model."""
    for name in _OTHER_CACHES:
        if getattr(server_args, name):
            option = "--" + name.replace("_", "-")
            yield f"{option} and --radix-cache-backend {BACKEND} are two caches: give one of them"
    if server_args.disable_radix_cache:
        yield f"--disable-radix-cache leaves --radix-cache-backend {BACKEND} nothing to do: give one of them"
    yield from _said(lambda: require_host_room(server_args))
    if given.explain_text and server_args.tokenizer_worker_num > 1:
        yield (
            f"--marconi-explain text: --tokenizer-worker-num must be 1, got {server_args.tokenizer_worker_num}: "
            "processes without this plugin would log the tokens"
        )
    if given.events is None:
        return
    if server_args.disaggregation_mode == "decode":
        yield "--marconi-events: a decode server keeps no prefixes, so there is nothing to publish; leave it out"
    yield from _said(
        lambda: require_tellable(given, num_ranks=num_dp_ranks_of(server_args), http_port=server_args.port)
    )


def against_cache(server_args: Any, given: Flags, facts: Facts) -> Iterator[str]:
    """A line for everything that keeps the cache from being built for this model."""
    if given.events is not None and not facts.is_hybrid:
        yield (
            "--marconi-events: this model has no recurrent layers, its cache is SGLang's own: --kv-events-config "
            "publishes its contents"
        )
    if given.record is not None and not facts.has_own_cache:
        yield "--marconi-record: the cache is SGLang's own here, whose requests are not recorded: leave it out"
    if given.save_dir is not None:
        yield from against_saving(server_args, given, facts)
    if not facts.has_own_cache:
        return
    if facts.captures_layers:
        yield (
            "--cuda-graph-backend-prefill must be disabled for this model, got breakable, SGLang's default: its "
            "recurrent layers lie inside the segments that the graph captures, and would replay the capture's prompts"
        )
    yield from refusals(server_args, has_sliding_window=facts.has_sliding_window)
    yield from _said(lambda: require_whole_locks(facts.skips_decode_lock))
    strategy = server_args.mamba_radix_cache_strategy
    yield from _said(lambda: require_overlapped(strategy, resolved_view(server_args).disable_overlap_schedule))
    yield from _said(lambda: require_locked_states(strategy, facts.admission(given)))
    if facts.has_int8_checkpoints:
        yield from _said(lambda: require_plain(server_args, facts.admission(given)))
    if facts.has_host_tier:
        yield from _said(lambda: require_two_pools(facts.has_one_pool))
        yield from _said(lambda: require_host_rule(given.eviction.name))
        yield from _said(lambda: require_loadable_drafts(server_args.speculative_algorithm))
    if facts.has_one_pool:
        yield from _said(lambda: require_planned_states(facts.admission(given)))
        yield from _said(lambda: require_followed_drafts(server_args.speculative_algorithm))
        yield from _said(lambda: require_one_rank(facts.num_ranks, server_args.disaggregation_mode))


def against_saving(server_args: Any, given: Flags, facts: Facts) -> Iterator[str]:
    """A line for everything with which states are not saved yet (`persistence/`)."""
    if not facts.has_own_cache:
        yield "--marconi-save-dir: there are no states to save: leave it out"
        return
    num_caches = num_dp_ranks_of(server_args)
    if facts.num_ranks > 1 or num_caches > 1:
        yield f"--marconi-save-dir: there must be 1 rank and 1 cache, got {facts.num_ranks} and {num_caches}"
    if server_args.disaggregation_mode != "null":
        yield f"--marconi-save-dir: --disaggregation-mode must be null, got {server_args.disaggregation_mode}"
    for field in _UNSAVED:
        if value := getattr(server_args, field):
            yield f"--marconi-save-dir: --{field.replace('_', '-')} must be left out, got {value}"
    if given.events is not None:
        yield f"--marconi-save-dir: --marconi-events must be left out, got {given.events}"


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


def _said(requirement: Callable[[], None]) -> Iterator[str]:
    try:
        requirement()
    except Refusal as refusal:
        yield str(refusal)
