"""S3-FIFO by hand: what the three queues hold after each step, oldest first, as (block, counter)."""

import pytest

from marconi.baselines.block.s3fifo import S3FifoBlockCache


def fed(capacity_blocks: int, *blocks: int) -> S3FifoBlockCache:
    cache = S3FifoBlockCache(capacity_blocks)
    feed(cache, *blocks)
    return cache


def feed(cache: S3FifoBlockCache, *blocks: int) -> None:
    for block in blocks:
        cache.access(block)
        cache.check_invariants()


@pytest.mark.parametrize(
    ("capacity_blocks", "small", "main"),
    [(2, 0, 2), (4, 0, 4), (5, 0, 5), (6, 1, 5), (10, 1, 9), (15, 2, 13), (25, 2, 23), (35, 4, 31), (1005, 100, 905)],
)
def test_small_is_a_tenth_rounded_half_to_even_and_main_the_rest(capacity_blocks: int, small: int, main: int) -> None:
    cache = S3FifoBlockCache(capacity_blocks)
    assert (cache.small_blocks, cache.main_blocks) == (small, main)


def test_nothing_is_evicted_before_the_cache_is_full() -> None:
    cache = fed(10, *range(10))
    assert cache.small == tuple((block, 0) for block in range(10))
    assert (cache.main, cache.ghosts) == ((), ())


def test_a_counter_saturates_at_three() -> None:
    assert fed(10, 1, 1, 1, 1, 1, 1).small == ((1, 3),)


@pytest.mark.parametrize(("num_hits", "promoted"), [(0, False), (1, False), (2, True), (3, True)])
def test_two_hits_promote_a_block_and_one_does_not(num_hits: int, promoted: bool) -> None:
    cache = fed(10, 0, *[0] * num_hits, *range(1, 11))
    assert cache.contains(0) == promoted
    assert (0 in cache.ghosts) != promoted
    if promoted:
        assert cache.main == ((0, num_hits),)  # with its counter
        assert cache.ghosts == (1,)  # small went on to the next


def test_a_ghost_hit_is_a_miss_and_admits_to_main_with_counter_zero() -> None:
    cache = fed(10, *range(11))  # 0 was evicted for 10
    assert cache.ghosts == (0,)
    assert not cache.contains(0)
    assert not cache.access(0)  # 1 becomes a ghost to make room
    assert cache.main == ((0, 0),)
    assert cache.ghosts == (1,)
    assert cache.small == tuple((block, 0) for block in range(2, 11))


def main_of_nine() -> S3FifoBlockCache:
    """Capacity 10, small 1, main 9: nine blocks in main by ghost hits, one in small."""
    cache = fed(10, *range(10), *range(10, 19))  # 0 .. 8 are ghosts
    feed(cache, *range(9))
    assert cache.main == tuple((block, 0) for block in range(9))
    assert cache.small == ((18, 0),)
    return cache


def test_main_gives_a_second_chance_for_each_count() -> None:
    cache = main_of_nine()
    feed(cache, 0, 0, 1)  # 0 with counter 2, 1 with counter 1
    assert cache.ghosts == (9, 10, 11, 12, 13, 14, 15, 16, 17)
    # Small holds one block, its size, so it gives way; the ghost 10 takes main to ten, small has none left.
    feed(cache, 10)
    assert cache.small == ()
    assert cache.main[-2:] == ((8, 0), (10, 0))
    # Small is empty: main gives way. 0 and 1 are passed over, each paying one; 2 goes, and is no ghost.
    feed(cache, 100)
    assert cache.main == (*((block, 0) for block in range(3, 9)), (10, 0), (0, 1), (1, 0))
    assert cache.small == ((100, 0),)
    assert not cache.contains(2)
    assert 2 not in cache.ghosts


def test_a_promotion_into_a_full_main_evicts_from_main_and_then_from_small() -> None:
    cache = S3FifoBlockCache(20)  # small 2, main 18
    feed(cache, *range(20), *range(20, 38))  # 0 .. 17 are ghosts, 18 .. 37 in small
    feed(cache, *range(18))  # by ghost hits into main; 36 and 37 are left in small
    assert [block for block, _ in cache.main] == list(range(18))
    feed(cache, 36, 36, 100)
    # 36 was promoted, so 0 left main; then 37 became a ghost: two blocks went for one that came.
    assert cache.main == (*((block, 0) for block in range(1, 18)), (36, 2))
    assert cache.small == ((100, 0),)
    assert cache.ghosts[-1] == 37
    assert cache.num_blocks == 19


def test_a_promotion_that_just_fills_main_evicts_nothing_from_it() -> None:
    cache = fed(10, *range(10), *range(10, 19))
    feed(cache, *range(8))  # 8 in main, 17 and 18 in small
    feed(cache, 17, 17, 100)
    assert cache.main == (*((block, 0) for block in range(8)), (17, 2))
    assert cache.small == ((100, 0),)
    assert cache.ghosts[-1] == 18


def test_ghosts_are_as_many_as_main_and_the_oldest_is_forgotten() -> None:
    cache = fed(10, *range(10 + 9))
    assert cache.ghosts == tuple(range(9))
    feed(cache, 100)
    assert cache.ghosts == tuple(range(1, 10))


def test_the_oldest_of_a_full_queue_of_ghosts_is_still_a_ghost_when_it_is_asked_for() -> None:
    cache = fed(10, *range(10 + 9))
    feed(cache, 0)  # 9 becomes a ghost in its place, and 0 is not pushed out first
    assert cache.main == ((0, 0),)
    assert cache.ghosts == tuple(range(1, 10))


def test_a_small_queue_of_size_zero_still_takes_new_blocks_and_gives_way_first() -> None:
    cache = fed(4, 1, 2, 3, 4, 5)
    assert cache.small_blocks == 0
    assert cache.small == ((2, 0), (3, 0), (4, 0), (5, 0))
    assert cache.ghosts == (1,)


def test_a_scan_does_not_touch_what_was_used_again() -> None:
    cache = fed(20, *[block for block in range(5) for _ in range(3)], *range(100, 200))
    assert all(cache.contains(block) for block in range(5))


def test_a_cache_full_of_promoted_blocks_still_finds_a_victim() -> None:
    cache = fed(2, 1, 1, 1, 1, 2, 2, 2, 2, 3)
    assert cache.contains(3)
    assert cache.num_blocks <= 2
