"""Requests in flight together, under pressure, lose nothing; and what is lost, lent twice or misread is seen."""

from collections.abc import Callable
from functools import partialmethod
from typing import Any

import numpy as np
import pytest
import torch

from marconi.engine.cache.scheduler import WaitingRequests
from marconi.engine.launch.policies import CHUNK_END, PolicyChoice
from marconi.events.tree_log import TreeLog
from marconi.policy.waiting import WaitingPrompts
from rig.balance import check_balance
from rig.clock import TraceClock
from rig.contents import Contents, marks
from rig.pools import Core, Division, HostPools, Strategy, marconi, stock
from rig.scheduler import Outcome
from rig.soak import Soak, SoakFailure, SoakPlan, soak_pools
from rig.workload import Origin

from .host_replays import COSTS

EXTRA, NO = Strategy.EXTRA_BUFFER, Strategy.NO_BUFFER
MARCONI = PolicyChoice("marconi", 2.0)
BEST = PolicyChoice("best")
LRU = PolicyChoice("lru")
NUM_REQUESTS = 160
DRAIN_EVERY_REQUESTS = 50


@pytest.fixture(scope="module", autouse=True)
def _one_thread(sglang_configuration: None) -> None:
    """Operations on indices are small: threads that wait for each other take longer."""
    torch.set_num_threads(1)


def on_marconi(choice: PolicyChoice, plan: SoakPlan, strategy: Strategy = EXTRA, page_tokens: int = 1) -> Soak:
    host, clock = soak_pools(strategy, page_tokens), TraceClock()
    return Soak(marconi(host, choice, COSTS, clock), host, plan, clock)


def evictions(soak: Soak) -> dict[str, int]:
    found: dict[str, int] = soak.scheduler.cache.status().evictions
    return found


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("strategy", "page_tokens", "choice"),
    [
        (EXTRA, 1, BEST),
        (EXTRA, 1, MARCONI),
        (EXTRA, 16, LRU),
        (NO, 1, MARCONI),
        (EXTRA, 16, PolicyChoice("best", admission=CHUNK_END)),
    ],
    ids=lambda value: str(value.eviction) if isinstance(value, PolicyChoice) else str(value),
)
def test_nothing_is_lost_while_requests_fork_end_and_are_aborted(
    strategy: Strategy, page_tokens: int, choice: PolicyChoice
) -> None:
    """And whatever can happen to requests and memory did."""
    plan = SoakPlan(NUM_REQUESTS, seed=1, drain_every_requests=DRAIN_EVERY_REQUESTS)
    soak = on_marconi(choice, plan, strategy, page_tokens)
    soak.run()
    outcomes, num_evictions = soak.scheduler.outcomes, evictions(soak)
    assert outcomes.total() - outcomes[Outcome.RETRACTED] == NUM_REQUESTS
    assert all(outcomes[outcome] for outcome in {*Outcome} - {Outcome.OUT_OF_MEMORY}), outcomes
    assert all(soak.origins[origin] for origin in Origin), soak.origins
    assert num_evictions["kv"] > 30
    assert num_evictions["states"] > 10 or page_tokens > 1
    assert soak.scheduler.num_hit_tokens > 300
    assert soak.scheduler.num_chunks > 30
    assert soak.num_flushes == NUM_REQUESTS // DRAIN_EVERY_REQUESTS // 2 > 0


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("strategy", "page_tokens"), [(EXTRA, 1), (EXTRA, 16), (NO, 1)])
def test_the_same_requests_lose_nothing_on_stock_either(strategy: Strategy, page_tokens: int) -> None:
    """The control of the driver: what it does to a cache, SGLang's own can take."""
    host, clock = soak_pools(strategy, page_tokens), TraceClock()
    soak = Soak(stock(host, Core.PYTHON), host, SoakPlan(NUM_REQUESTS, seed=1), clock)
    soak.run()
    assert soak.scheduler.outcomes[Outcome.FINISHED] > NUM_REQUESTS // 2


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("strategy", "page_tokens", "memory"),
    [
        (EXTRA, 1, Division.TWO_POOLS),
        (EXTRA, 16, Division.TWO_POOLS),
        (NO, 1, Division.TWO_POOLS),
        (EXTRA, 1, Division.ONE_POOL),
    ],
)
def test_events_leave_what_the_tree_holds_whatever_happens_to_requests(
    strategy: Strategy, page_tokens: int, memory: Division
) -> None:
    soak = telling(strategy, page_tokens, memory)
    soak.run()
    assert soak.num_events > 400
    assert sum(evictions(soak).values()) > 30


def telling(strategy: Strategy = EXTRA, page_tokens: int = 1, memory: Division = Division.TWO_POOLS) -> Soak:
    host, clock, plan = soak_pools(strategy, page_tokens, memory=memory), TraceClock(), SoakPlan(NUM_REQUESTS, seed=1)
    return Soak(marconi(host, BEST, COSTS, clock, TreeLog()), host, plan, clock)


def test_one_change_that_is_not_noted_is_seen() -> None:
    soak = telling()
    log = soak.scheduler.cache.log
    log.kept_state = once(log.kept_state, nothing)
    with pytest.raises(SoakFailure, match=r"(events leave 0 blocks more|no state at)"):
        soak.run()


def short(page_tokens: int) -> Soak:
    """Prompts of 1 to 200 tokens, many of them shorter than a page."""
    host, clock = soak_pools(EXTRA, page_tokens, num_kv_tokens=320), TraceClock()
    return Soak(marconi(host, BEST, COSTS, clock), host, SoakPlan(NUM_REQUESTS, seed=1), clock)


@pytest.mark.parametrize("page_tokens", [1, 16, 64])
def test_whoever_was_reported_come_is_reported_gone_however_short_its_prompt(page_tokens: int) -> None:
    """A request that SGLang has ended, in whichever way, is held at no check (`Soak`)."""
    soak = short(page_tokens)
    soak.run()
    assert soak.scheduler.outcomes[Outcome.ABORTED_WAITING] > 5
    assert not soak.scheduler.cache.tree_core.hybrid.awaiting


def test_the_same_plan_gives_the_same_run() -> None:
    runs = []
    for seed in (3, 3, 4):
        soak = on_marconi(BEST, SoakPlan(60, seed))
        soak.run()
        runs.append((soak.num_steps, soak.scheduler.outcomes, soak.scheduler.num_hit_tokens, evictions(soak)))
    assert runs[0] == runs[1] != runs[2]


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
    soak = on_marconi(BEST, SoakPlan(NUM_REQUESTS, seed=7, check_every_steps=1))
    fault(soak.scheduler.cache)
    with pytest.raises(SoakFailure, match=rf"(?s)^seed 7, step \d+, request \d+: AssertionError: .*({message})"):
        soak.run()


def test_memory_that_is_nowhere_is_lost_however_many_there_is_of_it_twice() -> None:
    """Sums alone would agree."""
    soak = on_marconi(BEST, SoakPlan(1, seed=1))
    kv = soak.scheduler.cache.token_to_kv_pool_allocator
    check_balance(soak.scheduler.cache, [])
    kv.free_pages[0] = kv.free_pages[1]
    with pytest.raises(AssertionError, match="1 lent twice, first 2, to free"):
        check_balance(soak.scheduler.cache, [])


def test_a_request_that_can_never_be_admitted_ends_the_run() -> None:
    soak = on_marconi(BEST, SoakPlan(5, seed=1))
    soak.scheduler.cache.token_to_kv_pool_allocator.free_pages = torch.tensor([1])
    with pytest.raises(SoakFailure, match="none is ever admitted"):
        soak.run()


def test_contents_tell_sequences_and_name_spaces_apart() -> None:
    ours, theirs = (marks([1, 2, 3], ("key", salt)) for salt in (None, "theirs"))
    contents, row = Contents(10, 4), np.array([7, 3, 5])
    contents.write_kv(row, ours[1:])
    contents.check_kv(row, ours[1:], "a request")
    with pytest.raises(AssertionError, match="first at token 0 of 3"):
        contents.check_kv(row, theirs[1:], "a request")
    with pytest.raises(AssertionError, match="first at token 2 of 3"):
        contents.check_kv(row, marks([1, 2, 4], ("key", None))[1:], "a request")
    contents.write_states([2], ours[3])
    contents.copy_states([2], [1])
    contents.check_state(1, ours[3], "a request")
    with pytest.raises(AssertionError, match="in slot 1"):
        contents.check_state(1, ours[2], "a request")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SoakPlan(0, seed=1), "^requests must be 1 or more, got 0"),
        (lambda: SoakPlan(1, seed=1, check_every_steps=0), "steps from check to check must be 1 or more"),
        (lambda: SoakPlan(1, seed=1, drain_every_requests=0), "requests from drain to drain must be 1 or more"),
        (lambda: HostPools(1000, 10, 100, num_rows=0), "num_rows must be 1 or more, got 0"),
        (lambda: HostPools(1000, 24, 100, num_rows=6), "must be at least 25 for 6 requests"),
    ],
)
def test_bad_input_is_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
