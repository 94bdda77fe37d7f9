"""A store behind the host tier without files: what it holds, in bytes, and how long reading takes.

    objects    a state, or the KV of a unit of a path, each named by a digest of all tokens before its end
    write      the copies that the server's rule chooses between steps (`policy/store.py`): the state, and then the KV
               of its path beyond the nearest shallower stored state. An object that is there is not written again
    delete     beyond the memory, down to `KEPT_SHARE` of it, the object that was last written or read the longest ago.
               A path whose beginning was deleted is not readable
    read       if neither tier has the last `LEAST_TOKENS` of a prompt or more: the deepest state whose KV is all there,
               if that saves time and room can be made for it on the host, and the KV beyond the host's own

Reading takes the bytes over `bytes_per_s`, before the load and the prefill. A write takes no time, so none is cut off;
pages are the trace's units, and the speed is known from the start, which a server measures.

Source of what it stands for: `engine/store/cache.py`, and SGLang 0.5.23's `srt/mem_cache/hicache_storage.py` and
`srt/mem_cache/storage/file/lru_file_evictor.py`, with `max_size`.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

from marconi.policy.base import Costs
from marconi.policy.host_tier import HostTier
from marconi.policy.request import Request
from marconi.policy.store import StoreBehind, stored_above
from marconi.replay.memory import format_bytes
from marconi.tree import HostCopy, Match, RadixTree

KEPT_SHARE: Final = 0.9
"""SGLang's `eviction_ratio`."""
LEAST_TOKENS: Final = 256
"""SGLang's `prefetch_threshold`."""


@dataclass(frozen=True, slots=True)
class StoreSpec:
    """The memory of a store, and how fast it is read."""

    memory_bytes: int
    bytes_per_s: float

    def __str__(self) -> str:
        return f"{format_bytes(self.memory_bytes)} of storage at {self.bytes_per_s / 1e9:g} GB/s"


@dataclass(slots=True)
class Traffic:
    """Reads and writes of a store."""

    num_hit_tokens: int = 0
    """Tokens of prompts beyond what the device and the host had, up to the states that were read for them."""
    num_writes: int = 0
    """States that were written whole, with the KV that was not there."""
    num_written_bytes: int = 0
    num_reads: int = 0
    """States that were read, with the KV that the host lacked."""
    num_read_bytes: int = 0
    read_s: float = 0.0


class LruObjects:
    """Objects in a bounded folder, by name, the longest unused first."""

    def __init__(self, memory_bytes: int) -> None:
        self.memory_bytes = memory_bytes
        self.num_bytes = 0
        self._sizes = OrderedDict[str, int]()

    def __contains__(self, name: str) -> bool:
        return name in self._sizes

    def put(self, name: str, num_bytes: int) -> int | None:
        """Write an object unless it is there; the bytes written, None if it is larger than the folder may be."""
        if name in self._sizes:
            return 0
        if num_bytes > self.memory_bytes:
            return None
        if self.num_bytes + num_bytes > self.memory_bytes:
            most = max(int(self.memory_bytes * KEPT_SHARE) - num_bytes, 0)
            while self.num_bytes > most:
                self.num_bytes -= self._sizes.popitem(last=False)[1]
        self._sizes[name] = num_bytes
        self.num_bytes += num_bytes
        return num_bytes

    def read(self, name: str) -> int:
        """Read an object that is there; its bytes."""
        self._sizes.move_to_end(name)
        return self._sizes[name]

    def check_invariants(self) -> None:
        """Raise `AssertionError` unless the objects fit, and the bytes are theirs."""
        assert self.num_bytes == sum(self._sizes.values()), "bytes that no object has"
        assert self.num_bytes <= self.memory_bytes, "more than there is room for"


class StoreReplay:
    """The store behind `tier`, which copies states of `tree`."""

    def __init__(self, tree: RadixTree, tier: HostTier, costs: Costs, storage: StoreSpec) -> None:
        self.traffic = Traffic()
        self.storage = storage
        self.objects = LruObjects(storage.memory_bytes)
        self._behind = StoreBehind(tier, bytes_per_s=storage.bytes_per_s)
        self._tree, self._tier = tree, tier
        self._unit_kv_bytes = costs.kv_bytes_per_token * tree.unit_tokens
        self._state_bytes = costs.state_bytes

    def write(self, now_s: float, num_steps: int) -> None:
        """Write the copies that the host drops next, `num_steps` steps after the last call."""
        for copy in self._behind.choose(now_s, num_steps):
            self._write(copy)

    def read(self, request: Request, match: Match, now_s: float) -> float:
        """Read the state that `request` would start from to the host, if that pays; the seconds, 0 if nothing is read.

        `match` is what the device and the host have of it.
        """
        tier, traffic = self._tier, self.traffic
        above = None if match.hosted is None else match.hosted.host_copy
        start = 0 if above is None else above.depth
        num_cached_tokens = max(start, match.checkpoint.depth)
        if request.num_prompt_tokens - 1 - num_cached_tokens < LEAST_TOKENS:
            return 0.0
        names = self._readable(request)
        depth = len(names) * self._tree.unit_tokens
        num_tokens = depth - start
        if num_tokens < LEAST_TOKENS:
            return 0.0
        if not self._behind.pays_to_read(match, depth, request.num_prompt_tokens, num_tokens):
            return 0.0
        if not self._make_room(above, num_tokens, now_s):
            return 0.0
        copy = tier.adopt(request.path, request.namespace, depth, now_s).host_copy
        assert copy is not None
        copy.stored_as = names[-1]
        read = [*names[start // self._tree.unit_tokens :], _state(names[-1])]
        num_bytes = sum(map(self.objects.read, read))
        read_s = num_bytes / self.storage.bytes_per_s
        traffic.num_hit_tokens += depth - num_cached_tokens
        traffic.num_reads += 1
        traffic.num_read_bytes += num_bytes
        traffic.read_s += read_s
        return read_s

    def _readable(self, request: Request) -> list[str]:
        """The names of a prompt's KV up to the deepest state that can be read."""
        num_tokens = min(request.num_known_tokens, request.num_prompt_tokens - 1)
        path = request.path[: self._tree.offset(num_tokens // self._tree.unit_tokens * self._tree.unit_tokens)]
        names, num_readable = list[str](), 0
        for name in self._names(str(request.namespace), path):
            if name not in self.objects:
                break
            names.append(name)
            if _state(name) in self.objects:
                num_readable = len(names)
        return names[:num_readable]

    def _make_room(self, above: HostCopy | None, num_tokens: int, now_s: float) -> bool:
        """Make room on the host for a state and `num_tokens` beyond `above`, which stays; False if there is none."""
        tier = self._tier
        if above is not None:
            tier.lock(above)
        has_room = tier.expect(num_tokens, now_s)
        if has_room:
            tier.unexpect(num_tokens)
        if above is not None:
            tier.unlock(above)
        return has_room

    def _write(self, copy: HostCopy) -> None:
        """Write a copy, and the KV of its path beyond the nearest stored state."""
        path, namespace = self._tree.path_to(copy.node)
        above = stored_above(copy)
        start, name = 0, str(namespace)
        if above is not None and above.stored_as is not None:
            start, name = self._tree.offset(above.depth), above.stored_as
        names = list(self._names(name, path[start:]))
        written = [self.objects.put(_state(names[-1]), self._state_bytes)]
        written += [self.objects.put(each, self._unit_kv_bytes) for each in names]
        self.traffic.num_written_bytes += sum(each or 0 for each in written)
        if None not in written:
            copy.stored_as = names[-1]
            self.traffic.num_writes += 1

    def _names(self, name: str, path: bytes) -> Iterator[str]:
        """The name of each unit of `path`, which continues what `name` stands for."""
        unit_bytes = self._tree.unit_bytes
        for start in range(0, len(path), unit_bytes):
            unit = path[start : start + unit_bytes]
            name = blake2b(name.encode() + unit, digest_size=16).hexdigest()
            yield name


def _state(name: str) -> str:
    """The name of the state at the end of the path that `name` stands for."""
    return f"{name}.state"
