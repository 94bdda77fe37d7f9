"""Mooncake's store: memory of many hosts, reached by RDMA or TCP, with a master that knows where each object is.

    set up    by SGLang, from its flags, files and environment; the master, protocol and segments are its settings
    names     end in the rank that an object is of, unless each rank has all of it (KV of latents)
    moved     many objects a call, to and from memory that is registered once, a piece of it for each thread
    bounded   by the memory of its segments: the master evicts what was not used lately, and tells nobody

An object that was read a moment ago has a lease, in which it is removed by force only.

Source of what it drives: `srt/mem_cache/storage/mooncake_store/mooncake_store.py`, and the store's own interface,
`mooncake.store.MooncakeDistributedStore`, whose calls answer with a code below 0 where they fail.
"""

import threading
from collections.abc import Sequence
from typing import Any, Final

import torch
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer, PoolTransferResult
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

from marconi.engine.version import Refusal

_ABSENT: Final = -704
"""No object has that name."""
_LARGER: Final = -600
"""The object is larger than the memory for it."""
_LEAST_MEMORY_BYTES: Final = 1 << 25
_MAX_KEYS: Final = 4096
"""In a call."""


class Mooncake:
    """A rank's objects in a Mooncake store."""

    def __init__(self, backend: Any, pools: Any) -> None:
        """`backend` is SGLang's `MooncakeStore`, set up, and `pools` its `HostPoolGroup`.

        Raises `Refusal` for a store that only reaches memory of its own.
        """
        backend = getattr(backend, "_backend", backend)
        if backend.config.standalone_storage:
            raise Refusal("standalone_storage must be false, got true: states are moved from the server's own memory")
        self._store, self._pools = backend.store, pools
        config = backend.storage_config
        self._prefix = f"{backend.config_prefix}_" if backend.config_prefix else ""
        self._rank = f"-{config.tp_rank}-{config.tp_size}-{config.pp_rank}-{config.pp_size}"
        self._shares_latents = config.is_mla_model
        self.place = f"{backend.config.master_server_address} {backend.config.tenant_id}"
        self._local = threading.local()

    def find(self, names: list[str], transfers: list[PoolTransfer]) -> PoolTransferResult:
        """How many of the first of `names`, pages of KV, there are, up to one with a state: `NAME.POOL`."""
        num_pages = next(iter(self.missing(names)), len(names))
        names, num_found = names[:num_pages], {PoolName.KV: num_pages} if num_pages else {}
        restorable = set(range(1, num_pages + 1))
        for transfer in transfers:
            absent = set(self.missing([f"{name}.{transfer.name}" for name in names]))
            if transfer.hit_policy is PoolHitPolicy.ALL_PAGES:
                own = set(range(1, min(absent, default=num_pages) + 1))
            else:
                num_trailing = max(1, len(transfer.keys or ()))
                own = {end for end in restorable if absent.isdisjoint(range(max(0, end - num_trailing), end))}
            restorable &= own
            if own:
                num_found[transfer.name] = max(own)
        return PoolTransferResult(max(restorable, default=0), num_found, sorted(restorable))

    def missing(self, names: Sequence[str]) -> list[int]:
        """Which of `names` there are not, by their places."""
        keys = self._keys(names)
        calls = (keys[start : start + _MAX_KEYS] for start in range(0, len(keys), _MAX_KEYS))
        answers = [answer for some in calls for answer in self._store.batch_is_exist(some)]
        _raise_for("batch_is_exist", answers)
        return [at for at, is_there in enumerate(answers) if not is_there]

    def memory(self, num_bytes: int) -> torch.Tensor:
        """Memory that the store may read and write, of this thread."""
        memory: torch.Tensor | None = getattr(self._local, "memory", None)
        if memory is None or len(memory) < num_bytes:
            if memory is not None:
                self._store.unregister_buffer(memory.data_ptr())
                del self._local.memory
            memory = torch.empty(max(num_bytes, _LEAST_MEMORY_BYTES), dtype=torch.uint8)
            code = self._store.register_buffer(memory.data_ptr(), len(memory))
            _raise_for("register_buffer", [code])
            self._local.memory = memory
        return memory[:num_bytes]

    def read(self, names: Sequence[str], into: Sequence[torch.Tensor]) -> list[int | None]:
        """Read objects into parts of `memory`; returns the bytes of each, 0 for one that is larger than its part."""
        answers: list[int] = self._store.batch_get_into(self._keys(names), *_places(into))
        _raise_for("batch_get_into", [each for each in answers if each not in (_ABSENT, _LARGER)])
        return [None if answer == _ABSENT else max(answer, 0) for answer in answers]

    def write(self, names: Sequence[str], parts: Sequence[torch.Tensor]) -> int:
        """Write parts of `memory` as objects; returns how many of the first were written."""
        answers = self._store.batch_put_from(self._keys(names), *_places(parts))
        return next((at for at, answer in enumerate(answers) if answer), len(names))

    def remove(self, name: str) -> str:
        """Remove an object, though it was read a moment ago; returns its key."""
        (key,) = self._keys([name])
        self._store.remove(key, force=True)
        return str(key)

    def close(self) -> None:
        """Leave the store, with the memory that this rank gave it."""
        self._store.close()

    def _keys(self, names: Sequence[str]) -> list[str]:
        suffixes: dict[str, str] = {}
        for pool in {name.partition(".")[2] for name in names}:
            is_shared = isinstance(self._pools.get_pool(PoolName(pool or PoolName.KV)), MLATokenToKVPoolHost)
            suffixes[pool] = "" if self._shares_latents and is_shared else self._rank
        return [f"{self._prefix}{name}{suffixes[name.partition('.')[2]]}" for name in names]


def _places(parts: Sequence[torch.Tensor]) -> tuple[list[int], list[int]]:
    return [part.data_ptr() for part in parts], [len(part) for part in parts]


def _raise_for(call: str, answers: Sequence[int]) -> None:
    if answers and min(answers) < 0:
        raise RuntimeError(f"Mooncake's {call} failed with code {min(answers)}")
