"""Every block cache against a brute-force twin: the same rule on plain lists, each step a scan."""

from random import Random
from typing import Protocol

import pytest
from hypothesis import strategies as st

from marconi.policy.request import Request, Trace, pack
from marconi_lab.block import VARIANTS, BlockCache, make
from marconi_lab.block.server import access_prompt
from policy.random_runs import Extent, extents

from .block_replays import replay

NAMES = [variant.name for variant in VARIANTS]


class Twin(Protocol):
    def blocks(self) -> list[int]: ...
    def access(self, block: int) -> None: ...


class LruTwin:
    """Keeps the time of each block's last access; the victim has the earliest."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.clock = capacity, 0
        self.last_uses: list[tuple[int, int]] = []

    def blocks(self) -> list[int]:
        return [block for _, block in self.last_uses]

    def access(self, block: int) -> None:
        self.clock += 1
        if block not in self.blocks() and len(self.last_uses) == self.capacity:
            self.last_uses.remove(min(self.last_uses))
        self.last_uses = [(time, held) for time, held in self.last_uses if held != block]
        self.last_uses.append((self.clock, block))


class LfuTwin:
    """Keeps every access since admission; the victim has the fewest, and the earliest last one among those."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.clock = capacity, 0
        self.uses: list[tuple[int, list[int]]] = []

    def blocks(self) -> list[int]:
        return [block for block, _ in self.uses]

    def access(self, block: int) -> None:
        self.clock += 1
        for held, times in self.uses:
            if held == block:
                times.append(self.clock)
                return
        if len(self.uses) == self.capacity:
            self.uses.remove(min(self.uses, key=lambda entry: (len(entry[1]), entry[1][-1])))
        self.uses.append((block, [self.clock]))


class S3FifoTwin:
    """The static form on lists whose first element is the newest and last the oldest."""

    def __init__(self, capacity: int) -> None:
        tenths, rest = divmod(capacity, 10)
        # Half to even, without round().
        self.small_size = max(tenths + (rest > 5 or (rest == 5 and tenths % 2 == 1)), 1)
        self.main_size = capacity - self.small_size
        self.s: list[list[int]] = []
        self.m: list[list[int]] = []
        self.g: list[int] = []

    def blocks(self) -> list[int]:
        return [block for block, _ in self.s + self.m]

    def access(self, block: int) -> None:
        for entry in self.s + self.m:
            if entry[0] == block:
                entry[1] = min(entry[1] + 1, 3)
                return
        if block in self.g:
            self.g = [ghost for ghost in self.g if ghost != block]
            self.admit_m([block, 0])
            return
        while len(self.s) == self.small_size:
            oldest = self.s[-1]
            self.s = self.s[:-1]
            if oldest[1] > 0:
                self.admit_m(oldest)
            else:
                self.bury(oldest[0])
        self.s = [[block, 0], *self.s]

    def admit_m(self, entry: list[int]) -> None:
        while len(self.m) == self.main_size:
            block, counter = self.m[-1]
            self.m = [[block, counter - 1], *self.m[:-1]] if counter > 0 else self.m[:-1]
            if counter == 0:
                self.bury(block)
        self.m = [entry, *self.m]

    def bury(self, block: int) -> None:
        self.g = [block, *self.g][: self.main_size]


TWINS = {"lru-block": LruTwin, "lfu": LfuTwin, "s3fifo": S3FifoTwin}


def make_twin(name: str, capacity: int) -> Twin:
    return TWINS[name](capacity)


def s3fifo_queues_agree(cache: BlockCache, twin: Twin) -> bool:
    return (
        [list(entry) for entry in cache.small] == twin.s[::-1]
        and [list(entry) for entry in cache.main] == twin.m[::-1]
        and list(cache.ghosts) == twin.g[::-1]
    )


# Few ids, runs of the same ones and returns after a while: what moves counters, promotes blocks and hits ghosts.
ACCESSES = st.lists(
    st.tuples(st.integers(0, 30), st.integers(1, 4)).map(lambda pair: [pair[0]] * pair[1]), max_size=80
).map(lambda runs: [block for run in runs for block in run])


@extents
def test_every_access_leaves_the_blocks_that_the_brute_force_twin_holds(extent: Extent) -> None:
    extent._replace(num_runs=15 * extent.num_runs).draw(
        check_against_the_twin, NAMES, accesses=ACCESSES, capacity=st.integers(2, 26)
    )


@pytest.mark.parametrize("capacity", [2, 3, 5, 6, 8, 15, 25, 40])
@pytest.mark.parametrize("name", NAMES)
def test_a_long_skewed_run_leaves_the_blocks_that_the_brute_force_twin_holds(name: str, capacity: int) -> None:
    random = Random(capacity)  # noqa: S311 - no secret
    # Popularity falls with the id, and which ids are popular drifts, so that blocks age in every queue.
    accesses = [int(random.paretovariate(0.7)) % (3 * capacity) + step // 200 for step in range(2000)]
    check_against_the_twin(name, capacity, accesses)


def check_against_the_twin(name: str, capacity: int, accesses: list[int]) -> int:
    cache, twin = make(name, capacity), make_twin(name, capacity)
    for block in accesses:
        assert cache.access(block) == (block in twin.blocks())
        twin.access(block)
        assert set(cache.resident) == set(twin.blocks())
        assert cache.num_blocks == len(twin.blocks())
        assert cache.contains(block)
        cache.check_invariants()
        assert name != "s3fifo" or s3fifo_queues_agree(cache, twin)
    return len(accesses)


REQUESTS = st.lists(
    # A document's first blocks, sometimes one block of another, and how much of the last block is there.
    st.tuples(st.integers(0, 5), st.integers(0, 9), st.lists(st.integers(0, 69), max_size=2), st.integers(1, 4)),
    max_size=40,
)


@extents
def test_every_request_hits_what_the_rule_says_on_the_twin(extent: Extent) -> None:
    extent._replace(num_runs=15 * extent.num_runs).draw(check_hits, NAMES, drawn=REQUESTS, capacity=st.integers(2, 26))


def check_hits(name: str, drawn: list[tuple[int, int, list[int], int]], capacity: int) -> int:
    unit = 4
    prompts = []
    for document, length, others, num_last_tokens in drawn:
        blocks = [*(document * 10 + i for i in range(length)), *others]
        prompts.append((blocks, (len(blocks) - 1) * unit + num_last_tokens if blocks else 0))
    requests = tuple(Request(pack(blocks), num_tokens, 0, 0, 0.0) for blocks, num_tokens in prompts)
    trace = Trace("drawn", unit, requests)
    cache, twin = make(name, capacity), make_twin(name, capacity)
    expected = []
    for (blocks, num_tokens), request in zip(prompts, requests, strict=True):
        hit, k = access_prompt(cache, request, unit).num_hit_tokens, 0
        while k < len(blocks) and blocks[k] in twin.blocks():
            k += 1
        for block in blocks:
            twin.access(block)
        expected.append(min(k * unit, num_tokens))
        assert hit == expected[-1]
        assert set(cache.resident) == set(twin.blocks())
        cache.check_invariants()
    result = replay(trace, make(name, capacity))
    assert result["total_hit_tokens"] == sum(expected)
    assert result["total_prompt_tokens"] == sum(num_tokens for _, num_tokens in prompts)
    assert result["final_cache_blocks"] == len(twin.blocks())
    return len(drawn)


@pytest.mark.parametrize("name", NAMES)
def test_a_block_that_was_just_accessed_twice_is_there(name: str) -> None:
    cache = make(name, 2)
    assert [cache.access(7), cache.access(7)] == [False, True]
    assert set(cache.resident) == {7}


@pytest.mark.parametrize("name", ["lru-block", "lfu"])
def test_a_cache_of_one_block_holds_the_last_one(name: str) -> None:
    cache = make(name, 1)
    assert [cache.access(block) for block in (1, 1, 1, 2, 1)] == [False, True, True, False, False]
    assert set(cache.resident) == {1}
    cache.check_invariants()


@pytest.mark.parametrize("capacity", [0, -3])
@pytest.mark.parametrize(("name", "least"), [("lru-block", 1), ("lfu", 1), ("s3fifo", 2)])
def test_a_capacity_without_a_block_is_one_clear_line(name: str, least: int, capacity: int) -> None:
    message = f"^{name}: the capacity in blocks must be at least {least}, got {capacity}$"
    with pytest.raises(ValueError, match=message):
        make(name, capacity)


def test_s3fifo_refuses_the_capacity_that_leaves_a_queue_without_a_block() -> None:
    with pytest.raises(ValueError, match=r"^s3fifo: the capacity in blocks must be at least 2, got 1$"):
        make("s3fifo", 1)


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"^a block cache must be one of lfu, lru-block, s3fifo, got 'arc'$"):
        make("arc", 10)


@pytest.mark.parametrize("name", NAMES)
def test_make_gives_the_cache_of_that_name(name: str) -> None:
    cache = make(name, 12)
    assert (cache.name, cache.capacity_blocks, cache.num_blocks) == (name, 12, 0)
