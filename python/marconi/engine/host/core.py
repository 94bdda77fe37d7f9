"""The tree core with a host tier: what SGLang's copies and loads ask of it.

A copy to the host takes SGLang's own steps: what is missing there (`build_backup_spec`), where it was put
(`commit_backup`), that it is under way and that it is there (`mark_write_through_pending`, `finish_write_through`).
Which nodes are copied is chosen ahead (`policy/write_behind.py`), and room for them is made before SGLang is asked for
it. A load is the cache's own (`host/cache.py`).

A node that the host alone holds has no memory on the device that a lock could keep: the lock is empty, and so is its
return.
"""

from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import DecLockRefParams, DecLockRefResult, IncLockRefResult
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

from marconi.engine.cache.tree_core import ROOT, MarconiTreeCore
from marconi.engine.host.rows import HostRows
from marconi.policy.write_behind import WriteBehind
from marconi.tree.invariants import check_host

_NOTHING = (ComponentType.FULL, ComponentType.MAMBA)


class TieredTreeCore(MarconiTreeCore):
    """KV and states of one scheduler, on the device and on the host."""

    rows: HostRows | None = None
    """None until there are host pools; who sets it resets the core."""

    def reset(self) -> None:
        """Hold nothing in either tier."""
        if self.rows is not None:
            self.rows.clear()
        super().reset()

    @property
    def tier(self) -> WriteBehind | None:
        """The host tier; None until there are host pools."""
        tier = self.hybrid.host
        assert tier is None or isinstance(tier, WriteBehind)
        return tier

    def set_hicache_enabled(self) -> None:
        """There are host pools."""
        self.enable_hicache = True

    # Handles and locks

    def _forget_handles(self) -> None:
        """Forget nodes without a state or a copy, like the device's core: SGLang may ask for copies as well."""
        num_copies = 0 if self.tier is None else self.tier.copies.num_states
        if len(self._nodes) > 64 + 2 * (self.hybrid.tree.num_nodes + num_copies):
            self._nodes = {serial: node for serial, node in self._nodes.items() if node.is_live or node.is_hosted}

    def inc_lock_ref(self, node_id: int, skip_lock_components: Any = ()) -> IncLockRefResult:
        """Lock a node on the device, if it has a state there."""
        if node_id != ROOT and not self._nodes[node_id].has_state:
            return IncLockRefResult(node_id=node_id, skipped_lock_components=_NOTHING)
        return super().inc_lock_ref(node_id, skip_lock_components)

    def inc_host_lock_ref(self, node_id: int) -> IncLockRefResult:
        """Keep the copy of a node, if it has one."""
        copy = None if node_id == ROOT else self._nodes[node_id].host_copy
        if copy is None or not copy.is_held or self.tier is None:
            return IncLockRefResult(node_id=node_id, skipped_lock_components=_NOTHING)
        self.tier.lock(copy)
        return IncLockRefResult(node_id=node_id)

    def dec_host_lock_ref(self, node_id: int, params: DecLockRefParams | None = None) -> DecLockRefResult:
        """Give such a lock back."""
        assert params is not None, "a lock without its receipt"
        if node_id != ROOT and ComponentType.FULL not in params.skipped_lock_components:
            copy = self._nodes[node_id].host_copy
            assert copy is not None
            assert self.tier is not None
            self.tier.unlock(copy)
        return DecLockRefResult()

    # Copies

    def is_backuped(self, node_id: int) -> bool:
        """True if the host holds the state of a node, or a store behind it may hold more of its path."""
        return node_id != ROOT and (self.enable_storage or self._nodes[node_id].has_copy)

    def build_backup_spec(self, node_id: int) -> tuple[torch.Tensor, dict[ComponentType, list[PoolTransfer]]]:
        """The KV of a node's path that the host has not, and its state."""
        node = self._nodes[node_id]
        assert self.rows is not None
        kv = self.memory.path_indices(node)[self.rows.num_filled_tokens(node) :]
        return kv, {ComponentType.MAMBA: [PoolTransfer(name=PoolName.MAMBA, device_indices=self.memory.states[node])]}

    def commit_backup(
        self, node_id: int, host_indices: torch.Tensor, comp_xfers: dict[ComponentType, list[PoolTransfer]]
    ) -> None:
        """Fill `host_indices` with the missing KV, and the slot of `comp_xfers` with the state."""
        (state,) = comp_xfers[ComponentType.MAMBA]
        assert self.rows is not None
        assert state.host_indices is not None
        node = self._nodes[node_id]
        self.rows.fill(node, host_indices, state.host_indices.clone())
        self.rows.num_copied += 1
        if node in self.memory.ends:
            self.rows.ends.add(node)

    def mark_write_through_pending(self, node_ids: list[int], ack_id: int) -> list[int]:
        """The copy of a node is under way."""
        assert self.tier is not None
        for node_id in node_ids:
            self.tier.begin(self._nodes[node_id])
        return node_ids

    def finish_write_through(self, node_ids: list[int], ack_id: int) -> None:
        """The copy of a node is there."""
        assert self.tier is not None
        for node_id in node_ids:
            self.tier.finish(self._nodes[node_id])

    # What a store behind the host is asked for (`store/cache.py`)

    def prefetch_anchor_info(self, node_id: int) -> tuple[None, None]:
        """Every path is asked for from its root."""
        return None, None

    def build_hicache_transfers(self, component_type: ComponentType, *_: Any, **__: Any) -> list[PoolTransfer] | None:
        """The state behind the last page that is found; SGLang fills in its key."""
        if component_type is not ComponentType.MAMBA:
            return None
        return [PoolTransfer(name=PoolName.MAMBA, keys=[""], hit_policy=PoolHitPolicy.TRAILING_PAGES)]

    # Loads

    def finish_load_back(self, anchor_node_id: int) -> None:
        """Nothing: what is loaded was the tree's from the moment when it was asked for."""

    def sanity_check(
        self, ongoing_write_through: list[tuple[int, int]], ongoing_load_back: list[tuple[int, int]]
    ) -> None:
        """Raise `AssertionError` where tree, memory and totals of either tier disagree."""
        super().sanity_check([], [])
        if self.rows is not None and self.tier is not None:
            tree = self.hybrid.tree
            check_host(tree, self.tier.copies)
            self.rows.check_invariants([n for root in tree.roots.values() for n in root.walk() if n.is_hosted])
