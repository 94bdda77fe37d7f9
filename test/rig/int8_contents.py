"""What a model would have put into live slots, and what was rounded from them into checkpoints in int8.

A checkpoint carries the number of the state that it was rounded from.
"""

from typing import Any

import numpy as np
import torch

from rig.contents import LEFT_ALONE, Contents


class Int8Contents(Contents):
    """Of the pools of a cache whose checkpoints are in int8."""

    def __init__(self, num_kv_indices: int, num_slots: int, num_checkpoints: int) -> None:
        """Indices run from 1 and are padded by a page, slots of both pools from 1."""
        super().__init__(num_kv_indices, num_slots)
        self.checkpoints = np.full(num_checkpoints, LEFT_ALONE, dtype=np.int64)

    def resume(self, source: int, working: int) -> None:
        """A hit: a checkpoint is scaled back into a request's working slot."""
        self.states[working] = self.checkpoints[source]

    def follow(self, rows: Any) -> None:
        """See what is rounded as well."""
        super().follow(rows)
        pool = rows.mamba_ckpt_pool
        store = pool.store_from_active

        def watched(live_pool: Any, live: torch.Tensor, checkpoints: torch.Tensor) -> None:
            store(live_pool, live, checkpoints)
            self.checkpoints[checkpoints.tolist()] = self.states[live.tolist()]

        pool.store_from_active = watched
