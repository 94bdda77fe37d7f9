"""The live cache as the tuner sees it: whether memory has been short, the tree as it stands, and a knob."""

from collections.abc import Callable
from typing import Protocol

from marconi.policy.served import ServedTree
from marconi.tree.snapshot import TreeSnapshot, take_snapshot


class Tunable(Protocol):
    """The interface of a live cache to its tuner."""

    @property
    def has_evicted(self) -> bool:
        """True if memory has been short yet."""
        ...

    def snapshot(self) -> TreeSnapshot:
        """The tree as it stands."""
        ...

    def apply(self, value: float) -> None:
        """Go on with this value of the parameter."""
        ...


class TunableTree:
    """A served tree whose eviction rule takes a new value by `set_value`."""

    def __init__(self, cache: ServedTree, set_value: Callable[[float], None]) -> None:
        self._cache = cache
        self._set_value = set_value

    @property
    def has_evicted(self) -> bool:
        """True if any victim was named yet."""
        return any(self._cache.counters.num_evictions.values())

    def snapshot(self) -> TreeSnapshot:
        """The cache's tree."""
        return take_snapshot(self._cache.tree)

    def apply(self, value: float) -> None:
        """Change the rule's parameter."""
        self._set_value(value)
