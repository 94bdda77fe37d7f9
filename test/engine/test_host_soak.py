"""Requests in flight together, under pressure, lose nothing; and what is lost, lent twice or misread is seen."""

from collections.abc import Callable
from dataclasses import replace
from functools import partialmethod
from typing import Any

import pytest
import torch

from marconi.engine.cache.scheduler import WaitingRequests
from marconi.engine.launch.policies import CHUNK_END, JUDICIOUS, PolicyChoice
from marconi.events.tree_log import TreeLog
from marconi.policy.waiting import WaitingPrompts
from rig.balance import check_balance
from rig.joint_pools import num_moved
from rig.pools import Division, Strategy
from rig.scheduler import Outcome
from rig.soak import Soak, SoakFailure, SoakPlan, soak_on_marconi, soak_on_stock, soak_pools
from rig.workload import Origin

pytestmark = pytest.mark.usefixtures("one_thread")

EXTRA, NO = Strategy.EXTRA_BUFFER, Strategy.NO_BUFFER
NUM_REQUESTS = 160
DRAIN_EVERY_REQUESTS = 50


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("memory", "strategy", "page_tokens", "admission"),
    [
        (Division.TWO_POOLS, EXTRA, 1, JUDICIOUS),
        (Division.TWO_POOLS, EXTRA, 16, JUDICIOUS),
        (Division.TWO_POOLS, NO, 1, JUDICIOUS),
        (Division.ONE_POOL, EXTRA, 1, JUDICIOUS),
        (Division.ONE_POOL, EXTRA, 16, JUDICIOUS),
        (Division.ONE_POOL, NO, 1, JUDICIOUS),
        (Division.TWO_POOLS, EXTRA, 16, CHUNK_END),
    ],
    ids=str,
)
def test_nothing_is_lost_while_requests_fork_end_and_are_aborted(
    memory: Division, strategy: Strategy, page_tokens: int, admission: str
) -> None:
    """And whatever can happen to requests and memory did; events leave what the tree holds (`Soak`)."""
    host = soak_pools(strategy, page_tokens, memory=memory)
    plan = SoakPlan(NUM_REQUESTS, seed=3, drain_every_requests=DRAIN_EVERY_REQUESTS)
    soak = soak_on_marconi(host, plan, PolicyChoice("best", admission=admission), TreeLog())
    soak.run()
    outcomes, evictions = soak.scheduler.outcomes, soak.scheduler.cache.status().evictions
    assert outcomes.total() - outcomes[Outcome.RETRACTED] == NUM_REQUESTS
    assert all(soak.origins[origin] for origin in Origin), soak.origins
    if memory is Division.ONE_POOL:
        rare = {Outcome.OUT_OF_MEMORY, Outcome.RETRACTED}
        assert outcomes[Outcome.OUT_OF_MEMORY] == 0
        assert evictions["bytes"] > 30
        assert num_moved(soak.scheduler.cache) > 100
    else:
        rare = {Outcome.OUT_OF_MEMORY}
        assert evictions["kv"] > 30
        assert evictions["states"] > 10 or page_tokens > 1
    assert all(outcomes[outcome] for outcome in {*Outcome} - rare), outcomes
    assert soak.scheduler.num_hit_tokens > 300
    assert soak.scheduler.num_chunks > 30
    assert soak.num_flushes == NUM_REQUESTS // DRAIN_EVERY_REQUESTS // 2 > 0
    assert soak.num_events > 400


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("strategy", "page_tokens"), [(EXTRA, 1), (EXTRA, 16), (NO, 1)])
def test_the_same_requests_lose_nothing_on_stock_either(strategy: Strategy, page_tokens: int) -> None:
    """The control of the driver: what it does to a cache, SGLang's own can take."""
    soak = soak_on_stock(soak_pools(strategy, page_tokens), SoakPlan(NUM_REQUESTS, seed=1))
    soak.run()
    assert soak.scheduler.outcomes[Outcome.FINISHED] > NUM_REQUESTS // 2


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("dcp_size", "page_tokens"), [(2, 2), (4, 16), (4, 64)])
@pytest.mark.parametrize(
    ("memory", "admission"),
    [(Division.TWO_POOLS, JUDICIOUS), (Division.TWO_POOLS, CHUNK_END), (Division.ONE_POOL, JUDICIOUS)],
    ids=str,
)
def test_nothing_is_lost_where_the_kv_of_a_page_is_dealt_out_among_ranks(
    dcp_size: int, page_tokens: int, memory: Division, admission: str
) -> None:
    """`--dcp-size`: SGLang widens pages and pools by as much, and cuts prefills on a grid of its own."""
    host = replace(soak_pools(EXTRA, page_tokens, num_kv_tokens=960, memory=memory), dcp_size=dcp_size)
    soak = soak_on_marconi(host, SoakPlan(60, seed=1), PolicyChoice("best", admission=admission))
    cache = soak.scheduler.cache
    assert cache.page_size == page_tokens == cache.token_to_kv_pool_allocator.page_size
    if memory is Division.TWO_POOLS:
        assert cache.token_to_kv_pool_allocator.get_kvcache().size == host.num_kv_tokens // dcp_size
    soak.run()
    assert soak.scheduler.num_hit_tokens > 100
    assert memory is Division.TWO_POOLS or num_moved(cache) > 5


def test_a_tree_whose_pages_are_one_ranks_part_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: it gives KV back by less than the allocator lends."""
    monkeypatch.setattr("rig.pools._tree_page", lambda host: host.page_tokens // host.dcp_size)
    host = replace(soak_pools(EXTRA, 16), dcp_size=4)
    with pytest.raises((SoakFailure, AssertionError)):
        soak_on_marconi(host, SoakPlan(NUM_REQUESTS, seed=1)).run()


def test_one_change_that_is_not_noted_is_seen() -> None:
    soak = soak_on_marconi(soak_pools(EXTRA, 1), SoakPlan(NUM_REQUESTS, seed=1), log=TreeLog())
    log = soak.scheduler.cache.log
    log.kept_state = once(log.kept_state, nothing)
    with pytest.raises(SoakFailure, match=r"(events leave 0 blocks more|no state at)"):
        soak.run()


def short(page_tokens: int) -> Soak:
    """Prompts of 1 to 200 tokens, many of them shorter than a page."""
    return soak_on_marconi(soak_pools(EXTRA, page_tokens, num_kv_tokens=320), SoakPlan(NUM_REQUESTS, seed=1))


@pytest.mark.parametrize("page_tokens", [1, 16, 64])
def test_whoever_was_reported_come_is_reported_gone_however_short_its_prompt(page_tokens: int) -> None:
    """A request that SGLang has ended, in whichever way, is held at no check (`Soak`)."""
    soak = short(page_tokens)
    soak.run()
    assert soak.scheduler.outcomes[Outcome.ABORTED_WAITING] > 5
    assert not soak.scheduler.cache.tree_core.hybrid.awaiting


# Controls: a single fault, and the check goes red


def once(method: Callable[..., Any], instead: Callable[..., Any], after: int = 20) -> Callable[..., Any]:
    """`method`, but for one call: `instead` gets that one, and its arguments."""
    calls = iter(range(1 << 30))

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == after:
            return instead(*args, **kwargs)
        return method(*args, **kwargs)

    return wrapped


def nothing(*_args: Any, **_kwargs: Any) -> None:
    """A call that is forgotten."""


def add_if_indexed(prompts: WaitingPrompts, add: Callable[..., None], key: Any, request: Any) -> None:
    if request.num_known_tokens:
        add(prompts, key, request)


@pytest.mark.parametrize(
    ("owner", "method", "instead", "message"),
    [
        (WaitingPrompts, "add", add_if_indexed, "in the index and not awaited"),
        (WaitingRequests, "ended", nothing, "held, though SGLang has ended them"),
        (WaitingRequests, "aborted", nothing, "held, though SGLang has ended them"),
    ],
)
def test_a_request_that_is_never_reported_gone_is_seen(
    owner: Any, method: str, instead: Callable[..., None], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, method, partialmethod(instead, getattr(owner, method)))
    with pytest.raises(SoakFailure, match=message):
        short(64).run()


def once_for_a_slot(free: Callable[[torch.Tensor], None], instead: Callable[[torch.Tensor], None]) -> Any:
    """As `once`; a call that gives back no slot at all could not be told from one that is forgotten."""
    wrapped = once(free, instead)
    return lambda slots: wrapped(slots) if slots.numel() else free(slots)


def drop_a_slot(cache: Any) -> None:
    allocator = cache.req_to_token_pool.mamba_allocator
    allocator.free = once_for_a_slot(allocator.free, nothing)


def drop_a_planned_slot(cache: Any) -> None:
    free = cache.pools.free
    dropped: list[torch.Tensor] = []

    def drop_the_first(slots: list[torch.Tensor]) -> None:
        if slots and not dropped:
            dropped.append(slots.pop())
        free(slots)

    cache.pools.free = drop_the_first


def drop_an_evicted_slot(cache: Any) -> None:
    memory, dropped = cache.tree_core.memory, list[Any]()
    take = memory.take_freed_states

    def drop_the_first() -> list[Any]:
        freed: list[Any] = take()
        if not freed or dropped:
            return freed
        dropped.extend(freed)
        return []

    memory.take_freed_states = drop_the_first


def drop_kv(cache: Any) -> None:
    kv = cache.token_to_kv_pool_allocator
    kv.free = once(kv.free, nothing)


def free_kv_twice(cache: Any) -> None:
    kv, free = cache.token_to_kv_pool_allocator, cache.token_to_kv_pool_allocator.free

    def twice(indices: torch.Tensor) -> None:
        free(indices)
        free(indices)

    kv.free = once(free, twice)


def free_a_slot_twice(cache: Any) -> None:
    allocator, free = cache.req_to_token_pool.mamba_allocator, cache.req_to_token_pool.mamba_allocator.free

    def twice(slot: torch.Tensor) -> None:
        free(slot)
        free(slot)

    allocator.free = once_for_a_slot(free, twice)


def forget_a_lock(cache: Any) -> None:
    cache.unlock = once(cache.unlock, nothing)


def forget_a_row(cache: Any) -> None:
    rows = cache.req_to_token_pool
    rows.free = once(rows.free, nothing)


def miscount(cache: Any) -> None:
    memory = cache.tree_core.memory
    memory.protect = once(memory.protect, lambda node: type(memory).protect(memory, node) or _add_one(memory))


def _add_one(memory: Any) -> None:
    memory.num_protected_tokens += 1


def keep_a_state_one_token_early(cache: Any) -> None:
    find = cache._end_state

    def early(req: Any, up_to: int) -> Any:
        end = find(req, up_to)
        return end if end is None else end._replace(depth=end.depth - 1)

    cache._end_state = early


def share_between_tenants(cache: Any) -> None:
    look_up = cache.tree_core.look_up

    def anywhere(key: Any, _packed: Any) -> Any:
        key.extra_key = key.cache_salt = None
        return look_up(key)

    cache.tree_core.look_up = anywhere


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (drop_a_slot, "state slots: [123] of 26 lost"),
        (drop_a_planned_slot, "state slots: .* lost"),
        (drop_an_evicted_slot, "state slots: .* lost"),
        (drop_kv, "KV pages: .* lost"),
        (free_kv_twice, "KV pages: .* lent twice|KV of another sequence|48[1-9] tokens free, .* in use, of 480"),
        (free_a_slot_twice, "state slots: .* lent twice|a state of another sequence"),
        (forget_a_lock, "locks on the tree"),
        (forget_a_row, "rows free|shares what is not held|in use, of 480"),
        (miscount, "protected tokens are miscounted"),
        (keep_a_state_one_token_early, "reads a state of another sequence"),
        (share_between_tenants, "of another sequence"),
    ],
)
def test_one_fault_is_seen(fault: Callable[[Any], None], message: str) -> None:
    soak = soak_on_marconi(soak_pools(EXTRA, 1), SoakPlan(NUM_REQUESTS, seed=7, check_every_steps=1))
    fault(soak.scheduler.cache)
    with pytest.raises(SoakFailure, match=rf"(?s)^seed 7, step \d+, request \d+: AssertionError: .*({message})"):
        soak.run()


def test_memory_that_is_nowhere_is_lost_however_many_there_is_of_it_twice() -> None:
    """Sums alone would agree."""
    soak = soak_on_marconi(soak_pools(EXTRA, 1), SoakPlan(1, seed=1))
    kv = soak.scheduler.cache.token_to_kv_pool_allocator
    check_balance(soak.scheduler.cache, [])
    kv.free_pages[0] = kv.free_pages[1]
    with pytest.raises(AssertionError, match="1 lent twice, first 2, to free"):
        check_balance(soak.scheduler.cache, [])
