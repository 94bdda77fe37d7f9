"""A store whose objects are known to be whole and to be this model's; stands in the place of SGLang's.

    name     SGLang's hash of the path up to a page, and the identity of who computes it: configuration, weights,
             layout, versions, device and kernels. A server that differs in any of it neither reads nor replaces them
    seal     a digest of the name and the bytes, XXH3, at the end of every object. What is damaged, cut or in the place
             of another is removed, named in the log and counted, and is a miss

Until the weights are digested, and again after a flush (they may have been updated), nothing is read or written. What
the store raises is a miss or a page that was not written, and is logged once until it works again: nothing leaves the
threads that SGLang reads and writes in.

Source of the interface: the class `HiCacheStorage` of `srt/mem_cache/hicache_storage.py`. Owner: those threads; the
scheduler's reads the counts.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Final

import torch
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer, PoolTransferResult
from xxhash import xxh3_128

from marconi.engine.store.base import Objects
from marconi.engine.store.files import Files
from marconi.engine.store.identity import Unusable, Weights
from marconi.engine.store.mooncake import Mooncake

logger = logging.getLogger(__name__)

SEAL_BYTES: Final = 16
_BYTES_AT_ONCE: Final = 1 << 25
"""The most in one call, unless one object is more."""


@dataclass(slots=True)
class ObjectTraffic:
    """Objects that were read or written."""

    num_objects: int = 0
    num_bytes: int = 0
    seconds: float = 0.0
    num_failed: int = 0
    """Errors of the store, in which an object was neither missing nor damaged."""
    is_failing: bool = False
    """Whether the last call failed."""

    def moved(self, num_objects: int, num_bytes: int, start_s: float) -> None:
        """Count what a call has moved that began at `start_s`."""
        self.num_objects += num_objects
        self.num_bytes += num_bytes
        self.seconds += time.perf_counter() - start_s
        self.is_failing = False

    def failed(self, doing: str) -> None:
        """Count the error that is being handled, and log it if it is the first of a row."""
        self.num_failed += 1
        if not self.is_failing:
            logger.exception("marconi: the store behind the host cannot be %s; it is tried again", doing)
        self.is_failing = True


class SealedStore:
    """A store with names of one model and sealed objects."""

    def __init__(self, backend: Any, pools: Any) -> None:
        """`backend` is SGLang's, and `pools` its `HostPoolGroup`. Nothing is found before `use`."""
        self._pools = pools
        self._facts = ""
        self._weigh: Callable[[], Weights] | None = None
        self._weights: Weights | None = None
        self._identity: str | None = None
        self.read, self.written = ObjectTraffic(), ObjectTraffic()
        self.num_damaged = 0
        self.open(backend)

    def open(self, backend: Any) -> None:
        """Take SGLang's `backend` in the place of the one before."""
        self._backend = backend
        self._objects: Objects = (
            Files(backend) if hasattr(_below(backend), "file_path") else Mooncake(backend, self._pools)
        )
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
    def number(self) -> int:
        """64 bits that the servers which read each other's objects share, not 0; it must be ready."""
        digest = blake2b(f"{self._objects.place}\n{self._identity}".encode(), digest_size=8).digest()
        return int.from_bytes(digest) | 1

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
            return self._objects.find([f"{key}-{identity}" for key in keys], pool_transfers)
        except Exception:
            self.read.failed("asked")
            return PoolTransferResult.empty()

    def batch_get(self, keys: list[str], target_locations: list[torch.Tensor]) -> list[torch.Tensor | None]:
        """Read pages of KV into `target_locations`, flat tensors; None for each from the first that is not there."""
        num_read = self._read(PoolName.KV, keys, target_locations)
        return [*target_locations[:num_read], *([None] * (len(keys) - num_read))]

    def batch_set(self, keys: list[str], values: list[torch.Tensor]) -> bool:
        """Write pages of KV, flat tensors, up to the first that fails."""
        return self._write(PoolName.KV, keys, values) == len(keys)

    def batch_get_v2(self, transfers: list[PoolTransfer], extra_info: Any = None) -> dict[str, list[bool]]:
        """Read objects of other pools into the host's memory, up to the first that is not there."""
        found: dict[str, list[bool]] = {}
        for transfer in transfers:
            pool, rows = self._places(transfer)
            pages = [pool.get_dummy_flat_data_page() for _ in rows]
            num_read = self._read(transfer.name, transfer.keys or [], pages)
            for row, page in zip(rows[:num_read], pages, strict=False):
                pool.set_from_flat_data_page(row, page)
            found[transfer.name] = [at < num_read for at in range(len(rows))]
        return found

    def batch_set_v2(self, transfers: list[PoolTransfer], extra_info: Any = None) -> dict[str, list[bool]]:
        """Write objects of other pools from the host's memory, up to the first that fails."""
        found: dict[str, list[bool]] = {}
        for transfer in transfers:
            pool, rows = self._places(transfer)
            pages = [pool.get_data_page(row) for row in rows]
            num_written = self._write(transfer.name, transfer.keys or [], pages)
            found[transfer.name] = [at < num_written for at in range(len(rows))]
        return found

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Do nothing for a pool that joins late: pools are looked up when they are needed."""

    def clear(self) -> Any:
        """Remove every object in the folder, those of other servers and models as well, as SGLang does."""
        return self._backend.clear()

    def get_stats(self) -> Any:
        """The numbers of SGLang's store."""
        return self._backend.get_stats()

    def close(self) -> None:
        """Digest no further, and leave the store."""
        self.end()
        self._objects.close()

    # Objects

    def _places(self, transfer: PoolTransfer) -> tuple[Any, list[int]]:
        """The pool, and the first row of every object there."""
        pool, rows = self._pools.get_pool(transfer.name), transfer.host_indices
        assert rows is not None
        return pool, rows[:: pool.page_size].tolist()

    def _read(self, pool: str, keys: Sequence[str], pages: Sequence[torch.Tensor]) -> int:
        """Read objects of one length; returns how many of the first are there and whole."""
        num_read, traffic = 0, self.read
        for named, bodies in self._calls(pool, keys, pages):
            num_bytes, start_s = len(bodies[0]) + SEAL_BYTES, time.perf_counter()
            try:
                parts = self._objects.memory(len(named) * num_bytes).view(len(named), num_bytes)
                lengths = self._objects.read(named, list(parts))
            except Exception:
                traffic.failed("read")
                break
            num_whole = 0
            for name, body, part, length in zip(named, bodies, parts, lengths, strict=True):
                if length is None or not self._is_whole(name, part, length):
                    break
                body.copy_(part[:-SEAL_BYTES])
                num_whole += 1
            traffic.moved(num_whole, num_whole * num_bytes, start_s)
            num_read += num_whole
            if num_whole < len(named):
                break
        return num_read

    def _is_whole(self, name: str, part: torch.Tensor, length: int) -> bool:
        """Whether an object is what was written; one that is not is removed, as it would be in the place of others."""
        if length == len(part) and bytes(part[-SEAL_BYTES:].numpy()) == seal(name, part[:-SEAL_BYTES]):
            return True
        why = "its seal is broken" if length == len(part) else f"its length is not {len(part)} bytes"
        self.num_damaged += 1
        where = self._objects.remove(name)
        logger.warning("marconi: %s must be an object that a server wrote, and %s: it is removed", where, why)
        return False

    def _write(self, pool: str, keys: Sequence[str], pages: Sequence[torch.Tensor]) -> int:
        """Write the objects of one length that are not there; returns how many of the first are."""
        num_written, traffic = 0, self.written
        for named, bodies in self._calls(pool, keys, pages):
            num_bytes, start_s = len(bodies[0]) + SEAL_BYTES, time.perf_counter()
            try:
                missing = self._objects.missing(named)
                parts = self._objects.memory(len(missing) * num_bytes).view(len(missing), num_bytes)
                for at, part in zip(missing, parts, strict=True):
                    part[:-SEAL_BYTES] = bodies[at]
                    part[-SEAL_BYTES:] = torch.frombuffer(seal(named[at], bodies[at]), dtype=torch.uint8)
                num_new = self._objects.write([named[at] for at in missing], list(parts))
            except Exception:
                traffic.failed("written")
                break
            traffic.moved(num_new, num_new * num_bytes, start_s)
            if num_new < len(missing):
                traffic.num_failed += 1
                num_written += missing[num_new]
                break
            num_written += len(named)
        return num_written

    def _calls(
        self, pool: str, keys: Sequence[str], pages: Sequence[torch.Tensor]
    ) -> Iterator[tuple[list[str], list[torch.Tensor]]]:
        """Names and bytes of objects, as many as a call moves at once; ends when nothing is read or written any more.

        The scheduler may decide that at any time.
        """
        suffix = "" if pool == PoolName.KV else f".{pool}"
        bodies = [page.contiguous().view(torch.uint8).view(-1) for page in pages]
        num_at_once = max(1, _BYTES_AT_ONCE // (len(bodies[0]) + SEAL_BYTES)) if bodies else 1
        for start in range(0, len(bodies), num_at_once):
            identity, end = self._identity, start + num_at_once
            if identity is None:
                break
            yield [f"{key}-{identity}{suffix}" for key in keys[start:end]], bodies[start:end]


def seal(name: str, body: torch.Tensor) -> bytearray:
    """The seal of the bytes `body`, uint8, of an object: as many bytes as `SEAL_BYTES`."""
    digest = xxh3_128(name.encode())
    digest.update(body.numpy().data)
    return bytearray(digest.digest())


def _below(backend: Any) -> Any:
    """SGLang's store itself, also where its own tests inject faults above it."""
    return getattr(backend, "_backend", backend)
