"""S3-FIFO by hand: the contents of the three queues after each step, oldest first, as (block, counter).

And on recorded traces, by the totals that another replay of the format prints.
"""

import json
from pathlib import Path

import pytest

from marconi.cli import main
from marconi_lab.block.s3fifo import S3FifoBlockCache

TOTALS = {
    "mooncake-conversation": {500: (6657926, 184), 1000: (7689987, 752), 4096: (15168640, 4096)},
    "mooncake-synthetic": {500: (2119680, 500), 1000: (5010783, 1000), 4096: (14230600, 4096)},
}
"""Hit tokens and blocks at the end, by trace and capacity in blocks of 512 tokens."""


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
    [(2, 1, 1), (5, 1, 4), (6, 1, 5), (10, 1, 9), (15, 2, 13), (25, 2, 23), (35, 4, 31), (1005, 100, 905)],
)
def test_small_is_a_tenth_rounded_half_to_even_at_least_a_block_and_main_the_rest(
    capacity_blocks: int, small: int, main: int
) -> None:
    cache = S3FifoBlockCache(capacity_blocks)
    assert (cache.small_blocks, cache.main_blocks) == (small, main)


def test_small_gives_its_oldest_up_although_the_cache_has_room() -> None:
    cache = fed(20, 1, 2, 3)
    assert cache.small == ((2, 0), (3, 0))
    assert (cache.main, cache.ghosts) == ((), (1,))


def test_a_counter_saturates_at_three() -> None:
    assert fed(10, 1, 1, 1, 1, 1, 1).small == ((1, 3),)


@pytest.mark.parametrize("num_hits", [0, 1, 2, 3])
def test_one_hit_promotes_a_block_with_its_counter(num_hits: int) -> None:
    cache = fed(10, 0, *[0] * num_hits, 1)
    assert cache.small == ((1, 0),)
    assert cache.main == (((0, num_hits),) if num_hits else ())
    assert cache.ghosts == (() if num_hits else (0,))


def test_a_ghost_hit_is_a_miss_and_admits_to_main_with_counter_zero() -> None:
    cache = fed(10, 0, 1)
    assert cache.ghosts == (0,)
    assert not cache.contains(0)
    assert not cache.access(0)
    assert (cache.small, cache.main, cache.ghosts) == (((1, 0),), ((0, 0),), ())


def main_of_nine() -> S3FifoBlockCache:
    """Capacity 10, small 1, main 9: nine blocks in main by ghost hits, one in small."""
    cache = fed(10, *range(10), *range(9))
    assert cache.main == tuple((block, 0) for block in range(9))
    assert (cache.small, cache.ghosts) == (((9, 0),), ())
    return cache


def test_main_gives_a_second_chance_for_each_count_and_what_leaves_it_is_a_ghost() -> None:
    cache = main_of_nine()
    feed(cache, 0, 0, 1, 10, 9)  # 0 with counter 2, 1 with counter 1; 9 becomes a ghost and returns to main
    assert cache.main == (*((block, 0) for block in range(3, 9)), (0, 1), (1, 0), (9, 0))
    assert (cache.small, cache.ghosts) == (((10, 0),), (2,))


def test_a_promotion_into_a_full_main_evicts_one_block_from_it() -> None:
    cache = main_of_nine()
    feed(cache, 9, 10)
    assert cache.main == (*((block, 0) for block in range(1, 9)), (9, 1))
    assert (cache.small, cache.ghosts) == (((10, 0),), (0,))


def test_ghosts_are_as_many_as_main_and_the_oldest_is_forgotten() -> None:
    assert fed(10, *range(10)).ghosts == tuple(range(9))
    assert fed(10, *range(11)).ghosts == tuple(range(1, 10))


def test_the_oldest_of_a_full_queue_of_ghosts_is_still_a_ghost_when_it_is_asked_for() -> None:
    cache = fed(10, *range(10), 0)
    assert cache.main == ((0, 0),)
    assert cache.ghosts == tuple(range(1, 9))


def test_a_scan_does_not_touch_what_was_used_again() -> None:
    cache = fed(20, *[block for block in range(5) for _ in range(2)], *range(100, 200))
    assert all(cache.contains(block) for block in range(5))
    assert cache.num_blocks == 5 + cache.small_blocks


def test_a_cache_full_of_promoted_blocks_still_finds_a_victim() -> None:
    cache = fed(2, 1, 1, 1, 1, 2, 2, 2, 2, 3)
    assert cache.main == ((2, 3),)
    assert cache.small == ((3, 0),)
    assert cache.ghosts == (1,)


@pytest.mark.parametrize("trace", TOTALS)
def test_a_recorded_trace_gives_the_totals_of_another_replay(trace: str, tmp_path: Path) -> None:
    name, out = f"shared/traces/{trace}.jsonl.gz", tmp_path / "out.json"
    path = next((path for above in Path(__file__).parents if (path := above / name).exists()), None)
    if path is None:
        pytest.skip(f"NEEDS {name} IN A FOLDER ABOVE, none found: this test did not run")
    memory = ",".join(f"{capacity}blocks" for capacity in TOTALS[trace])
    argv = ["replay", str(path), "--model", "marconi-7b", "--policy", "s3fifo", "--memory", memory, "--jobs", "1"]
    assert main([*argv, "--json", str(out)]) == 0
    runs = json.loads(out.read_text())["runs"]
    assert [(run["total_hit_tokens"], run["final_cache_blocks"]) for run in runs] == list(TOTALS[trace].values())
