"""Stock SGLang's host tier (`--enable-hierarchical-cache`), as far as a replay of one request after the other sees it.

Two pools on the host, split by the bytes of the device's, each with an order of its own:

    write-through   the states and KV that a request leaves are copied at once, both or neither; where the host is full
                    of entries that the device holds as well, they are not copied, and lost when the device evicts them
    write-back      a victim is copied when it is evicted; with an interior state, its node's KV as well
    KV              evicts the end of a path that is not on the device, the least recently used first, with the state
                    there. Under write-back, copies of KV that the device still holds are evicted before, oldest first
    states          evicts, of those not on the device, the one that left it first; at the end of a path with its KV,
                    else alone, and then the KV stays without use
    load            the deepest state that either tier has, whatever loading costs; the copies stay

This replay keeps them unit by unit in a tree of its own, where SGLang evicts node by node; it loses no more. Source
(0.5.23): `srt/mem_cache/unified_radix_cache.py`, `srt/mem_cache/unified_cache/unified_tree_core.py` and
`srt/mem_cache/unified_cache/components/mamba.py`.
"""

import heapq
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from marconi.policy.host_tier import HostMemory, LoadTimes, WritePolicy
from marconi.policy.request import Request
from marconi.tree import Match, Node, RadixTree


class _Unit:
    """A unit of a path: a token or a block."""

    __slots__ = ("children", "depth", "has_state", "is_hosted", "is_live", "key", "last_s", "parent")

    def __init__(self, key: bytes, parent: "_Unit | None", depth: int) -> None:
        self.key, self.parent, self.depth = key, parent, depth
        self.children: dict[bytes, _Unit] = {}
        self.is_live = self.is_hosted = False
        """Whether the device and the host hold its KV."""
        self.has_state = False
        """Whether the host holds a state after it."""
        self.last_s = 0.0


class StockTier:
    """The part of a tree that stock keeps on the host."""

    def __init__(self, tree: RadixTree, memory: HostMemory, times: LoadTimes, policy: WritePolicy) -> None:
        self._tree = tree
        self._times = times
        self._policy = policy
        self._num_free_units = memory.num_tokens // tree.unit_tokens
        self._num_free_slots = memory.num_slots
        self._roots: dict[int, _Unit] = {}
        self._ends: list[tuple[float, int, int, _Unit]] = []
        """Ends of paths that the host alone holds, by last use; some are none any more."""
        self._num_noted = 0
        self._states: OrderedDict[_Unit, None] = OrderedDict()
        """States that the host alone holds, first those that left the device first."""
        self._twice: OrderedDict[_Unit, None] = OrderedDict()
        """Units whose KV both tiers hold, in the order in which they came to."""
        self._being_loaded: set[_Unit] = set()

    def resumed(self, num_new_tokens: int) -> None:
        """Nothing."""

    def left(self, request: Request, depths: Sequence[int], now_s: float) -> None:
        """Note what the device holds, and copy it where copies are made at once."""
        units = list(self._walk(request.path, depths[-1], request.namespace))
        by_depth = {unit.depth: unit for unit in units}
        for unit in units:
            unit.is_live, unit.last_s = True, now_s
        for depth in depths:
            self._states.pop(by_depth[depth], None)
        if self._policy is WritePolicy.THROUGH:
            start = 0
            for depth in depths:
                if not self._copy([unit for unit in units if start < unit.depth <= depth], by_depth[depth]):
                    return
                start = depth

    def offer(self, node: Node, now_s: float) -> None:
        """The device evicts a state, and the KV that no other node needs."""
        path, namespace = self._tree.path_to(node)
        units = list(self._walk(path, node.depth, namespace))
        end, freed_from = units[-1], self._freed_from(node)
        freed = [unit for unit in units if unit.depth > freed_from]
        assert all(unit.is_live for unit in units), "the device holds what this tier has no record of"
        if self._policy is WritePolicy.BACK and not end.has_state:
            span = freed or units[-len(node.key) // self._tree.unit_bytes :]
            # KV that is there already is not written again, and the state not without it.
            if not all(unit.is_hosted for unit in span):
                self._copy(span, end)
        if end.has_state:
            self._states[end] = None
        for unit in reversed(freed):
            unit.is_live = False
            self._twice.pop(unit, None)
            self._tidy(unit)

    @property
    def is_half_free(self) -> bool:
        """False: stock leaves no states on trial."""
        return False

    def touch(self, node: Node) -> None:
        """Nothing: recency is by what runs through (`left`, `loading`)."""

    def to_load(self, request: Request, match: Match) -> int:
        """The depth of the deepest state that the host alone has, if it is deeper than the device's."""
        found, unit_tokens = 0, self._tree.unit_tokens
        limit = min(request.num_known_tokens, request.num_prompt_tokens - 1) // unit_tokens * unit_tokens
        for unit in self._known(request.path, limit, request.namespace):
            if not (unit.is_live or unit.is_hosted):
                break
            if unit.has_state:
                found = unit.depth
        return found if found > match.checkpoint.depth else 0

    @contextmanager
    def loading(self, request: Request, match: Match, now_s: float) -> Iterator[None]:
        """Keep what is loaded; the device holds it afterwards as well."""
        depth = self.to_load(request, match)
        units = list(self._known(request.path, depth, request.namespace))
        self._being_loaded = set(units)
        yield
        self._being_loaded = set()
        for unit in units:
            unit.last_s = now_s
        node = self._tree.match(request.path[: self._tree.offset(depth)], depth, request.namespace).checkpoint
        if node.depth == depth:
            for unit in units:
                unit.is_live = True
                if unit.is_hosted:
                    self._twice.setdefault(unit)
            self._states.pop(units[-1], None)

    def load_s(self, num_tokens: int) -> float:
        """Seconds to load one state and the KV of `num_tokens`."""
        return self._times.load_s(num_tokens)

    def _copy(self, units: Sequence[_Unit], end: _Unit) -> bool:
        """Copy the KV of `units` and the state at `end`, both or neither; whether they are there now."""
        new = [unit for unit in units if not unit.is_hosted]
        if not self._make_room(len(new), int(not end.has_state)):
            return False
        for unit in new:
            unit.is_hosted = True
            self._twice[unit] = None
        self._num_free_units -= len(new)
        self._num_free_slots -= not end.has_state
        end.has_state = True
        return True

    def _make_room(self, num_units: int, num_slots: int) -> bool:
        while self._num_free_units < num_units and self._policy is WritePolicy.BACK:
            twice = next((unit for unit in self._twice if unit not in self._being_loaded), None)
            if twice is None:
                break
            del self._twice[twice]
            self._drop(twice)
        while self._num_free_units < num_units:
            end = self._oldest_end()
            if end is None:
                return False
            self._drop(end)
        while self._num_free_slots < num_slots:
            state = next((unit for unit in self._states if unit not in self._being_loaded), None)
            if state is None:
                return False
            self._drop_state(state)
            while self._is_end(state) and not state.has_state and state not in self._being_loaded:
                above = state.parent
                self._drop(state)
                assert above is not None
                state = above
        return True

    def _oldest_end(self) -> _Unit | None:
        kept = []
        found = None
        while self._ends and found is None:
            last_s, depth, number, unit = heapq.heappop(self._ends)
            if not self._is_end(unit):
                continue
            if unit.last_s > last_s:
                heapq.heappush(self._ends, (unit.last_s, depth, number, unit))
            elif unit in self._being_loaded:
                kept.append((last_s, depth, number, unit))
            else:
                found = unit
        for entry in kept:
            heapq.heappush(self._ends, entry)
        return found

    def _is_end(self, unit: _Unit) -> bool:
        return unit.is_hosted and not unit.is_live and not unit.children

    def _drop(self, unit: _Unit) -> None:
        """Free the KV of a unit on the host; at the end of a path its state is freed, too."""
        if not unit.is_live:
            self._drop_state(unit)
        unit.is_hosted = False
        self._num_free_units += 1
        self._tidy(unit)

    def _drop_state(self, unit: _Unit) -> None:
        if unit.has_state:
            unit.has_state = False
            self._num_free_slots += 1
            self._states.pop(unit, None)

    def _tidy(self, unit: _Unit) -> None:
        """Forget units that neither tier holds, and note the end of a path that the host alone does."""
        while unit.parent is not None and not unit.is_live and not unit.is_hosted and not unit.children:
            self._drop_state(unit)
            del unit.parent.children[unit.key]
            unit = unit.parent
        if self._is_end(unit):
            self._num_noted += 1
            heapq.heappush(self._ends, (unit.last_s, -unit.depth, self._num_noted, unit))

    def _walk(self, path: bytes, depth: int, namespace: int) -> Iterator[_Unit]:
        """The units of the first `depth` tokens of `path`, made where there are none."""
        unit_bytes, unit_tokens = self._tree.unit_bytes, self._tree.unit_tokens
        unit = self._roots.setdefault(namespace, _Unit(b"", None, 0))
        for start in range(0, depth // unit_tokens * unit_bytes, unit_bytes):
            key = path[start : start + unit_bytes]
            child = unit.children.get(key)
            if child is None:
                child = unit.children[key] = _Unit(key, unit, unit.depth + unit_tokens)
            unit = child
            yield unit

    def _known(self, path: bytes, depth: int, namespace: int) -> Iterator[_Unit]:
        """The units of the first `depth` tokens of `path`, as far as there are any."""
        unit_bytes, unit = self._tree.unit_bytes, self._roots.get(namespace)
        start = 0
        while unit is not None and unit.depth < depth:
            unit = unit.children.get(path[start : start + unit_bytes])
            start += unit_bytes
            if unit is not None:
                yield unit

    @staticmethod
    def _freed_from(node: Node) -> int:
        """The depth beyond which KV is evicted with the state of `node`."""
        if node.live_children:
            return node.depth
        above = node.parent
        while above is not None and above.parent is not None and not above.has_state and len(above.live_children) == 1:
            above = above.parent
        return 0 if above is None else above.depth
