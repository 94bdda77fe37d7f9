"""Forward passes that end late, as SGLang's one pool finds when it asks the device, each rank at its own time.

A pass is launched with the step that it belongs to and has ended at the latest when its result is taken. Until then a
rank that asks finds at random that it has; the old places of entries that SGLang moves meanwhile stay pending. A stream
that waits for a pass ends it. Where transfers of a prefill server, or copies to a host tier, forbid moves, ranks close
gaps at the same steps, as they do in SGLang, and transfers begin and end at the same steps. Sources of what it stands
for: `torch.cuda.Event`, `Scheduler.run_batch`, `unified_memory_disagg_move_gate`.
"""

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

END_RATE = 0.2
"""Of queries, those that find a pass ended."""
FLUSH_RATE = 0.5
"""Of steps, those before which a rank closes gaps as SGLang does while idle."""
TRANSFER_RATE = 0.5
"""Of a prefill server's steps, those that begin while a transfer is under way."""


class Pass:
    """A forward pass, in place of the event at its end."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.has_ended = False

    def query(self) -> bool:
        """Whether it has ended."""
        self.has_ended |= self._rng.random() < END_RATE
        return self.has_ended


class LatePasses:
    """The passes over SGLang's one pool `kv`; `seed` is the rank's own, `together` the same on every rank."""

    def __init__(
        self, kv: Any, seed: int, together: random.Random | None = None, *, has_transfers: bool = False
    ) -> None:
        """With `together` ranks close gaps at the same steps; `has_transfers` is of a prefill server."""
        self._kv = kv
        self._together = together
        self._has_transfers = False
        self._is_prefill = has_transfers
        if has_transfers:
            kv.set_disagg_move_gate(lambda: not self._has_transfers)
        self._sides = kv.full_attn_allocator, kv.mamba_allocator
        self._rng = random.Random(seed)  # noqa: S311 - a workload, not a secret
        self._under_way: list[Pass] = []
        self.num_waits = 0
        """Times that a stream had to wait for a pass."""
        self.num_pending = 0
        """Old places that were pending, summed over the steps."""

    def patch(self, patch: pytest.MonkeyPatch) -> None:
        """Let the streams of CUDA be of these passes."""
        patch.setattr(torch.cuda, "current_stream", lambda *_: SimpleNamespace(wait_event=self._wait))

    def before_step(self) -> None:
        """Gaps are closed, at a time that is this rank's own or that of all."""
        rng = self._together or self._rng
        self._has_transfers = self._is_prefill and rng.random() < TRANSFER_RATE
        if rng.random() < FLUSH_RATE and not self._has_transfers:
            self._kv.flush_opportunistic()
        self.num_pending += sum(len(side._pending_reuse_pages_cpu) for side in self._sides)

    def launched(self, indices: torch.Tensor) -> None:
        """A step has been launched that writes KV at `indices`."""
        event = Pass(self._rng)
        self._under_way.append(event)
        # As its own methods have it, which the CPU platform replaces where a test of the same process has chosen it.
        for side in self._sides:
            side._latest_forward_done_event, side._inflight_forward = event, None
        self._kv.full_attn_allocator._inflight_forward = (event, indices)

    def took_result(self) -> None:
        """The result of the first step whose result was not taken yet is there."""
        self._under_way.pop(0).has_ended = True

    def _wait(self, event: Pass) -> None:
        self.num_waits += not event.has_ended
        event.has_ended = True
