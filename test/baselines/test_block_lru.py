"""LRU by hand."""

from marconi_lab.block.lru import LruBlockCache


def test_the_block_used_longest_ago_goes_first() -> None:
    cache = LruBlockCache(3)
    for block in (1, 2, 3):
        assert not cache.access(block)
    assert cache.access(1)  # queue 2 3 1
    assert not cache.access(4)  # 2 goes
    assert set(cache.resident) == {3, 1, 4}
    assert not cache.access(2)  # 3 goes
    assert set(cache.resident) == {1, 4, 2}


def test_a_look_is_no_use() -> None:
    cache = LruBlockCache(2)
    cache.access(1)
    cache.access(2)
    assert cache.contains(1)
    cache.access(3)
    assert set(cache.resident) == {2, 3}
