"""Checkpoints in int8 (`--enable-int8-mamba-checkpoint`), as the cache takes slots for them.

    prefill    leaves a planned state in a live slot, in full precision; a checkpoint slot is taken with it
    keep       the state is rounded into the checkpoint slot, once, and its live slot is free
    hit        SGLang scales the checkpoint back into the request's live slot, which runs in full precision

A request's own state is never rounded while it runs. Where no slot is available a state is not kept: a miss later on.

Checkpoint slots that belong to states which are not rounded yet are *promised*, one for each; which is whose is open
until then. What is short of live slots is helped by no eviction, since the tree has none: `policy/int8.py` sizes their
pool by what requests hold, and a hit for which none is left is no hit, for now.

States are rounded on the stream of forward passes, where overlapped scheduling has one: a pass that is under way may
still write a live slot, or read a checkpoint slot that was freed since.

Source of what it extends: `srt/mem_cache/mamba_checkpoint_pool.py`, `srt/mem_cache/unified_cache/components/mamba.py`.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.mamba_checkpoint_pool import MambaCheckpointPool

from marconi.engine.cache.pools import DevicePools, Targets, num_drawn
from marconi.engine.cache.tree_core import MarconiTreeCore
from marconi.lifecycle.pools import Amount
from marconi.tree import Freed, Node


class Int8DevicePools(DevicePools):
    """States of the tree in int8, those of requests in full precision."""

    are_slots_shared = False

    def __init__(self, requests: Any, kv: Any, forward_stream: Any = None) -> None:
        """`requests` has the checkpoint pool as well; without a stream passes run on the scheduler's own."""
        super().__init__(requests, kv)
        self.forward_stream = forward_stream
        self.promised: list[torch.Tensor] = []
        """Checkpoint slots of states that are not rounded yet, each a tensor of one index."""

    def reset(self) -> None:
        """Nothing is promised."""
        self.promised = []

    @property
    def checkpoints(self) -> MambaCheckpointPool:
        """SGLang's pool of checkpoints in int8."""
        pool = self.req_to_token_pool.mamba_ckpt_pool
        assert pool is not None, "a server without --enable-int8-mamba-checkpoint"
        return pool

    @property
    def state_slots(self) -> Any:
        """The allocator of checkpoint slots."""
        return self.checkpoints.allocator

    # Slots

    def has_slot_for_copy(self, source: Node, core: MarconiTreeCore) -> bool:
        """True if a live slot is free; those that SGLang has drawn for what waits are as well."""
        live = self.req_to_token_pool.mamba_allocator
        return int(live.available_size()) + num_drawn(live) > 0

    def spares_slot(self, evictable: Amount, reserved: Amount) -> bool:
        """A live slot is free beyond `reserved`, and a checkpoint."""
        if self.req_to_token_pool.mamba_allocator.available_size() <= reserved.num_states:
            return False
        return bool(self.state_slots.available_size() + evictable.num_states > 0)

    def take_planned(self) -> torch.Tensor | None:
        """A live slot, and the promise of a checkpoint."""
        if not self.promise():
            return None
        slot: torch.Tensor = self.req_to_token_pool.mamba_allocator.alloc(1)
        return slot

    def promise(self) -> bool:
        """Promise a free checkpoint to a state; False if there is none."""
        slot = self.state_slots.alloc(1)
        if slot is not None:
            self.promised.append(slot)
        return slot is not None

    def join(self, slots: dict[int, torch.Tensor], end_depth: int | None) -> dict[int, torch.Tensor]:
        """Round the states; what was planned frees its live slot."""
        checkpoints = {depth: self.promised.pop() for depth in slots}
        self._round(torch.cat([*slots.values()]), torch.cat([*checkpoints.values()]))
        self._free_live(slot for depth, slot in slots.items() if depth != end_depth)
        return checkpoints

    def free_unkept(self, slots: Iterable[torch.Tensor]) -> None:
        """Free live slots of states that will not be rounded, and as many promised ones."""
        unkept = [*slots]
        self._free_live(unkept)
        self.free([self.promised.pop() for _ in unkept])

    def _free_live(self, slots: Iterable[torch.Tensor]) -> None:
        for slot in slots:
            self.req_to_token_pool.mamba_allocator.free(slot)

    def evict(
        self, core: MarconiTreeCore, params: EvictParams, targets: Targets, available: Callable[[Any], int]
    ) -> Freed:
        """Evict; live slots that SGLang asks for are not the tree's to give."""
        return super().evict(core, replace(params, mamba_num=0) if targets else params, targets, available)

    # Rounding

    def _round(self, live: torch.Tensor, checkpoints: torch.Tensor) -> None:
        """Round the states in the slots `live` into the slots `checkpoints`, each (num_states,) int64."""
        with self._in_order(live, checkpoints):
            # One by one: SGLang rounds through several copies in float32.
            for source, target in zip(live.split(1), checkpoints.split(1), strict=True):
                self.checkpoints.store_from_active(self.req_to_token_pool.mamba_pool, source, target)

    @contextmanager
    def _in_order(self, *read: torch.Tensor) -> Iterator[None]:
        """Run after the forward passes that are launched, and before all later ones; `read` are the tensors used."""
        stream = self.forward_stream
        if stream is None:
            yield
            return
        device = torch.get_device_module(read[0].device)
        stream.wait_stream(device.current_stream())
        for each in read:
            each.record_stream(stream)
        with device.stream(stream):
            yield
