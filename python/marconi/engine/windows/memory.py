"""KV of layers that attend in a sliding window, held for the states of the tree and for nothing else.

SGLang gives each token an index in its pool of full attention and one in its smaller pool of windows, and maps the
first to the second. The tree's KV stays as long as its path has a state; of the other pool only the windows before
states stay (`marconi/tree/windows.py`), each until the last state that needs it is evicted. So a match need not look at
windows: where there is a state, its window is there.

    insert    the new state's window is held. Parts of it that the tree has given back were computed anew by the
              request, which resumed from a shallower state: the tree's tokens are mapped to the request's
    evict     where windows are short, states are evicted, by the order of those; each frees the part of its window
              that no other needs

A request frees by itself what it has moved past, as in stock, and never what the tree holds. A window's bytes are part
of its state's (`plugin/backend.py`).

Sources: `srt/mem_cache/allocator/swa.py`, `srt/mem_cache/unified_cache/components/swa.py`. Owner: the tree core.
"""

from collections.abc import Iterable
from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import InsertParams
from sglang.srt.mem_cache.unified_cache.cache_action import (
    CacheAction,
    ComponentAction,
    FreeComponentDeviceSlot,
    FreeDeviceKV,
    FreeDeviceKVFullOnly,
    RecoverEvictedSWA,
)
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

from marconi.engine.cache.memory import DeviceMemory, path_up
from marconi.events.tree_log import TreeLog
from marconi.tree import Node
from marconi.tree.windows import Windows


class WindowedMemory(DeviceMemory):
    """The device's memory of a model with sliding windows. Windows are whole pages."""

    def __init__(self, device: torch.device | str, window_tokens: int, log: TreeLog | None = None) -> None:
        super().__init__(device, log)
        self._windows = Windows(window_tokens, self.states.__contains__)
        self._protected = Windows(window_tokens, lambda node: node.num_locks > 0)
        self._freed_windows: list[torch.Tensor] = []

    @property
    def num_window_tokens(self) -> int:  # type: ignore[override] # no other memory counts them
        """Tokens of KV in sliding windows that are held."""
        return self._windows.num_tokens

    @property
    def num_protected_window_tokens(self) -> int:  # type: ignore[override]
        """Tokens of them that are in use."""
        return self._protected.num_tokens

    def num_resident(self, node: Node) -> int:
        """Tokens before the end of the span of `node` that layers with sliding windows have KV of."""
        return self._windows.num_held(node)

    def settle(self, node: Node, params: InsertParams, num_held: int) -> list[CacheAction | ComponentAction]:
        """Hold the window before `node`, and free all else that came with its path."""
        assert params.value is not None
        incoming, num_tokens = params.value, node.depth
        # Before that either the tree has the request's KV, or the request has freed its windows.
        first = max(params.prev_prefix_len, params.get_evicted_seqlen(ComponentType.SWA))
        brought = list[tuple[int, int]]()
        for change in self._windows.changed(node):
            start = change.node.depth - change.num_now
            assert start >= first, f"{node}: of its window what lies before {first} is gone, from {start}"
            brought.append((start, min(change.node.depth - change.num_before, num_held)))
        brought = [part for part in reversed(brought) if part[0] < part[1]]
        actions: list[CacheAction | ComponentAction] = []
        if brought:
            ours = _cut(self.path_indices(node), brought)
            actions.append(RecoverEvictedSWA(ComponentType.SWA, ours, _cut(incoming, brought)))
        # Another request has brought the same KV first.
        if len(freed := _cut(incoming, [(params.prev_prefix_len, min(first, num_held)), *brought])):
            actions.append(FreeDeviceKVFullOnly([freed]))
        if len(freed := _cut(incoming, _between(first, num_held, brought))):
            actions.append(FreeDeviceKV([freed]))
        kept = []
        for each in path_up(node):
            if each.depth <= num_held:
                break
            kept.append((each.depth - self._windows.num_held(each), each.depth))
        if len(freed := _cut(incoming, _between(max(first, num_held), num_tokens, kept[::-1]))):
            actions.append(FreeComponentDeviceSlot([freed], ComponentType.SWA))
        return actions

    def give_back(self, kv_allocator: Any, state_allocator: Any) -> None:
        """Give SGLang's allocators what is no longer held, windows first: their indices hang on the others."""
        windows, self._freed_windows = self._freed_windows, []
        if windows:
            kv_allocator.free_swa_segment(torch.cat(windows), start_pos=0)
        for kv in self.take_freed_kv():
            kv_allocator.free_full_segment(kv, start_pos=0)
        super().give_back(kv_allocator, state_allocator)

    # Locks

    def protect(self, node: Node) -> None:
        """A lock was taken on `node`."""
        super().protect(node)
        self._protected.changed(node)

    def unprotect(self, node: Node) -> None:
        """A lock was given back on `node`."""
        super().unprotect(node)
        self._protected.changed(node)

    def move_protection(self, old: Node | None, new: Node) -> None:
        """A lock was taken on `new` and one given back on `old`, at or above it."""
        super().move_protection(old, new)
        for node in (new, old):
            if node is not None:
                self._protected.changed(node)

    # Changes of the tree

    def dropped_state(self, node: Node) -> None:
        """The state's slot can be freed, and the part of its window that no other state needs."""
        super().dropped_state(node)
        for change in self._windows.changed(node):
            indices = self.path_indices(change.node, change.node.parent)
            end = len(indices)
            self._freed_windows.append(indices[end - change.num_before : end - change.num_now])

    def split(self, upper: Node, lower: Node) -> None:
        """Cut the segments where `upper` ends; their windows stay."""
        super().split(upper, lower)
        self._windows.split(upper, lower)
        self._protected.split(upper, lower)

    def joined(self, upper: Node, lower: Node) -> None:
        """Put the segments together; their windows stay."""
        super().joined(upper, lower)
        self._windows.joined(upper, lower)
        self._protected.joined(upper, lower)

    def check_invariants(self, nodes: list[Node]) -> None:
        """Raise `AssertionError` unless it agrees with the live `nodes` of the tree."""
        super().check_invariants(nodes)
        self._windows.check_invariants(nodes)
        self._protected.check_invariants(nodes)


def _cut(indices: torch.Tensor, parts: Iterable[tuple[int, int]]) -> torch.Tensor:
    """The `parts` of `indices`, from start to end each, in one piece."""
    pieces = [indices[start:end] for start, end in parts if start < end]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces) if pieces else indices[:0]


def _between(start: int, end: int, parts: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The parts from `start` to `end` between `parts`, which rise."""
    left = []
    for first, last in parts:
        if start < min(first, end):
            left.append((start, min(first, end)))
        start = max(start, last)
    if start < end:
        left.append((start, end))
    return left
