"""The cache of a hybrid model whose checkpoints are in int8 (`--enable-int8-mamba-checkpoint`).

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

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from operator import length_hint
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, EvictResult, MatchPrefixParams
from sglang.srt.mem_cache.mamba_checkpoint_pool import MambaCheckpointPool

from marconi.engine.cache import MarconiRadixCache, Targets
from marconi.engine.scheduler import EndState, RunningRequest, num_slots_of_requests
from marconi.policy.forecast.turns import NO_CLOSING
from marconi.policy.misses import Cause
from marconi.policy.request import Lease

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


class Int8RadixCache(MarconiRadixCache):
    """States of the tree in int8, those of requests in full precision."""

    forward_stream: Any = None
    """The stream of forward passes; None where they run on the scheduler's own."""

    @property
    def checkpoint_pool(self) -> MambaCheckpointPool:
        """SGLang's pool of checkpoints in int8."""
        pool = self.req_to_token_pool.mamba_ckpt_pool
        assert pool is not None, "a server without --enable-int8-mamba-checkpoint"
        return pool

    @property
    def state_slots(self) -> Any:
        """The allocator of checkpoint slots."""
        return self.checkpoint_pool.allocator

    def reset(self) -> None:
        """Reset like SGLang, which clears the pools with it."""
        super().reset()
        self.promised: list[torch.Tensor] = []
        """Checkpoint slots of states that are not rounded yet, each a tensor of one index."""

    # Matching

    def _look_up(self, params: MatchPrefixParams) -> Lease:
        """Like the base class, but report a miss if no live slot is left for the state."""
        lease, req = super()._look_up(params), params.req
        if lease.match.source is None or not params.cow_mamba or req is None or req.kv.holds_mamba:
            return lease
        if self._num_free_live() > 0:
            return lease
        request = lease.request
        return Lease(request, self.tree_core.hybrid.tree.match(request.path, 0, request.namespace))

    def _num_free_live(self) -> int:
        """Live slots that are free; those that SGLang has drawn for what waits are as well."""
        slots = self.req_to_token_pool.mamba_allocator
        num_drawn = length_hint(slots._alloc_iter) if slots._alloc_iter is not None else 0
        return int(slots.available_size()) + num_drawn

    # Slots and victims

    def _reserved(self, reqs: "list[Req]") -> int:
        """Live slots that requests take before the states of this prefill are rounded."""
        return num_slots_of_requests(reqs, self.req_to_token_pool)

    def _take_slot(self, reserved: int, run: RunningRequest, depth: int, now_s: float) -> torch.Tensor | None:
        """A live slot for a planned state, and the promise of a checkpoint slot."""
        live = self.req_to_token_pool.mamba_allocator
        if live.available_size() <= reserved:
            return None
        checkpoint = super()._take_slot(0, run, depth, now_s)
        if checkpoint is None:
            return None
        self.promised.append(checkpoint)
        slot: torch.Tensor = live.alloc(1)
        return slot

    def _may_keep_end(self) -> bool:
        """True if a checkpoint slot is available, which is promised to the state."""
        slot = self.state_slots.alloc(1)
        if slot is None:
            self._evict_state()
            slot = self.state_slots.alloc(1)
        if slot is not None:
            self.promised.append(slot)
        return slot is not None

    def _free_unkept(self, slots: dict[int, torch.Tensor]) -> None:
        """Free live slots of states that will not be rounded, and as many promised ones."""
        self._free_live(slots)
        self._free_slots({depth: self.promised.pop() for depth in slots})

    def _free_live(self, slots: dict[int, torch.Tensor]) -> None:
        for slot in slots.values():
            self.req_to_token_pool.mamba_allocator.free(slot)

    def _evict_state(self) -> None:
        self.evict(EvictParams(num_tokens=0, mamba_num=1))

    def _evict(self, params: EvictParams, available_size_targets: Targets | None = None, **kwargs: Any) -> EvictResult:
        """Evict; live slots that SGLang asks for are not the tree's to give."""
        if available_size_targets is not None:
            params = replace(params, mamba_num=0)
        return super()._evict(params, available_size_targets, **kwargs)

    # Keeping

    def _keep(
        self,
        req: "Req",
        lease: Lease,
        slots: dict[int, torch.Tensor],
        absent: Mapping[int, Cause],
        end_depth: int | None = None,
        closing: int = NO_CLOSING,
    ) -> None:
        """Round states from their live slots; the tree takes the checkpoints, and planned states free their slots."""
        checkpoints = {depth: self.promised.pop() for depth in slots}
        self._round(torch.cat([*slots.values()]), torch.cat([*checkpoints.values()]))
        self._free_live({depth: slot for depth, slot in slots.items() if depth != end_depth})
        super()._keep(req, lease, checkpoints, absent, end_depth, closing)

    def _release_states(self, req: "Req", kept: EndState | None) -> None:
        """Free all slots that the request holds: what the tree keeps has been rounded."""
        super()._release_states(req, None)

    def _round(self, live: torch.Tensor, checkpoints: torch.Tensor) -> None:
        """Round the states in the slots `live` into the slots `checkpoints`, each (num_states,) int64."""
        with self._in_order(live, checkpoints):
            # One by one: SGLang rounds through several copies in float32.
            for source, target in zip(live.split(1), checkpoints.split(1), strict=True):
                self.checkpoint_pool.store_from_active(self.req_to_token_pool.mamba_pool, source, target)

    @contextmanager
    def _in_order(self, *read: torch.Tensor) -> Iterator[None]:
        """Run after the forward passes that are launched, and before all later ones; `read` are the tensors used."""
        stream = self.forward_stream
        if stream is None:
            yield
            return
        device = torch.get_device_module(self.device)
        stream.wait_stream(device.current_stream())
        for each in read:
            each.record_stream(stream)
        with device.stream(stream):
            yield
