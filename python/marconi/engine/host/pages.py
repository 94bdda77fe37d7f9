"""The contents of SGLang's host pools, page by page, in the form in which it gives them to a store behind the host.

A page of KV is all layers of as many tokens, one of states is all layers of one state; both are flat, and their order
within is that of the pool's layout. What the device alone holds is read through rows that no copy may take
(`staging_tokens`), by the controller that makes the copies.

Source: `get_data_page` and `set_from_flat_data_page` of `srt/mem_cache/pool_host/`. Owner: the scheduler's thread.
"""

from typing import Any, Final

import torch
from sglang.srt.managers.cache_controller import CacheOperation
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.platforms import current_platform

_STAGING_TOKENS: Final = 1024
_STAGING_SHARE: Final = 16


def staging_tokens(pools: Any) -> int:
    """Rows of KV, whole pages, that are kept free for reading the device: 1,024, or a 16th of a smaller pool."""
    pool = pools.get_pool(PoolName.KV)
    num_tokens = min(_STAGING_TOKENS, pool.available_size() // _STAGING_SHARE)
    return max(num_tokens // pool.page_size, 1) * int(pool.page_size)


class HostPages:
    """The pages of KV and states. Rows are int64 and of whole pages, in order."""

    def __init__(self, pools: Any, controller: Any) -> None:
        """`pools` is SGLang's `HostPoolGroup`, which nothing has taken from yet, `controller` what copies to them.

        Raises `NotImplementedError` for pools that SGLang has no flat pages of.
        """
        names = set(pools.entry_map)
        if names != {PoolName.KV, PoolName.MAMBA}:
            raise NotImplementedError(f"pools of {', '.join(sorted(map(str, names)))}")
        self._pools = pools
        self._controller = controller
        self._staging_tokens = staging_tokens(pools)
        self._empty = {name: self._pool(name).get_data_page(0)[:0].clone() for name in names}
        self._sizes = {name: self._pool(name).get_data_page(0).numel() for name in names}
        self.layout = f"host pages ({pools.layout}) of " + ", ".join(
            f"{str(self._empty[name].dtype).removeprefix('torch.')}[{self._sizes[name]}]" for name in sorted(names)
        )

    def take(self, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Rows for `num_tokens` and a slot, or None if there are not so many."""
        rows = self._pools.alloc(num_tokens)
        if rows is None:
            return None
        slot = self._pools.alloc(1, pool=PoolName.MAMBA)
        if slot is None:
            self._pools.free(rows)
            return None
        return rows.clone(), slot.clone()

    def give_back(self, rows: torch.Tensor, slot: torch.Tensor | None = None) -> None:
        """Give rows, and a slot, back to their pools."""
        self._pools.free(rows)
        if slot is not None:
            self._pools.free(slot, pool=PoolName.MAMBA)

    def read(self, rows: torch.Tensor, slot: torch.Tensor) -> list[torch.Tensor]:
        """Copy the pages of KV at `rows`, and the state in `slot`; a row of each tensor is a page."""
        return [self._read(PoolName.KV, rows), self._read(PoolName.MAMBA, slot)]

    def read_device(self, kv: torch.Tensor, slot: torch.Tensor) -> list[torch.Tensor]:
        """Copy the same of what lies at the device's indices `kv` and `slot`, once all that writes there is done."""
        current_platform.synchronize()
        parts = kv.split(self._staging_tokens) if len(kv) else (kv,)
        taken = self.take(max(map(len, parts)))
        assert taken is not None, "rows that no copy may take are taken"
        rows, host_slot = taken
        try:
            pages = list[torch.Tensor]()
            for part in parts:
                self._to_host(part, rows[: len(part)], slot, host_slot)
                pages.append(self._read(PoolName.KV, rows[: len(part)]))
            return [torch.cat(pages), self._read(PoolName.MAMBA, host_slot)]
        finally:
            self.give_back(rows, host_slot)

    def write(self, name: PoolName, rows: torch.Tensor, pages: torch.Tensor) -> None:
        """Write a row of `pages` to each page of `rows`; `ValueError` where a page has another size."""
        if pages.shape[1] != self._sizes[name]:
            raise ValueError(f"a page of {name} must have {self._sizes[name]} elements, got {pages.shape[1]}")
        pool = self._pool(name)
        for row, page in zip(rows[:: pool.page_size].tolist(), pages, strict=True):
            pool.set_from_flat_data_page(row, page)

    def _pool(self, name: PoolName) -> Any:
        return self._pools.get_pool(name)

    def _read(self, name: PoolName, rows: torch.Tensor) -> torch.Tensor:
        pool = self._pool(name)
        pages = [pool.get_data_page(row) for row in rows[:: pool.page_size].tolist()]
        return torch.stack(pages) if pages else self._empty[name].reshape(0, self._sizes[name])

    def _to_host(self, kv: torch.Tensor, rows: torch.Tensor, slot: torch.Tensor, host_slot: torch.Tensor) -> None:
        controller = self._controller
        state = PoolTransfer(name=PoolName.MAMBA, host_indices=host_slot, device_indices=slot)
        operation = CacheOperation(rows, kv, -1, pool_transfers=[state])
        transfers = controller._l2_transfers(*controller._move_write_operation(operation))
        controller.l2_transfer_engine.submit_device_to_host(transfers).finish_event.synchronize()
