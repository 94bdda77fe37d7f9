"""Where a cache's states are saved from: the device's pools alone, or the device and a host tier.

    device    SGLang's own `get_cpu_copy`, of two pools or of one, which `load_cpu_copy` takes
    tier      pages of the host pools (`host/pages.py`): copies as they lie there, what the device alone holds through
              rows that are kept free for it

The two forms differ, so a server with a host tier refuses what one without has saved, by the name of the layout.
Saving changes nothing on either tier. Owner: the scheduler's thread.
"""

from typing import Any, Protocol, cast

import torch

from marconi.engine.cache.tree_core import MarconiTreeCore
from marconi.engine.host.core import TieredTreeCore
from marconi.engine.host.pages import HostPages
from marconi.engine.persistence.files import layout_of
from marconi.policy.base import Costs
from marconi.policy.persistence import Ranked, most_valuable_first
from marconi.tree import Node

Places = tuple[torch.Tensor | None, ...]
"""The slots of a state, by tier."""


class SavedCache(Protocol):
    """A cache of one rank."""

    costs: Costs
    tree_core: MarconiTreeCore
    page_size: int
    token_to_kv_pool_allocator: Any
    req_to_token_pool: Any

    def clock(self) -> float:
        """Seconds."""


class TieredCache(SavedCache, Protocol):
    """One with a host tier."""

    tree_core: TieredTreeCore
    host_pool_group: Any
    cache_controller: Any

    def settle(self) -> None:
        """Wait until what is on its way between the tiers has arrived."""


class Store(Protocol):
    """The pools that hold the states of a cache."""

    layout: str
    """Types and shapes of a copy."""

    def ranked(self) -> list[Ranked]:
        """The states, the most valuable first."""
        ...

    def places(self, node: Node) -> Places:
        """Where the state of `node` lies; as long as it lies in one of the same slots, it is the same state."""
        ...

    def is_end(self, node: Node) -> bool:
        """Whether a request ended at the state."""
        ...

    def copy(self, node: Node, start: int) -> Any:
        """Copy the KV of the path of `node` from `start` tokens on, and its state: nested lists of tensors."""
        ...


class DeviceStore:
    """The device's pools, or its one pool, alone."""

    def __init__(self, cache: SavedCache) -> None:
        """Raises `NotImplementedError`, `AssertionError` or `TypeError` for pools that SGLang cannot copy."""
        self._cache = cache
        self._kv = cache.token_to_kv_pool_allocator
        page = torch.arange(cache.page_size, device=cache.tree_core.device)
        self.layout = layout_of(self._kv.get_cpu_copy(page, page[:1]))

    def ranked(self) -> list[Ranked]:
        """By the order of eviction."""
        return most_valuable_first(self._cache.tree_core.hybrid, self._cache.clock())

    def places(self, node: Node) -> Places:
        """Its slot."""
        return (self._cache.tree_core.memory.states.get(node),)

    def is_end(self, node: Node) -> bool:
        """Whether a request ended at the state."""
        return node in self._cache.tree_core.memory.ends

    def copy(self, node: Node, start: int) -> Any:
        """By SGLang's `get_cpu_copy`."""
        memory = self._cache.tree_core.memory
        return self._kv.get_cpu_copy(memory.path_indices(node)[start:], memory.states[node])

    def load(self, copies: Any, kv: torch.Tensor, slot: torch.Tensor) -> None:
        """Load copies to the indices `kv`, of as many tokens, and the state to `slot`."""
        self._kv.load_cpu_copy(copies, kv, slot)


class TierStore:
    """The device and the host."""

    def __init__(self, cache: TieredCache) -> None:
        """Raises `NotImplementedError` for host pools that SGLang has no flat pages of."""
        self.cache = cache
        self.pages = HostPages(cache.host_pool_group, cache.cache_controller)
        self.layout = self.pages.layout

    @property
    def core(self) -> TieredTreeCore:
        """The core of the cache."""
        return self.cache.tree_core

    def ranked(self) -> list[Ranked]:
        """By the orders of both tiers."""
        assert self.core.tier is not None
        return most_valuable_first(self.core.hybrid, self.cache.clock(), self.core.tier.eviction)

    def places(self, node: Node) -> Places:
        """Its slot on the device, and that on the host."""
        assert self.core.rows is not None
        return self.core.memory.states.get(node), self.core.rows.states.get(node)

    def is_end(self, node: Node) -> bool:
        """Whether a request ended at the state."""
        assert self.core.rows is not None
        return node in self.core.memory.ends or node in self.core.rows.ends

    def copy(self, node: Node, start: int) -> Any:
        """From the host where that has it, once all copies under way are there; else from the device."""
        core, rows, tier = self.core, self.core.rows, self.core.tier
        assert rows is not None
        assert tier is not None
        if tier.being_copied:
            self.cache.settle()
        if node in rows.states:
            return self.pages.read(rows.path_rows(node, start), rows.states[node])
        return self.pages.read_device(core.memory.path_indices(node)[start:], core.memory.states[node])


def store_of(cache: SavedCache) -> DeviceStore | TierStore:
    """The store of `cache`; raises what the stores do."""
    if isinstance(cache.tree_core, TieredTreeCore):
        return TierStore(cast(TieredCache, cache))
    return DeviceStore(cache)


def lies_where_it_lay(before: Places, now: Places) -> bool:
    """True if a state still lies in one of the slots in which it lay."""
    return any(old is not None and old is new for old, new in zip(before, now, strict=True))
