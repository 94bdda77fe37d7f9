"""The replay's rules by hand, on LRU where the cache itself is not the point."""

import pytest

from marconi.policy.base import Costs
from marconi.policy.request import Request, Trace, pack
from marconi_lab.block import VARIANTS, make
from marconi_lab.block.server import BlockServer, prompt_blocks

from .block_replays import hit_tokens, replay

NAMES = [variant.name for variant in VARIANTS]
BLOCK_TOKENS = 512


def request(blocks: list[int], num_prompt_tokens: int, namespace: int = 0) -> Request:
    num_known_tokens = num_prompt_tokens // BLOCK_TOKENS * BLOCK_TOKENS
    return Request(pack(blocks), num_prompt_tokens, 0, num_known_tokens, 0.0, namespace=namespace)


def trace(*requests: Request) -> Trace:
    return Trace("sample", BLOCK_TOKENS, requests)


def hits(*requests: Request, capacity_blocks: int = 100) -> list[int]:
    return hit_tokens(trace(*requests), make("lru-block", capacity_blocks))


@pytest.mark.parametrize("name", NAMES)
def test_a_small_trace_gives_its_four_figures(name: str) -> None:
    result = replay(
        trace(request([1, 2, 3], 1300), request([1, 2, 3, 4], 2000), request([1, 9], 600), request([1, 2, 3], 1300)),
        make(name, 100),
    )
    # 0, then three whole blocks, then one, then all of the prompt: its last block is partial.
    assert result == {
        "overall_hit_rate": (0 + 1536 + 512 + 1300) / 5200,
        "total_hit_tokens": 3348,
        "total_prompt_tokens": 5200,
        "final_cache_blocks": 5,
    }


def test_a_hit_never_exceeds_the_prompt() -> None:
    assert hits(request([1, 2], 513), request([1, 2], 513)) == [0, 513]
    assert hits(request([1, 2], 1024), request([1, 2], 1024)) == [0, 1024]


def test_a_prefix_ends_at_the_first_block_that_is_not_there() -> None:
    assert hits(request([1, 2, 3], 1536), request([1, 7, 3], 1536), request([7, 2, 3], 1536)) == [0, 512, 1536]
    assert hits(request([2, 3], 1024), request([1, 2, 3], 1536)) == [0, 0]


def test_a_block_behind_the_gap_is_touched_all_the_same() -> None:
    warm = [request([1, 2], 1024), request([9, 1], 1024)]  # the second hits nothing, but uses 1: order 2 9 1
    assert hits(*warm, request([5], 512), request([1], 512), capacity_blocks=3)[-1] == 512
    assert hits(*warm, request([5], 512), request([2], 512), capacity_blocks=3)[-1] == 0


def test_only_the_blocks_of_the_prompt_count() -> None:
    with_output = Request(pack([1, 2, 3, 4]), 700, 1300, 1536, 0.0)  # blocks 1 and 2 are the prompt's, 2 in part
    assert prompt_blocks(with_output, BLOCK_TOKENS) == [1, 2]
    cache = make("lru-block", 10)
    assert replay(trace(with_output), cache)["final_cache_blocks"] == 2
    assert set(cache.resident) == {1, 2}


def test_a_prompt_of_nothing_hits_nothing() -> None:
    result = replay(trace(request([], 0)), make("lru-block", 4))
    assert list(result.values()) == [0.0, 0, 0, 0]
    assert replay(trace(), make("lru-block", 4)) == result


def test_a_block_named_twice_counts_at_each_position_and_is_accessed_at_each() -> None:
    assert hits(request([1, 1], 1024), request([1, 1], 1024)) == [0, 1024]
    lfu = make("lfu", 2)
    hit_tokens(trace(request([1, 1], 1024), request([2], 512), request([3], 512)), lfu)
    assert set(lfu.resident) == {1, 3}  # 1 was used twice by one request, so 2 went


@pytest.mark.parametrize("name", NAMES)
def test_a_request_larger_than_the_cache_is_hit_as_it_was_found(name: str) -> None:
    # Three blocks of room: 1 2 3 are found although the accesses to 7 and 8 evict some of them meanwhile.
    cache = make(name, 3)
    found = hit_tokens(trace(request([1, 2, 3], 1536), request([1, 2, 3, 7, 8], 2560)), cache)
    assert found == [0, 0 if name == "s3fifo" else 1536]  # its small queue has room for one of them
    assert cache.num_blocks <= 3
    assert cache.contains(8)


def test_a_request_may_evict_a_block_that_it_still_needs_and_admits_it_anew() -> None:
    # 9 evicts 1 (hit order 1 2 3 of capacity 3), then 1 evicts 2: LRU on a request that is too long loses its front.
    cache = make("lru-block", 3)
    assert hit_tokens(trace(request([1, 2, 3], 1536), request([9, 1, 2, 3], 2048)), cache) == [0, 0]
    assert set(cache.resident) == {1, 2, 3}


def test_blocks_of_two_namespaces_are_different_blocks() -> None:
    two = [request([1, 2], 1024, namespace=0), request([1, 2], 1024, namespace=5)]
    assert hits(*two, *two) == [0, 0, 1024, 1024]


@pytest.mark.parametrize("unit_tokens", [1, 0])
def test_a_trace_of_tokens_is_refused_before_the_first_request(unit_tokens: int) -> None:
    with pytest.raises(ValueError, match="the trace must be one of blocks for a block cache"):
        BlockServer("lru-block", 10**6, unit_tokens, Costs(1, 1, float))


@pytest.mark.parametrize("name", NAMES)
def test_the_same_trace_gives_the_same_result(name: str) -> None:
    requests = [request([i % 7, 10 + i % 5, 20 + i % 11], 1536) for i in range(200)]
    first, second = (replay(trace(*requests), make(name, 20)) for _ in range(2))
    assert first == second
    assert 0 < first["overall_hit_rate"] < 1
