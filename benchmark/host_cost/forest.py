"""A full cache of a known number of states, whose victims can be taken and timed one by one.

Trunks of 40 to 640 tokens, in turns of 16 lengths, have 15 leaves of 40 tokens each, and there is a state at the end of
every trunk and leaf. A victim is replaced by a leaf of some trunk before the next one is taken, so the tree keeps its
size; one that is asked for in KV is asked for in as many tokens as a leaf has. KV and states join the tree by
`insert`, as at the end of a request, but no request is served.

Pools are nearly full: an allocator copies the list of all that is free at every call, which would be timed with the
victim. KV that is not wanted yet is ballast, taken from the allocator at the start and given back in parts.
"""

import random
import time
from array import array

from marconi.policy.request import Request, pack
from rig.clock import TraceClock
from rig.contents import Contents
from rig.driver import HostReplay
from rig.late_copies import LateCopies
from rig.pools import HostPools

LEAF_TOKENS = 40
LEAVES_A_TRUNK = 15
MAX_TRUNK_LEAVES = 16
"""Of the longest trunk its tokens, in leaves."""
SLACK_TOKENS = 1_024
"""Of KV that are left free."""
SLACK_SLOTS = 4
NEEDS = {"state": (0, 1), "kv": (LEAF_TOKENS, 0)}
"""What is short: how many tokens and how many states one eviction asks for."""
_MAX_CONTEXT_TOKENS = 4_096


class Forest:
    """In the cache behind `replay`, which was built on the pools of `Forest.host` and uses `name` and `clock`."""

    def __init__(self, name: str, replay: HostReplay, clock: TraceClock, num_states: int, seed: int) -> None:
        self.name = name
        self.cache = replay.cache
        self._replay = replay
        self._clock = clock
        self._num_states = num_states
        self._rng = random.Random(seed)  # noqa: S311 - a workload, not a secret
        self._kv = self.cache.token_to_kv_pool_allocator
        self._slots = self.cache.req_to_token_pool.mamba_allocator
        self._next_id = 1 << 32
        self._ballast = self._kv.alloc(self._kv.available_size() - 2 * SLACK_TOKENS)
        self._trunks: list[array[int]] = []
        self._copies: LateCopies | None = None
        if self.cache.cache_controller is not None:
            self._copies = LateCopies(self.cache, Contents(self._kv.size + 1, self._slots.size + 1), seed)

    @staticmethod
    def host(num_states: int, host_ratio: float = 0.0) -> HostPools:
        """Pools with room for one of `num_states` and some to spare, above a host tier if there is a ratio for it."""
        mean_trunk = LEAF_TOKENS * (MAX_TRUNK_LEAVES + 1) // 2
        num_tokens = num_states * (mean_trunk + LEAVES_A_TRUNK * LEAF_TOKENS) // (LEAVES_A_TRUNK + 1)
        return HostPools(
            num_tokens + 32 * SLACK_TOKENS, num_states + SLACK_SLOTS, _MAX_CONTEXT_TOKENS, host_ratio=host_ratio
        )

    def fill(self, deadline_s: float) -> bool:
        """Grow to size; False if that was not done by `deadline_s` of `time.monotonic`.

        The first requests are served in full, so that a rule which learns has learned, and what they left is evicted.
        """
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        for number in range(min(256, self._num_states // 4)):
            first_id = number // 8 * 8 * LEAF_TOKENS
            length = (number % 8 + 1) * LEAF_TOKENS
            now_s = self._clock.now_s + 1
            self._give_way(length)
            self._replay.serve(Request(pack(range(first_id, first_id + length)), length - 8, 8, length, now_s))
        self.cache.evict(EvictParams(num_tokens=self._kv.size))
        while self._num_held < self._num_states:
            if len(self._trunks) % 64 == 0 and time.monotonic() > deadline_s:
                return False
            trunk = self._new(LEAF_TOKENS * (1 + len(self._trunks) % MAX_TRUNK_LEAVES))
            self._trunks.append(trunk)
            self._insert(trunk)
            for _ in range(min(LEAVES_A_TRUNK, self._num_states - self._num_held)):
                self._insert(trunk + self._new(LEAF_TOKENS))
        return True

    def evict(self, need: str) -> float:
        """Processor seconds of one eviction for `need`, a key of `NEEDS`; what goes is replaced."""
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        num_tokens, num_states = NEEDS[need]
        params = EvictParams(num_tokens=num_tokens, mamba_num=num_states)
        start_s = time.thread_time()
        result = self.cache.evict(params)
        seconds = time.thread_time() - start_s
        assert result.num_tokens_evicted >= num_tokens, f"{self.name}: {result.num_tokens_evicted} tokens evicted"
        assert result.mamba_num_evicted >= num_states, f"{self.name}: {result.mamba_num_evicted} states evicted"
        while self._num_held < self._num_states:
            self._insert(self._rng.choice(self._trunks) + self._new(LEAF_TOKENS))
        return seconds

    def copy_ahead(self) -> float:
        """Processor seconds of what a step of the scheduler does for the host tier, between two evictions."""
        assert self._copies is not None, "no host tier"
        self._copies.advance()
        start_s = time.thread_time()
        self.cache.check_hicache_events()
        return time.thread_time() - start_s

    @property
    def num_copied(self) -> int:
        """Victims that were copied ahead."""
        num_copied: int = self.cache.host_use.num_copied
        return num_copied

    def settle(self) -> None:
        """Let all copies arrive."""
        if self._copies is not None:
            self._copies.finish()
            self.cache.writing_check()

    @property
    def _num_held(self) -> int:
        num_held: int = self.cache.mamba_evictable_size() + self.cache.mamba_protected_size()
        return num_held

    def _new(self, num_tokens: int) -> "array[int]":
        self._next_id += num_tokens
        return array("q", range(self._next_id - num_tokens, self._next_id))

    def _give_way(self, num_tokens: int) -> None:
        while self._kv.available_size() < num_tokens:
            self._kv.free(self._ballast[:SLACK_TOKENS])
            self._ballast = self._ballast[SLACK_TOKENS:]

    def _insert(self, ids: "array[int]") -> None:
        from sglang.srt.mem_cache.base_prefix_cache import InsertParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        self._clock.now_s += 1
        self._give_way(len(ids))
        slot = self._slots.alloc(1)
        params = InsertParams(key=RadixKey(ids), value=self._kv.alloc(len(ids)).clone(), mamba_value=slot)
        if self.cache.insert(params).mamba_exist:
            self._slots.free(slot)
