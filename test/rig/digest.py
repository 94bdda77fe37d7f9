"""A digest of all that a cache decides by, to hold ranks against each other: tree, forecast, order of victims, pools.

Whatever hangs on the tree and its policies is walked, field by field, in the order in which it is kept. Nodes count by
their serial, sets in sorted order (nothing may hang on theirs), functions and times of measurement not at all.
"""

from array import array
from collections import deque
from collections.abc import Callable, Mapping
from hashlib import blake2b
from typing import Any

import numpy as np
import torch

from marconi.policy.base import Need
from marconi.tree import Node

_PLAIN = (int, float, str, bytes, bool, type(None))


class _Walk:
    """What is reached from an object, once each."""

    def __init__(self) -> None:
        self._hash = blake2b(digest_size=16)
        self._seen: dict[int, int] = {}
        self._nodes: deque[Node] = deque()
        self._keep: list[Any] = []
        """Objects stay alive while their addresses are remembered."""

    def hexdigest(self) -> str:
        """Of everything so far."""
        while self._nodes:
            self._fields(self._nodes.popleft())
        return self._hash.hexdigest()

    def add(self, found: Any) -> None:
        """Walk `found`."""
        if isinstance(found, _PLAIN):
            self._note(repr(found))
        elif isinstance(found, np.ndarray):
            self._note(str(found.shape), found.tobytes())
        elif isinstance(found, torch.Tensor):
            self._note(str(found.tolist()))
        elif isinstance(found, array | bytearray):
            self._note("array", bytes(found))
        elif isinstance(found, Need):
            self._note(found.name)
        elif isinstance(found, Callable):  # type: ignore[arg-type]
            self._note("function")
        elif id(found) in self._seen:
            self._note(f"again {self._seen[id(found)]}")
        else:
            self._seen[id(found)] = len(self._seen)
            self._keep.append(found)
            self._of_parts(found)

    def _of_parts(self, found: Any) -> None:
        if isinstance(found, Node):
            self._note(f"node {found.serial}")
            self._nodes.append(found)
        elif isinstance(found, Mapping):
            self._note(f"mapping of {len(found)}")
            for key, value in found.items():
                self.add(key)
                self.add(value)
        elif isinstance(found, set | frozenset):
            self._note(f"set of {len(found)}", *sorted(map(_name, found)))
        elif isinstance(found, list | tuple | deque):
            self._note(f"{len(found)} of")
            for each in found:
                self.add(each)
        else:
            self._note(type(found).__name__)
            self._fields(found)

    def _fields(self, found: Any) -> None:
        names = [name for kind in type(found).__mro__ for name in getattr(kind, "__slots__", ())]
        for name in (*names, *getattr(found, "__dict__", ())):
            if hasattr(found, name):
                self.add(getattr(found, name))

    def _note(self, *parts: str | bytes) -> None:
        for part in parts:
            self._hash.update(part if isinstance(part, bytes) else part.encode())
            self._hash.update(b"\0")


def _name(found: Any) -> str:
    serial = getattr(found, "serial", None)
    return repr(found) if serial is None else f"node {serial}"


def digest_of_policies(cache: Any) -> str:
    """Of the tree and everything that hangs on it, and of the queue as the cache knows it."""
    walk = _Walk()
    hybrid = cache.tree_core.hybrid
    # Who reads them counts what waits to be counted, and one rank's page is opened when another's is not.
    assert hybrid.counters.num_missed_tokens is hybrid.counters.counted
    for part in (hybrid.tree.roots, hybrid.tree.ghosts, hybrid.order, hybrid.turns, hybrid.admission, hybrid.counters):
        walk.add(part)
    return walk.hexdigest()


def digest_of_step(cache: Any, scheduler: Any) -> str:
    """Of what is free, what is held, who would go next, and what waits and runs."""
    hybrid, kv, states = cache.tree_core.hybrid, cache.token_to_kv_pool_allocator, cache.req_to_token_pool
    now_s = cache.clock()
    nodes = [
        (node.serial, node.depth, node.has_state, node.num_locks, node.last_hit_s, node.left_by)
        for root in hybrid.tree.roots.values()
        for node in root.walk()
    ]
    victims = [getattr(hybrid.order.victim(need, now_s), "serial", None) for need in cache.tree_core.needs.values()]
    free = kv.available_size(), states.mamba_allocator.available_size(), states.available_size()
    held = cache.all_values_flatten().tolist(), cache.all_mamba_values_flatten().tolist()
    there = [req.rid for req in (*scheduler.waiting, *scheduler.in_flight())]
    text = repr((nodes, victims, free, held, there, scheduler.outcomes))
    return blake2b(text.encode(), digest_size=16).hexdigest()
