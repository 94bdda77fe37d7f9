"""An eviction takes the victims that SGLang's own loop takes, and leaves its allocators the same."""

import random
from array import array
from typing import Any

import pytest

pytest.importorskip("sglang", reason="the server extra is not installed: pip install '.[server]'")

from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from marconi.engine.launch.policies import PolicyChoice
from rig.clock import TraceClock
from rig.pools import COSTS, HostPools, marconi

pytestmark = pytest.mark.usefixtures("sglang_configuration")

PAGE_SIZES = [1, 16]


def filled(eviction: str, page: int, seed: int = 0) -> Any:
    """A cache that holds 60 states on forking paths."""
    clock, rng = TraceClock(), random.Random(seed)  # noqa: S311 - a workload, not a secret
    cache = marconi(HostPools(4096, 80, 1024, page_tokens=page), PolicyChoice(eviction, alpha=1.0), COSTS, clock)
    kv, slots = cache.token_to_kv_pool_allocator, cache.req_to_token_pool.mamba_allocator
    paths: list[array[int]] = [array("q")]
    while cache.mamba_evictable_size() < 60:
        clock.now_s += 1
        new = array("q", (rng.randrange(1 << 30) for _ in range(page * rng.randint(1, 3))))
        ids = rng.choice(paths)[: 6 * page] + new
        paths.append(ids)
        value = kv.alloc(len(ids))
        cache.insert(InsertParams(key=RadixKey(ids), value=value.clone(), mamba_value=slots.alloc(1)))
    return cache


def free_lists(cache: Any) -> tuple[list[int], list[int]]:
    kv, slots = cache.token_to_kv_pool_allocator, cache.req_to_token_pool.mamba_allocator
    return sorted(kv.get_all_free_pages().tolist()), sorted(slots.free_slots.tolist())


REQUESTS = [(0, 1), (0, 7), (200, 0), (96, 20), (10_000, 0), (0, 100)]


@pytest.mark.one_in(7)
@pytest.mark.parametrize("page", PAGE_SIZES)
@pytest.mark.parametrize("eviction", ["lru", "best"])
@pytest.mark.parametrize("for_alloc", [False, True], ids=["so much to go", "so much to be there"])
@pytest.mark.parametrize(("num_tokens", "num_states"), REQUESTS)
def test_what_goes_and_what_is_free_then_is_what_upstream_s_loop_leaves(
    monkeypatch: pytest.MonkeyPatch,
    page: int,
    eviction: str,
    for_alloc: bool,
    num_tokens: int,
    num_states: int,
) -> None:
    params = EvictParams(num_tokens=num_tokens, mamba_num=num_states)
    found = []
    for own in (True, False):
        cache = filled(eviction, page)
        if not own:
            monkeypatch.setattr(type(cache), "_evict", UnifiedRadixCache._evict)
        before = cache.mamba_evictable_size()
        result = (cache.evict_for_alloc if for_alloc else cache.evict)(params)
        assert result.mamba_num_evicted == before - cache.mamba_evictable_size()
        cache.sanity_check()
        found.append((result, free_lists(cache), cache.status().evictions))
    assert found[0] == found[1]
    assert bool(num_tokens or num_states) is bool(found[0][0].mamba_num_evicted)


def test_several_victims_go_back_to_each_allocator_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = filled("lru", 1)
    kv, slots = cache.token_to_kv_pool_allocator, cache.req_to_token_pool.mamba_allocator
    calls: list[str] = []
    for name, allocator in (("kv", kv), ("states", slots)):
        free = allocator.free
        monkeypatch.setattr(allocator, "free", lambda each, name=name, free=free: (calls.append(name), free(each)))
    assert cache.evict(EvictParams(num_tokens=20, mamba_num=30)).mamba_num_evicted == 30
    assert calls == ["kv", "states"]


def test_a_joint_reclaim_goes_by_its_own_question(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = filled("lru", 1)
    answers = iter([False, False, False, True])
    result = cache.evict_for_alloc(
        EvictParams(num_tokens=0, mamba_num=60), allocation_reclaim_satisfied=lambda: next(answers)
    )
    assert result.mamba_num_evicted < 60


@pytest.mark.parametrize("num_tokens", [0, 40])
def test_what_upstream_measures_of_an_eviction_is_told(monkeypatch: pytest.MonkeyPatch, num_tokens: int) -> None:
    cache = filled("lru", 1)
    told: list[int] = []
    monkeypatch.setattr(cache, "update_eviction_metrics", lambda num_evicted, start_time: told.append(num_evicted))
    result = cache.evict(EvictParams(num_tokens=num_tokens))
    assert told == [result.num_tokens_evicted]
