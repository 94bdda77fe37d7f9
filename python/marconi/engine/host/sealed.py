"""A store of SGLang's whose objects are known to be whole and to be this model's.

    name     SGLang's hash of the path up to a page, and the identity of who computes it: configuration, weights,
             layout, versions, device and kernels. A server that differs in any of it neither reads nor replaces them
    seal     a digest of the name and the bytes, at the end of every object. What is damaged, cut or in the place of
             another is removed, named in the log and counted, and is a miss

Until the weights are digested, and again after a flush (they may have been updated), nothing is read or written. What
the store raises is a miss or a page that was not written: nothing leaves the threads that SGLang reads and writes in.

Source of the interface: the class `HiCacheStorage` of `srt/mem_cache/hicache_storage.py`. Owner: those threads; the
scheduler's reads the counts.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

import torch
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer, PoolTransferResult

from marconi.engine.host.identity import Unusable, Weights

logger = logging.getLogger(__name__)

SEAL_BYTES: Final = 16


@dataclass(slots=True)
class Traffic:
    """Objects that were read or written."""

    num_objects: int = 0
    num_bytes: int = 0
    seconds: float = 0.0
    num_failed: int = 0
    """Errors of the store, in which an object was neither missing nor damaged."""


class SealedStore:
    """SGLang's store of files, with names of one model and sealed objects; stands in its place."""

    def __init__(self, backend: Any, pools: Any) -> None:
        """`pools` is SGLang's `HostPoolGroup`. Nothing is found before `use`."""
        self._pools = pools
        self._facts = ""
        self._weigh: Callable[[], Weights] | None = None
        self._weights: Weights | None = None
        self._identity: str | None = None
        self.read, self.written = Traffic(), Traffic()
        self.num_damaged = 0
        self.open(backend)

    def open(self, backend: Any) -> None:
        """Take `backend` in the place of the one before; a folder in which nothing is yet becomes the user's own."""
        self._backend = backend
        self._files: Any = getattr(backend, "_backend", backend)
        """Below what SGLang injects faults with, where its own tests ask for that."""
        folder = Path(self._files.file_path)
        if not any(folder.iterdir()):
            folder.chmod(0o700)
        self.renew()

    def identify(self, facts: str, weigh: Callable[[], Weights]) -> None:
        """The server is `facts` and what `weigh` begins to digest."""
        self._facts, self._weigh = facts, weigh
        self.renew()

    def renew(self) -> None:
        """Digest the weights anew: they may be others."""
        self.end()
        if self._weigh is not None:
            self._weights = self._weigh()

    def end(self) -> None:
        """Find nothing more, and digest no further."""
        self._identity = None
        if self._weights is not None:
            self._weights.end()
            self._weights = None

    @property
    def own_identity(self) -> int | None:
        """64 bits of a digest of what the server is; None until its weights are digested, or if they cannot be."""
        if self._weights is None:
            return None
        try:
            digest = self._weights.digest
        except Unusable as error:
            self._weights = None
            logger.warning("marconi: %s; the store behind the host is not used", error)
            return None
        if digest is None:
            return None
        return int.from_bytes(blake2b(f"{self._facts}\n{digest}".encode(), digest_size=8).digest())

    def use(self, identity: str) -> None:
        """Read and write from now on, by names with `identity`, that of all ranks: some objects are for all of them."""
        self._identity = identity

    @property
    def is_ready(self) -> bool:
        """Whether it may be read and written."""
        return self._identity is not None

    @property
    def bytes_per_s(self) -> float | None:
        """The speed of reading; None before anything was read."""
        return self.read.num_bytes / self.read.seconds if self.read.seconds else None

    # What SGLang's threads call

    def batch_exists_v2(
        self, keys: list[str], pool_transfers: list[PoolTransfer], extra_info: Any = None
    ) -> PoolTransferResult:
        """How many of the first pages there are, up to one with a state."""
        identity = self._identity
        if identity is None:
            return PoolTransferResult.empty()
        try:
            named = [f"{key}-{identity}" for key in keys]
            found: PoolTransferResult = self._backend.batch_exists_v2(named, pool_transfers, extra_info)
            return found
        except Exception:
            self._failed(self.read, "asked")
            return PoolTransferResult.empty()

    def batch_get(self, keys: list[str], target_locations: list[torch.Tensor]) -> list[torch.Tensor | None]:
        """Read pages of KV into `target_locations`, flat tensors; None for each from the first that is not there."""
        found = list[torch.Tensor | None]([None] * len(keys))
        for at, (key, target) in enumerate(zip(keys, target_locations, strict=True)):
            if not self._get(key, PoolName.KV, target):
                break
            found[at] = target
        return found

    def batch_set(self, keys: list[str], values: list[torch.Tensor]) -> bool:
        """Write pages of KV, flat tensors, up to the first that fails."""
        return all(self._set(key, PoolName.KV, page) for key, page in zip(keys, values, strict=True))

    def batch_get_v2(self, transfers: list[PoolTransfer], extra_info: Any = None) -> dict[str, list[bool]]:
        """Read objects of other pools into the host's memory."""
        return {each.name: [self._load(*place) for place in self._places(each)] for each in transfers}

    def batch_set_v2(self, transfers: list[PoolTransfer], extra_info: Any = None) -> dict[str, list[bool]]:
        """Write objects of other pools from the host's memory."""
        return {
            each.name: [self._set(key, name, pool.get_data_page(row)) for key, name, pool, row in self._places(each)]
            for each in transfers
        }

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Do nothing for a pool that joins late: pools are looked up when they are needed."""

    def clear(self) -> Any:
        """Remove every object in the folder, those of other servers and models as well, as SGLang does."""
        return self._backend.clear()

    def get_stats(self) -> Any:
        """The numbers of SGLang's store."""
        return self._backend.get_stats()

    def close(self) -> None:
        """Digest no further: SGLang's store of files has nothing to close."""
        self.end()

    # Objects

    def _named(self, key: str, pool: str) -> str | None:
        """The name of an object; None while nothing is read or written, which the scheduler decides at any time."""
        identity = self._identity
        if identity is None:
            return None
        return f"{key}-{identity}" if pool == PoolName.KV else f"{key}-{identity}.{pool}"

    def _places(self, transfer: PoolTransfer) -> Sequence[tuple[str, PoolName, Any, int]]:
        """Key, pool and first row on the host of every object."""
        pool, keys, rows = self._pools.get_pool(transfer.name), transfer.keys or [], transfer.host_indices
        assert rows is not None
        firsts = rows[:: pool.page_size].tolist()
        return [(key, transfer.name, pool, row) for key, row in zip(keys, firsts, strict=True)]

    def _load(self, key: str, name: PoolName, pool: Any, row: int) -> bool:
        page = pool.get_dummy_flat_data_page()
        is_there = self._get(key, name, page)
        if is_there:
            pool.set_from_flat_data_page(row, page)
        return is_there

    def _get(self, key: str, pool: PoolName, target: torch.Tensor) -> bool:
        """Read an object, if it is whole."""
        named, body = self._named(key, pool), target.view(torch.uint8).view(-1)
        if named is None:
            return False
        sealed, start_s = torch.empty(len(body) + SEAL_BYTES, dtype=torch.uint8), time.perf_counter()
        try:
            if self._backend.get(named, sealed) is None:
                return False
        except OSError as error:
            self._damaged(named, str(error))
            return False
        except Exception:
            self._failed(self.read, "read")
            return False
        body.copy_(sealed[:-SEAL_BYTES])
        if not torch.equal(seal(named, body), sealed[-SEAL_BYTES:]):
            self._damaged(named, "its seal is broken")
            return False
        _count(self.read, len(sealed), start_s)
        return True

    def _set(self, key: str, pool: PoolName, page: torch.Tensor) -> bool:
        """Write an object, unless it is there."""
        named, body = self._named(key, pool), page.contiguous().view(torch.uint8).view(-1)
        if named is None:
            return False
        try:
            if self._backend.exists(named):
                return True
            start_s = time.perf_counter()
            is_written = bool(self._backend.set(named, torch.cat([body, seal(named, body)])))
        except Exception:
            self._failed(self.written, "written")
            return False
        if is_written:
            _count(self.written, len(body) + SEAL_BYTES, start_s)
        else:
            self.written.num_failed += 1
        return is_written

    def _failed(self, traffic: Traffic, doing: str) -> None:
        traffic.num_failed += 1
        logger.exception("marconi: the store behind the host cannot be %s", doing)

    def _damaged(self, named: str, why: str) -> None:
        """Remove an object that is not whole: it would be in the place of every later one."""
        self.num_damaged += 1
        path = Path(self._files.file_path, f"{self._files._get_suffixed_key(named)}.bin")
        logger.warning("marconi: %s must be an object that a server wrote, and %s: it is removed", path, why)
        path.unlink(missing_ok=True)


def seal(named: str, body: torch.Tensor) -> torch.Tensor:
    """The seal of the bytes `body`, uint8, of an object: as many bytes as `SEAL_BYTES`."""
    digest = blake2b(named.encode(), digest_size=SEAL_BYTES)
    digest.update(body.numpy().data)
    return torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8)


def _count(traffic: Traffic, num_bytes: int, start_s: float) -> None:
    traffic.num_objects += 1
    traffic.num_bytes += num_bytes
    traffic.seconds += time.perf_counter() - start_s
