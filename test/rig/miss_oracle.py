"""Why each prompt token is missed, from a whole history that forgets nothing: token by token, without a tree.

It listens to a `HybridCache`: what is inserted, evicted, and dropped from the host. Every prefix that was ever
held stands in a trie of single units, and what became of a state in its trie node. `first_seen` is only the same as the
cache's where that forgets nothing either.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from marconi.policy.admission.base import LEAST_GAIN_TOKENS
from marconi.policy.base import Need
from marconi.policy.causes import Cause
from marconi.policy.host_tier import HostTier
from marconi.policy.hybrid_cache import HybridCache, Suffix
from marconi.policy.misses import Explanation
from marconi.policy.request import Lease, Request
from marconi.tree import Freed, HostCopy, Node

EVICTED = {
    Need.KV: Cause.EVICTED_FOR_KV,
    Need.STATE: Cause.EVICTED_FOR_STATES,
    Need.BYTES: Cause.EVICTED_FOR_BYTES,
}


@dataclass(eq=False)
class Prefix:
    """A prefix that was held once, and the state at its end."""

    longer: dict[bytes, "Prefix"] = field(default_factory=dict)
    on_device: bool = False
    on_host: bool = False
    lost: Cause | None = None
    """Why there is no state on either tier."""


class MissOracle:
    """Explains every request of a cache a second time, and compares."""

    def __init__(self, hybrid: HybridCache) -> None:
        self.missed: Counter[Cause] = Counter()
        self.num_requests = 0
        self.listen(hybrid)

    def listen(self, hybrid: HybridCache) -> None:
        """Hear what becomes of `hybrid` from now on, which holds nothing yet."""
        self._roots = dict[int, Prefix]()
        self._hybrid, self._unit_bytes = hybrid, hybrid.tree.unit_bytes
        begin, insert, evict_node, load = hybrid.begin, hybrid.insert, hybrid.evict_node, hybrid.load

        def heard_begin(lease: Lease, now_s: float, grid_tokens: int | None = None) -> Explanation:
            explanation = begin(lease, now_s, grid_tokens)
            assert explanation is not None
            self._compare(lease, explanation, grid_tokens or hybrid.admission.grid_tokens)
            return explanation

        def heard_insert(
            lease: Lease,
            depths: Sequence[int],
            now_s: float,
            suffix: Suffix | None = None,
            closing: int = -1,
            absent: Mapping[int, Cause] | None = None,
            trials: Collection[int] = (),
        ) -> list[Node]:
            made = insert(lease, depths, now_s, suffix, closing, absent or {}, trials)
            start = 0 if suffix is None else suffix.start.depth
            held = [*self._held(made[-1])]
            for depth in depths:
                held[self._num_units(depth)].on_device = True
                held[self._num_units(depth)].lost = None
            for depth, cause in (absent or {}).items():
                if start < depth <= depths[-1] and not held[self._num_units(depth)].on_device:
                    held[self._num_units(depth)].lost = cause
            return made

        def heard_evict(victim: Any, need: Need, now_s: float, *, is_named: bool = True) -> Freed:
            prefix = self._held(victim)[-1]
            freed = evict_node(victim, need, now_s, is_named=is_named)
            prefix.on_device, prefix.lost = False, EVICTED[need]
            return freed

        def heard_load(request: Request, depth: int, num_tokens: int) -> float:
            load_s = load(request, depth, num_tokens)
            loaded = self._known(self._roots, request, depth)[self._num_units(depth)]
            loaded.on_device, loaded.lost = True, None
            return load_s

        hybrid.begin, hybrid.insert = heard_begin, heard_insert  # type: ignore[method-assign]
        hybrid.evict_node, hybrid.load = heard_evict, heard_load  # type: ignore[method-assign]
        if isinstance(hybrid.host, HostTier):
            self._listen_to_host(hybrid.host)

    def _listen_to_host(self, host: HostTier) -> None:
        hold, drop = host.copies.hold, host.copies.drop

        def heard_hold(node: Node) -> HostCopy:
            self._held(node)[-1].on_host = True
            return hold(node)

        def heard_drop(copy: HostCopy) -> Freed:
            prefix = self._held(copy.node)[-1]
            prefix.on_host = False
            if not prefix.on_device:
                prefix.lost = Cause.EVICTED_FROM_HOST
            return drop(copy)

        host.copies.hold, host.copies.drop = heard_hold, heard_drop  # type: ignore[method-assign]

    def _num_units(self, depth: int) -> int:
        return depth // self._hybrid.tree.unit_tokens

    def _units(self, path: bytes) -> list[bytes]:
        return [path[start : start + self._unit_bytes] for start in range(0, len(path), self._unit_bytes)]

    def _held(self, node: Node) -> list[Prefix]:
        """The prefixes of a node's path, from the empty one on, made where they are new."""
        path, namespace = self._hybrid.tree.path_to(node)
        found = [self._roots.setdefault(namespace, Prefix())]
        for unit in self._units(path):
            found.append(found[-1].longer.setdefault(unit, Prefix()))
        return found

    def _known(self, roots: Mapping[int, Prefix], request: Request, num_tokens: int) -> list[Prefix]:
        """The known prefixes of the first tokens of a request, from the empty one on."""
        found = [roots[request.namespace]] if request.namespace in roots else [Prefix()]
        for unit in self._units(request.path[: self._hybrid.tree.offset(num_tokens)]):
            longer = found[-1].longer.get(unit)
            if longer is None:
                break
            found.append(longer)
        return found

    def _compare(self, lease: Lease, explanation: Explanation, grid: int) -> None:
        request, hit = lease.request, lease.match.checkpoint.depth
        expected = self._causes(request, hit, grid)
        assert hit <= lease.match.num_live_tokens, "KV is never missed by itself: a state's is held as long as it is"
        told = [miss.cause for miss in explanation.misses for _ in range(miss.num_tokens)]
        assert explanation.num_hit_tokens == hit
        assert told == expected, f"{request}\n{explanation}\n{_runs(hit, expected)}"
        assert hit + len(told) == request.num_prompt_tokens
        self.missed.update(expected)
        self.num_requests += 1

    def _causes(self, request: Request, hit: int, grid: int) -> list[Cause]:
        """The cause of every token beyond the hit, where states stand at multiples of `grid` tokens."""
        unit, last = self._hybrid.tree.unit_tokens, request.num_prompt_tokens - 1
        usable = min(last, request.num_known_tokens) // unit * unit
        known = self._known(self._roots, request, usable)
        seen = (len(known) - 1) * unit
        states = {index * unit: prefix for index, prefix in enumerate(known) if prefix.lost or prefix.on_host}
        copies = [depth for depth, prefix in states.items() if prefix.on_host and depth > hit]
        on_host = max(copies, default=0)
        lost = [depth for depth, prefix in states.items() if prefix.lost and depth > max(hit, on_host)]
        start = max([hit, on_host, *lost])
        others = [
            (len(self._known({request.namespace: root}, request, usable)) - 1) * unit
            for name, root in self._roots.items()
            if name != request.namespace
        ]
        causes = []
        for token in range(hit + 1, request.num_prompt_tokens + 1):
            at = min((depth for depth in lost if depth >= token), default=None)
            if token == request.num_prompt_tokens:
                cause = Cause.LAST_TOKEN
            elif token <= on_host:
                cause = Cause.LOAD_DECLINED
            elif at is not None:
                cause = states[at].lost or Cause.UNCACHED
            elif token <= seen:
                can_stand = [depth for depth in range(start + 1, seen + 1) if depth % grid == 0]
                if not can_stand or token > can_stand[-1]:
                    cause = Cause.CHUNK_ROUNDING
                else:
                    cause = Cause.LEAST_GAIN if can_stand[-1] - start < LEAST_GAIN_TOKENS else Cause.NO_STATE
            elif seen == usable:
                cause = Cause.PAGE_ROUNDING
            elif token <= max(others, default=0):
                cause = Cause.OTHER_NAMESPACE
            else:
                cause = Cause.FIRST_SEEN
            causes.append(cause)
        return causes


def _runs(hit: int, causes: Sequence[Cause]) -> str:
    runs: list[tuple[Cause, int, int]] = []
    for token, cause in enumerate(causes, start=hit):
        if runs and runs[-1][0] is cause:
            runs[-1] = (cause, runs[-1][1], token + 1)
        else:
            runs.append((cause, token, token + 1))
    return ", ".join(f"{cause} {start}-{end}" for cause, start, end in runs)
