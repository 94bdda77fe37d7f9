"""In SGLang's one pool victims are chosen by worth over bytes, as in the replay, and nothing is lost."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from marconi.engine.joint.pools import JointPools
from marconi.engine.launch.policies import ONE_POOL, PolicyChoice, hybrid_cache
from marconi.engine.plugin.backend import pool_costs
from marconi.policy.base import Costs, Need
from marconi.policy.request import Request, pack
from marconi.replay.pools import JointPool
from marconi.replay.server import ServerReplay
from rig.clock import TraceClock
from rig.driver import HostReplay
from rig.joint_pools import KV_BYTES_PER_TOKEN, STATE_BYTES
from rig.pools import Core, Division, Strategy, marconi, stock
from rig.scheduler import Outcome
from rig.soak import Soak, SoakFailure, SoakPlan, soak_pools

from .host_replays import Setting, agents, forks, serve

COSTS = Costs(KV_BYTES_PER_TOKEN, STATE_BYTES, flops=lambda num_tokens: num_tokens * (num_tokens + 1000.0))
EXTRA, NO = Strategy.EXTRA_BUFFER, Strategy.NO_BUFFER
SETTINGS = {
    "page-1": Setting(1, EXTRA, 3000, 8),
    "no-buffer": Setting(1, NO, 1700, 6),
    "page-16": Setting(16, EXTRA, 1680, 10),
}
CHOICES = {
    "marconi": PolicyChoice("marconi", 2.0),
    "best": PolicyChoice("best"),
    "lru": PolicyChoice("lru"),
    "steps": PolicyChoice("lru", step_tokens=96),
}
BEST = CHOICES["best"]
NUM_REQUESTS = 120


@pytest.fixture(scope="module", autouse=True)
def _configuration() -> Iterator[None]:
    """Building a cache replaces the process's configuration; put it back for other tests."""
    from sglang.srt import runtime_context

    before = runtime_context.snapshot_context()
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)
    runtime_context.restore_context(before)


def on_marconi(setting: Setting, choice: PolicyChoice) -> HostReplay:
    host, clock = replace(setting.host, memory=Division.ONE_POOL), TraceClock()
    return HostReplay(marconi(host, choice, COSTS, clock), host, 1, clock)


def replayed(real: HostReplay, setting: Setting, choice: PolicyChoice) -> ServerReplay:
    """What stands for the cache of `real`, on as many bytes."""
    page = setting.page_tokens
    hybrid = hybrid_cache(choice, COSTS, page, page, None, needs=ONE_POOL)
    num_bytes = real.cache.pools.memory.num_bytes
    return ServerReplay(hybrid, JointPool(num_bytes, KV_BYTES_PER_TOKEN, STATE_BYTES, page), setting.scheduling)


def soak(choice: PolicyChoice, strategy: Strategy, page_tokens: int) -> Soak:
    host, clock = soak_pools(strategy, page_tokens, memory=Division.ONE_POOL), TraceClock()
    plan = SoakPlan(NUM_REQUESTS, 1, check_every_steps=16, drain_every_requests=40)
    return Soak(marconi(host, choice, COSTS, clock), host, plan, clock)


def num_moved(cache: Any) -> int:
    """Entries that SGLang has moved to close up what was freed."""
    allocator = cache.token_to_kv_pool_allocator
    sides = (allocator.full_attn_allocator, allocator.mamba_allocator)
    return sum(side._stats_n_flush_moves for side in sides)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES)
@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_our_cache_hits_what_its_replay_hits(setting: Setting, choice: PolicyChoice) -> None:
    """Request for request, token for token, with the same victims, and as many bytes free after each."""
    real = on_marconi(setting, choice)
    brain = replayed(real, setting, choice)
    kv, slots = real.cache.token_to_kv_pool_allocator, real.cache.req_to_token_pool.mamba_allocator
    for request in (*agents(seed=1), *forks(seed=2, num_requests=60)):
        assert real.serve(request) == brain.serve(request)
        real.check_invariants()
        brain.check_invariants()
        assert kv.verify_byte_accounting() == []
        lendable = kv.available_size(), slots.schedulable_available_size()
        assert lendable == (brain.pools.num_free_tokens, brain.pools.num_free_slots)
    counters = brain.hybrid.counters
    assert real.cache.tree_core.hybrid.counters == counters
    assert counters.num_hit_tokens > 0
    assert counters.num_evictions[Need.BYTES] == sum(counters.num_evictions.values()) > 20
    assert num_moved(real.cache) > 0


def test_another_choice_hits_otherwise() -> None:
    """The control: what is compared above depends on the rule."""
    setting = SETTINGS["page-1"]
    real = on_marconi(setting, CHOICES["marconi"])
    brain = replayed(real, setting, CHOICES["lru"])
    requests = agents(seed=1)
    assert serve(real, requests) != [brain.serve(request) for request in requests]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("strategy", "page_tokens", "choice"),
    [(EXTRA, 1, BEST), (EXTRA, 16, BEST), (NO, 1, CHOICES["marconi"]), (EXTRA, 1, CHOICES["lru"])],
    ids=["best", "page-16", "marconi-no-buffer", "lru"],
)
def test_nothing_is_lost_while_requests_fork_end_and_are_aborted(
    strategy: Strategy, page_tokens: int, choice: PolicyChoice
) -> None:
    """What every step reads is in the buffer where it should be, though entries move under it."""
    run = soak(choice, strategy, page_tokens)
    run.run()
    outcomes = run.scheduler.outcomes
    assert outcomes.total() - outcomes[Outcome.RETRACTED] == NUM_REQUESTS
    assert outcomes[Outcome.OUT_OF_MEMORY] == 0
    assert run.scheduler.cache.status().evictions["bytes"] > 20
    assert run.scheduler.num_hit_tokens > 200
    assert num_moved(run.scheduler.cache) > 100
    assert run.num_flushes > 0


@pytest.mark.parametrize(
    ("strategy", "seed", "failure"),
    [(EXTRA, 2, "Out of memory"), (NO, 1, "none is ever admitted")],
    ids=["tracking-slots", "states-that-may-go"],
)
def test_sglangs_own_admission_fails_under_such_requests(strategy: Strategy, seed: int, failure: str) -> None:
    """Why our cache has an admission of its own: SGLang's counts neither tracking slots nor states that may go."""
    host, clock = soak_pools(strategy, 1, memory=Division.ONE_POOL), TraceClock()
    plan = SoakPlan(NUM_REQUESTS, seed, drain_every_requests=50)
    with pytest.raises(SoakFailure, match=failure):
        Soak(stock(host, Core.PYTHON), host, plan, clock).run()


# Controls: a single fault, and the check goes red


def once(method: Callable[..., Any], after: int) -> Callable[..., Any]:
    """`method`, but for one call, which is forgotten."""
    calls = iter(range(1 << 30))
    return lambda *args, **kwargs: None if next(calls) == after else method(*args, **kwargs)


def forget_a_slot(cache: Any) -> None:
    slots = cache.req_to_token_pool.mamba_allocator
    free, forget_once = slots.free, once(slots.free, 15)
    slots.free = lambda indices: (forget_once if indices.numel() else free)(indices)


def forget_kv(cache: Any) -> None:
    kv = cache.token_to_kv_pool_allocator
    kv.free = once(kv.free, 20)


def forget_a_move(cache: Any) -> None:
    kv = cache.token_to_kv_pool_allocator.full_attn_allocator
    kv._move_pages = once(kv._move_pages, 3)


def forget_a_move_of_states(cache: Any) -> None:
    states = cache.token_to_kv_pool_allocator.mamba_allocator
    states._move_pages = lambda *_: None


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (forget_a_slot, "state slots: . of .* lost"),
        (forget_kv, "KV pages: .* lost"),
        (forget_a_move, "reads KV of another sequence"),
        (forget_a_move_of_states, "reads a state of another sequence"),
    ],
)
def test_one_fault_is_seen(fault: Callable[[Any], None], message: str) -> None:
    run = soak(BEST, EXTRA, 1)
    fault(run.scheduler.cache)
    with pytest.raises(SoakFailure, match=message):
        run.run()


# What it tells


def test_the_status_counts_the_bytes_of_the_one_pool() -> None:
    replay = on_marconi(SETTINGS["page-1"], BEST)
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
    cache = on_marconi(SETTINGS["page-16"], BEST).cache
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

    replay = on_marconi(SETTINGS["no-buffer"], CHOICES["lru"])
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
