"""LFU by hand."""

from marconi_lab.block.lfu import LfuBlockCache


def fed(capacity_blocks: int, *blocks: int) -> LfuBlockCache:
    cache = LfuBlockCache(capacity_blocks)
    for block in blocks:
        cache.access(block)
        cache.check_invariants()
    return cache


def test_the_block_used_least_often_goes_however_recent() -> None:
    cache = fed(2, 1, 1, 1, 2, 3)  # 1 three times, 2 once: 2 goes for 3, though 1 is older
    assert set(cache.resident) == {1, 3}


def test_a_tie_goes_to_the_least_recently_used() -> None:
    cache = fed(3, 1, 2, 3, 2, 1, 3, 4)  # twice each, last used in the order 2 1 3
    assert set(cache.resident) == {1, 3, 4}


def test_an_evicted_block_starts_again_at_one() -> None:
    cache = fed(2, 1, 1, 2, 2, 2, 3)  # 1 had two uses against 2's three: gone
    assert set(cache.resident) == {2, 3}
    cache.access(1)  # 3 goes; 1 is back with one use, not three
    cache.access(4)  # so it goes next
    assert set(cache.resident) == {2, 4}


def test_the_least_frequency_follows_a_touch_and_an_admission() -> None:
    cache = fed(2, 1, 2, 1, 2)  # both at two: the least frequency moved up
    cache.access(3)  # 1 goes, 3 enters at one
    assert set(cache.resident) == {2, 3}
    cache.access(1)  # 3 goes, not 2
    assert set(cache.resident) == {2, 1}


def test_popular_once_is_popular_for_good() -> None:
    cache = fed(2, 1, 1, 1, *range(10, 30))
    assert cache.contains(1)
