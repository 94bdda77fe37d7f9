"""The cache's contents and counts as plain values, behind `GET /marconi`, `marconi top` and the metrics.

Counts run from the start of the server, through flushes. `GET /marconi` gives `{"ranks": [...]}`, a `Status` for each
cache:

    dp_rank                   its data-parallel rank, as `routed_dp_rank` of a request names it
    kv_tokens, state_slots    a `Use` each: size = free + cached + in_use; in_use is what running requests hold or lock
    joint_bytes               a `Use` of the one pool of `--enable-unified-memory`, else null; sizes and free counts of
                              the two above are then what it would hold of each, and change with what it holds
    host                      the host tier, else null: its two pools, how many states were copied there and, of those,
                              dropped, what was loaded from there, and how often and long evictions waited for copies
    hits                      requests that started from an input prefix, from a conversation's end, or from nothing
    explain                   "off" under `--marconi-explain off`: the next two, and saved_s, are then null
    num_missed_tokens         prompt tokens that were computed, by cause (`policy/causes.py`); all but the uncached add
                              up to num_prompt_tokens - num_hit_tokens
    evictions                 victims by what was short, and how many of them no request had started from
    settings                  what else decides what is cached, so that a replay can (`marconi validate`)
    split                     how the server divided memory between KV and states, and why; null where a flag divided it
    why_not_planned           why states inside prefills are no longer planned, where a hook has failed, else null
    events                    if events are published: how to subscribe to them, and to hash alike (`events/status.py`)
"""

from dataclasses import asdict, dataclass
from typing import Any

from marconi.engine.events.status import EventsStatus


@dataclass(frozen=True, slots=True)
class Use:
    """How a pool is used, in its own unit."""

    size: int
    free: int
    cached: int
    """Held by the tree and not in use, so evictable."""

    @property
    def in_use(self) -> int:
        """Held by running requests, or locked for them."""
        return self.size - self.free - self.cached


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """How a cache's memory is taken and its policies are made, beside the pools."""

    admission: str
    ttft_budget_s: float | None
    step_tokens: int
    """Between two states that a long prefill leaves on its way."""
    max_ghosts: int
    max_ghost_tokens: int | None
    page_tokens: int
    chunk_tokens: int | None
    """Tokens of one prefill; None for whole prompts."""
    num_rows: int
    """Requests that can run beside each other."""
    num_working_slots: int
    """State slots that a request holds throughout."""
    num_lent_slots: int
    """State slots that SGLang counts beside them for each request, and that none holds."""
    ends: str
    """Where the state at a request's end is taken from (`EndStateSource`)."""
    track_tokens: int
    """Tokens between two states that SGLang tracks while it decodes."""
    vocab_size: int | None


@dataclass(frozen=True, slots=True)
class HostUse:
    """The host tier; slots in use belong to copies in flight."""

    kv_tokens: Use
    state_slots: Use
    num_copied: int
    """States copied to the host."""
    num_dropped: int
    """Copies of states evicted from the host for others; not those that a flush forgot."""
    num_loads: int
    """Requests that resumed from a copy."""
    num_loaded_tokens: int
    num_evictions: int
    """Evictions above the tier, each of as many victims as were needed at once."""
    num_waits: int
    """Those that waited for copies."""
    waited_s: float
    """Total wait in seconds."""


@dataclass(frozen=True, slots=True)
class StoreUse:
    """The store behind the host, as this rank sees it. Counts are of states, each with its KV."""

    is_ready: bool
    """False until the weights are digested."""
    num_written: int
    num_written_bytes: int
    num_being_written: int
    num_read: int
    num_read_bytes: int
    num_being_read: int
    num_lost: int
    """States that could not be read or written whole, or that had no place on the host any more."""
    num_damaged: int
    """Objects that were not whole, and were removed."""
    num_failed: int
    """Errors of the store."""
    bytes_per_s: int
    """The speed of reading, as decisions take it."""


@dataclass(frozen=True, slots=True)
class Status:
    """One scheduler's cache."""

    eviction: str
    alpha: float | None
    """None for a rule without an alpha."""
    kv_tokens: Use
    state_slots: Use
    joint_bytes: Use | None
    """None if KV and states have separate pools."""
    kv_bytes_per_token: int
    state_bytes: int
    num_nodes: int
    num_ghosts: int
    num_states: int
    num_requests: int
    num_requests_uncached: int
    """Served but not cached: on request, or because its tokens do not identify it."""
    num_health_checks: int
    """Health checks for which an idle server generated a token; no other count includes them."""
    num_prompt_tokens: int
    num_hit_tokens: int
    """Prompt tokens served from the cache."""
    num_missed_tokens: dict[str, int] | None
    """Prompt tokens that were computed, by cause; those of uncached requests are in no other count of tokens."""
    missed_s: dict[str, float] | None
    """Seconds of prefill that they took, by cause, as learned from this server's prefills."""
    saved_s: float | None
    """Seconds of prefill that hits saved, by the same measure."""
    hits: dict[str, int]
    num_states_written: int
    num_states_not_written: int
    """Planned states that were dropped: without a slot of less worth, or not written by the forward pass."""
    num_ends_not_kept: int
    """Requests that ended within accepted drafts and kept an earlier state or none: stop strings, grammars."""
    evictions: dict[str, int]
    num_evicted_tokens: int
    settings: CacheSettings | None = None
    num_hook_faults: int = 0
    """Errors in hooks of this project that were caught."""
    why_not_planned: str | None = None
    """Why planning of states inside prefills stopped; None while it works, or if it never started."""
    split: str | None = None
    events: EventsStatus | None = None
    host: HostUse | None = None
    store: StoreUse | None = None
    """None without a host tier."""
    explain: str = "on"

    @property
    def hit_rate(self) -> float:
        """Hit tokens over prompt tokens; 0 before the first request."""
        return self.num_hit_tokens / self.num_prompt_tokens if self.num_prompt_tokens else 0.0

    @property
    def held_bytes(self) -> dict[str, int]:
        """Bytes of device memory by what they hold: KV and states that are cached, what is in use, and what is free."""
        kv, states, joint = self.kv_tokens, self.state_slots, self.joint_bytes
        held = {"KV": kv.cached * self.kv_bytes_per_token}
        if joint is not None:
            return held | {"states": max(joint.cached - held["KV"], 0), "in use": joint.in_use, "free": joint.free}
        sizes = ((kv, self.kv_bytes_per_token), (states, self.state_bytes))
        held["states"] = states.cached * self.state_bytes
        held["in use"] = sum(use.in_use * size for use, size in sizes)
        held["free"] = sum(use.free * size for use, size in sizes)
        return held

    def as_dict(self) -> dict[str, Any]:
        """The values for JSON, including derived ones."""
        values = asdict(self)
        for name in ("kv_tokens", "state_slots", "joint_bytes"):
            use: Use | None = getattr(self, name)
            if use is not None:
                values[name]["in_use"] = use.in_use
        values["hit_rate"] = round(self.hit_rate, 6)
        return values
