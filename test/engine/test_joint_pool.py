"""In SGLang's one pool: what its own admission cannot do, what the checks see, and what the cache tells of it."""

from collections.abc import Callable
from typing import Any

import pytest

from marconi.engine.joint.pools import JointPools
from marconi.engine.launch.policies import PolicyChoice
from marconi.engine.plugin.backend import pool_costs
from marconi.policy.base import Need
from marconi.policy.request import Request, pack
from rig.joint_pools import KV_BYTES_PER_TOKEN, STATE_BYTES
from rig.pools import Division, Strategy
from rig.soak import SoakFailure, SoakPlan, soak_on_marconi, soak_on_stock, soak_pools

from .host_replays import agents, on_marconi, serve
from .test_host_replay import ONE_POOL
from .test_host_soak import drop_a_slot, drop_kv, nothing, once

pytestmark = pytest.mark.usefixtures("one_thread")

EXTRA, NO = Strategy.EXTRA_BUFFER, Strategy.NO_BUFFER
NUM_REQUESTS = 120


@pytest.mark.parametrize(
    ("strategy", "seed", "failure"),
    [(EXTRA, 2, "Out of memory"), (NO, 1, "none is ever admitted")],
    ids=["tracking-slots", "states-that-may-go"],
)
def test_sglangs_own_admission_fails_under_such_requests(strategy: Strategy, seed: int, failure: str) -> None:
    """Why our cache has an admission of its own: SGLang's counts neither tracking slots nor states that may go."""
    host = soak_pools(strategy, 1, memory=Division.ONE_POOL)
    with pytest.raises(SoakFailure, match=failure):
        soak_on_stock(host, SoakPlan(NUM_REQUESTS, seed, drain_every_requests=50)).run()


# Controls: a single fault, and the check goes red


def forget_a_move(cache: Any) -> None:
    kv = cache.token_to_kv_pool_allocator.full_attn_allocator
    kv._move_pages = once(kv._move_pages, nothing, after=3)


def forget_a_move_of_states(cache: Any) -> None:
    states = cache.token_to_kv_pool_allocator.mamba_allocator
    states._move_pages = lambda *_: None


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (drop_a_slot, "state slots: . of .* lost"),
        (drop_kv, "KV pages: .* lost"),
        (forget_a_move, "reads KV of another sequence"),
        (forget_a_move_of_states, "reads a state of another sequence"),
    ],
)
def test_one_fault_is_seen(fault: Callable[[Any], None], message: str) -> None:
    plan = SoakPlan(NUM_REQUESTS, seed=1, check_every_steps=16, drain_every_requests=40)
    run = soak_on_marconi(soak_pools(EXTRA, 1, memory=Division.ONE_POOL), plan)
    fault(run.scheduler.cache)
    with pytest.raises(SoakFailure, match=message):
        run.run()


# What it tells


def test_the_status_counts_the_bytes_of_the_one_pool() -> None:
    replay = on_marconi(ONE_POOL["page-1"], PolicyChoice("best"))
    serve(replay, agents(seed=1))
    status = replay.cache.status()
    assert status.joint_bytes is not None
    num_bytes = replay.cache.pools.memory.bytes_of(replay.cache.full_evictable_size(), status.num_states)
    assert status.joint_bytes.cached == num_bytes
    assert status.joint_bytes.in_use == 0
    assert status.as_dict()["joint_bytes"]["size"] == replay.cache.pools.memory.num_bytes
    assert status.evictions["bytes"] > 0 == status.evictions["kv"] == status.evictions["states"]
    assert replay.cache.stats.describe().startswith(
        f"{status.joint_bytes.size} bytes for KV tokens of 32 bytes and states of 2048 bytes together, page 1, "
    )


def test_costs_are_of_the_one_pool() -> None:
    cache = on_marconi(ONE_POOL["page-16"], PolicyChoice("best")).cache
    assert isinstance(cache.pools, JointPools)

    class Params:
        token_to_kv_pool_allocator = cache.token_to_kv_pool_allocator
        req_to_token_pool = cache.req_to_token_pool
        page_size = 16

    costs = pool_costs(Params, {})  # type: ignore[arg-type]
    assert (costs.kv_bytes_per_token, costs.state_bytes) == (KV_BYTES_PER_TOKEN, STATE_BYTES)


def test_a_hit_for_whose_copy_no_slot_can_be_had_is_none() -> None:
    """The state itself would have to go for it, so the request begins anew once there is room."""
    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    replay = on_marconi(ONE_POOL["no-buffer"], PolicyChoice("lru"))
    prompt = Request(pack(range(100)), 100, 1, 100, 0.0)
    replay.serve(prompt)
    cache, req = replay.cache, replay._req(prompt)
    match = MatchPrefixParams(key=RadixKey(req.origin_input_ids[:99]), cow_mamba=True, req=req)
    kv, slots = cache.token_to_kv_pool_allocator, cache.req_to_token_pool.mamba_allocator
    # A running request takes all but a token and what the tree holds.
    assert kv.alloc(kv.available_size() - 1) is not None
    assert cache._look_up(match).match.source is not None, "another state may go for it"
    while cache.tree_core.mamba_evictable_size() > 1:
        cache.tree_core.drain(cache.tree_core.hybrid.evict(Need.BYTES, 1.0))
    assert slots.schedulable_available_size() == 0
    assert cache._look_up(match).match.source is None
