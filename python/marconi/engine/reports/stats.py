"""A cache's reports on itself: its status, its last hour, a line in the log, metrics, and the line at its start.

Counts that only the engine can make are kept here; what the policies count stands in `HybridCache.counters`. Owner: the
scheduler's thread.
"""

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final, Protocol

from marconi.engine.cache.tick import FirstRank
from marconi.engine.cache.tree_core import MarconiTreeCore
from marconi.engine.events.publishing import CachePublisher
from marconi.engine.faults import Faults
from marconi.engine.launch.flags import Flags
from marconi.engine.launch.policies import CHUNK_END, JUDICIOUS, PolicyChoice
from marconi.engine.reports.explain import Explanations
from marconi.engine.reports.history import History
from marconi.engine.reports.metrics import CacheMetrics
from marconi.engine.reports.status import CacheSettings, HostUse, Status, StoreUse, Use
from marconi.policy.admission.base import LEAST_GAIN_TOKENS
from marconi.policy.base import Costs, Need
from marconi.policy.request import Lease
from marconi.tree import Node

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

    from marconi.engine.cache.pools import DevicePools

logger = logging.getLogger(__name__)

HIT_KINDS: Final = ("input_prefix", "conversation", "none")
"""The kinds of state that a request may start from."""
_ADMISSIONS = {
    JUDICIOUS: "states at branch points, where the next turn resumes and at the end",
    CHUNK_END: "states where SGLang tracks them",
}


def kind_of_hit(lease: Lease, ends: set[Node]) -> str:
    """The kind of state that a request starts from, if that saves anything; `ends` are the nodes at which one ended."""
    source = lease.match.source
    if source is None or source.depth < LEAST_GAIN_TOKENS:
        return "none"
    return "conversation" if source in ends else "input_prefix"


class HitReport:
    """Counts finished requests and says when a line is due: `interval_s` after the last one, 0 for never."""

    def __init__(self, interval_s: float, *, started_s: float):
        self._interval_s = interval_s
        self._last_s = started_s
        self._num_requests = 0
        self._num_prompt_tokens = 0
        self._num_cached_tokens = 0

    def count(self, *, num_prompt_tokens: int, num_cached_tokens: int) -> None:
        """Count one finished request."""
        self._num_requests += 1
        self._num_prompt_tokens += num_prompt_tokens
        self._num_cached_tokens += num_cached_tokens

    def due(self, now_s: float, pools: Callable[[], Mapping[str, Use]]) -> str | None:
        """The line if one is due at `now_s` (seconds of the clock that `started_s` came from), else None.

        `pools` gives the cache's pools by what they count.
        """
        if self._interval_s == 0 or now_s - self._last_s < self._interval_s:
            return None
        self._last_s = now_s
        rate = self._num_cached_tokens / self._num_prompt_tokens if self._num_prompt_tokens else 0.0
        used = ", ".join(f"{use.size - use.free} of {use.size} {name}" for name, use in pools().items())
        return (
            f"{self._num_requests} requests, {self._num_cached_tokens} of {self._num_prompt_tokens} "
            f"prompt tokens from the cache ({rate:.1%}); held: {used}"
        )


class StatsSource(Protocol):
    """A cache, as its account reads it."""

    choice: PolicyChoice
    costs: Costs
    explanations: Explanations
    flags: Flags
    first_rank: FirstRank | None
    faults: Faults
    publisher: CachePublisher | None
    tree_core: MarconiTreeCore
    page_size: int
    split: str | None
    pools: "DevicePools"

    def clock(self) -> float:
        """Seconds."""

    @property
    def host_use(self) -> HostUse | None:
        """The host tier; None without one."""

    @property
    def store_use(self) -> StoreUse | None:
        """The store behind the host; None without one."""

    @property
    def joint_bytes(self) -> Use | None:
        """Bytes of the one pool; None where KV and states have pools of their own."""

    @property
    def settings(self) -> CacheSettings:
        """The settings that decide what is cached, beside the pools."""


class CacheStats:
    """The books of one cache."""

    def __init__(self, cache: StatsSource, metrics: CacheMetrics | None) -> None:
        self._cache = cache
        started_s = 0.0 if cache.first_rank is None else cache.first_rank.clock()
        self._report = HitReport(cache.flags.report_interval_s, started_s=started_s)
        self._metrics = metrics
        self.history = History(self.status)
        self.hits = dict.fromkeys(HIT_KINDS, 0)
        self.num_not_written = 0
        """States that were planned and dropped."""
        self.num_uncached = 0
        """Requests that were served and could leave nothing."""
        self.num_health_checks = 0
        self.num_evictions = 0
        """Evictions above a host tier, each of as many victims as its caller needed."""
        self.num_waits = 0
        """Those of them that waited for copies to the host."""
        self.waited_s = 0.0
        self.num_ends_not_kept = 0
        """Requests that ended in a run of accepted drafts, whose last state is not that of their end."""

    def evicted(self, waited_s: float) -> None:
        """An eviction above a host tier has ended, after waiting `waited_s` for copies to the host."""
        self.num_evictions += 1
        self.num_waits += waited_s > 0
        self.waited_s += waited_s
        if self._metrics is not None:
            self._metrics.evicted(waited_s)

    def count(self, req: "Req") -> None:
        """A request has finished, on the first rank."""
        now_s = self._cache.clock()
        self._report.count(num_prompt_tokens=len(req.origin_input_ids), num_cached_tokens=req.cached_tokens)
        self.publish(now_s)
        line = self._report.due(now_s, self._pools)
        if line is not None:
            logger.info("marconi: %s", line)

    def publish(self, now_s: float) -> None:
        """Note the figures of the last hour, and set the metrics, where there are any; each when it is due."""
        self.history.report()
        if self._metrics is not None and self._metrics.is_due(now_s):
            self._metrics.update(self.status(), now_s)

    def status(self) -> Status:
        """The cache's contents and counts."""
        cache = self._cache
        choice, hybrid = cache.choice, cache.tree_core.hybrid
        tree, counters = hybrid.tree, hybrid.counters
        missed = missed_s = saved_s = None
        if cache.flags.explain:
            missed = {cause.value: num for cause, num in counters.num_missed_tokens.items()}
            missed_s = {cause.value: round(each, 6) for cause, each in cache.explanations.missed_s.items()}
            saved_s = round(cache.explanations.saved_s, 6)
        return Status(
            eviction=choice.eviction,
            alpha=choice.alpha if choice.eviction == "marconi" else None,
            kv_tokens=self._kv_tokens(),
            state_slots=self._state_slots(),
            joint_bytes=cache.joint_bytes,
            kv_bytes_per_token=cache.costs.kv_bytes_per_token,
            state_bytes=cache.costs.state_bytes,
            num_nodes=tree.num_nodes,
            num_ghosts=len(tree.ghosts),
            num_states=tree.num_states,
            num_requests=counters.num_requests,
            num_requests_uncached=self.num_uncached,
            num_health_checks=self.num_health_checks,
            num_prompt_tokens=counters.num_prompt_tokens,
            num_hit_tokens=counters.num_hit_tokens,
            explain="on" if cache.flags.explain else "off",
            num_missed_tokens=missed,
            missed_s=missed_s,
            saved_s=saved_s,
            hits=dict(self.hits),
            num_states_written=counters.num_states_written,
            num_states_not_written=self.num_not_written,
            num_ends_not_kept=self.num_ends_not_kept,
            evictions={
                "bytes": counters.num_evictions[Need.BYTES],
                "kv": counters.num_evictions[Need.KV],
                "states": counters.num_evictions[Need.STATE],
                "unused": counters.num_evictions_unused,
            },
            num_evicted_tokens=counters.num_evicted_tokens,
            settings=cache.settings,
            num_hook_faults=cache.faults.num,
            why_not_planned=cache.faults.first,
            split=cache.split,
            events=None if cache.publisher is None else cache.publisher.status(),
            host=cache.host_use,
            store=cache.store_use,
        )

    def describe(self) -> str:
        """Describe the configuration of the cache, for the log at its start."""
        cache = self._cache
        choice, costs = cache.choice, cache.costs
        sizes = costs.kv_bytes_per_token, costs.state_bytes
        joint = cache.joint_bytes
        if joint is None:
            num_tokens, num_slots = cache.pools.num_kv_tokens, cache.pools.state_slots.size
            memory = f"{num_tokens} KV tokens of {sizes[0]} bytes, {num_slots} state slots of {sizes[1]} bytes"
        else:
            memory = f"{joint.size} bytes for KV tokens of {sizes[0]} bytes and states of {sizes[1]} bytes together"
        return (
            f"{memory}, page {cache.page_size}, "
            f"{_ADMISSIONS[choice.admission]}, "
            f"eviction {choice.eviction}{self._parameter()}"
        )

    def _parameter(self) -> str:
        choice = self._cache.choice
        if choice.eviction == "marconi":
            return f" (alpha {choice.alpha:g})"
        return "" if choice.ttft_budget_s is None else f" (first token within {1000 * choice.ttft_budget_s:g} ms)"

    def _kv_tokens(self) -> Use:
        pools = self._cache.pools
        return Use(pools.num_kv_tokens, pools.num_free_kv_tokens, self._cache.tree_core.evictable_size())

    def _state_slots(self) -> Use:
        pool = self._cache.pools.state_slots
        return Use(pool.size, pool.available_size(), self._cache.tree_core.mamba_evictable_size())

    def _pools(self) -> dict[str, Use]:
        joint = self._cache.joint_bytes
        if joint is not None:
            return {"bytes of KV and states": joint}
        return {"KV tokens": self._kv_tokens(), "state slots": self._state_slots()}
