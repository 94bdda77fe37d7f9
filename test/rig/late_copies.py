"""SGLang's transfer engine, but for when: copies between the device and the host run late and in any order.

    to the host      runs at some step after it was asked for, another before it or after it, and reads what is there
                     by then; the scheduler hears of it when it asks after that
    to the device    what it will write holds nothing from the moment when it is asked for; it runs at some step, or at
                     the latest when a forward pass waits for it

Where an entry of one pool lies is looked up when its copy is asked for, so that one that is moved meanwhile is seen.
What is copied are the numbers of `contents.py`. Source of what it stands for: `srt/mem_cache/l2_transfer.py`.
"""

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.l2_transfer import TransferCompletion
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost

from rig.contents import LEFT_ALONE, Contents

RUN_RATE = 0.2
"""Of copies under way, each step."""


class Copy:
    """A copy that is to run, in place of the event at its end."""

    def __init__(self, run: Callable[[], object]) -> None:
        self._run: Callable[[], object] | None = run

    def query(self) -> bool:
        """Whether it has run."""
        return self._run is None

    def synchronize(self) -> None:
        """Run it, if it has not."""
        run, self._run = self._run, None
        if run is not None:
            run()


class LateCopies:
    """Between `contents` and the host pools of `cache`, whose copies it makes from now on."""

    def __init__(self, cache: Any, contents: Contents, seed: int) -> None:
        controller, pools = cache.cache_controller, cache.host_pool_group.entries
        self._contents = contents
        self._rng = random.Random(seed)  # noqa: S311 - a workload, not a secret
        self._host = {
            id(each.host_pool): np.full(each.host_pool.logical_size, LEFT_ALONE, dtype=np.int64) for each in pools
        }
        self._under_way: list[Copy] = []
        self._loads: list[Copy] = []
        controller.l2_transfer_engine = self

    def advance(self) -> None:
        """Time passes."""
        self._under_way = [copy for copy in self._under_way if not copy.query()]
        for copy in self._rng.sample(self._under_way, len(self._under_way)):
            if self._rng.random() < RUN_RATE:
                copy.synchronize()

    @property
    def num_under_way(self) -> int:
        """Copies that have not run yet."""
        return sum(not copy.query() for copy in self._under_way)

    def finish(self) -> None:
        """All that is under way runs."""
        for copy in self._under_way:
            copy.synchronize()

    def wait_for_loads(self) -> None:
        """A forward pass needs what is being loaded."""
        while self._loads:
            self._loads.pop().synchronize()

    # As SGLang's controller calls it

    def submit_device_to_host(self, transfers: Sequence[Any]) -> TransferCompletion:
        """Copy to the host."""
        places = [self._places(each) for each in transfers]

        def run() -> None:
            for each, place in zip(transfers, places, strict=True):
                marks = self._contents.read(place, are_slots=_is_state(each))
                self._host[id(each.host_pool)][each.host_indices.numpy()] = marks

        return self._submit(run)

    def submit_host_to_device(
        self, transfers: Sequence[Any], *, transfer_layer_id_max: int, start_event: Any, on_layer_done: Any
    ) -> TransferCompletion:
        """Copy to the device."""
        places = [self._places(each) for each in transfers]
        for each, place in zip(transfers, places, strict=True):
            self._contents.write(place, LEFT_ALONE, are_slots=_is_state(each))

        def run() -> None:
            for each, place in zip(transfers, places, strict=True):
                marks = self._host[id(each.host_pool)][each.host_indices.numpy()]
                self._contents.write(place, marks, are_slots=_is_state(each))
            for layer in range(transfer_layer_id_max):
                on_layer_done(layer)

        completion = self._submit(run)
        self._loads.append(completion.finish_event)
        return completion

    def _submit(self, run: Callable[[], object]) -> TransferCompletion:
        copy = Copy(run)
        self._under_way.append(copy)
        return TransferCompletion(None, copy, timing_enabled=False)

    def _places(self, transfer: Any) -> torch.Tensor:
        return self._contents.places(transfer.device_indices, are_slots=_is_state(transfer))


def _is_state(transfer: Any) -> bool:
    return isinstance(transfer.host_pool, MambaPoolHost)
