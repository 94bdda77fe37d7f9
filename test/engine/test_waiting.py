"""Requests that wait, before the real cache: the first of a group leaves a state, and the others wait for it."""

from array import array
from types import SimpleNamespace
from typing import Any

import pytest

from marconi.engine.cache.scheduler import MAX_PASSED
from marconi.engine.launch.policies import PolicyChoice
from marconi.policy.hybrid_cache import HybridCache
from rig.clock import TraceClock
from rig.pools import HostPools, Strategy, marconi, stock
from rig.scheduler import HostScheduler
from rig.workload import Origin, Script

from .host_replays import COSTS

pytestmark = pytest.mark.usefixtures("sglang_configuration")

NUM_SHARED, NUM_OWN = 200, 30


def scheduler(
    strategy: Strategy = Strategy.EXTRA_BUFFER,
    *,
    is_stock: bool = False,
    page_tokens: int = 1,
    num_kv_tokens: int = 20_000,
    num_rows: int = 24,
) -> HostScheduler:
    host = HostPools(num_kv_tokens, 200, 4_096, strategy=strategy, page_tokens=page_tokens, num_rows=num_rows)
    if is_stock:
        return HostScheduler(stock(host), host)
    clock = TraceClock()

    class Stepping(HostScheduler):
        """A second passes with every step."""

        def step(self) -> bool:
            clock.now_s += 1.0
            return super().step()

    return Stepping(marconi(host, PolicyChoice(), COSTS, clock), host)


def prompt(group: int, member: int) -> "array[int]":
    shared, own = 1_000 * group + 1_000, 100 * (20 * group + member) + 100_000
    return array("q", [*range(shared, shared + NUM_SHARED), *range(own, own + NUM_OWN)])


def submit(on: HostScheduler, ids: "array[int]", namespace: tuple[str | None, str | None] = (None, None)) -> Any:
    return on.submit(Script(Origin.NEW, ids, array("q", [3, 4, 5]), 3, namespace))


def run(on: HostScheduler, most_steps: int = 500) -> None:
    for _ in range(most_steps):
        if on.is_idle:
            return
        on.step()
    raise AssertionError(f"{len(on.waiting)} requests wait after {most_steps} steps")


@pytest.mark.parametrize("strategy", Strategy)
def test_of_groups_that_come_at_once_the_first_of_each_is_computed_and_the_others_go_on_from_what_they_share(
    strategy: Strategy,
) -> None:
    on = scheduler(strategy)
    reqs = [submit(on, prompt(group, member)) for member in range(5) for group in range(3)]
    run(on)
    assert [req.cached_tokens for req in reqs] == [0] * 3 + [NUM_SHARED] * 12


def test_stock_computes_what_they_share_for_each() -> None:
    """What the test above compares with."""
    on = scheduler(is_stock=True)
    reqs = [submit(on, prompt(0, member)) for member in range(5)]
    run(on)
    assert [req.cached_tokens for req in reqs] == [0] * 5


def test_with_pages_the_state_stands_at_the_pages_end() -> None:
    on = scheduler(page_tokens=16)
    reqs = [submit(on, prompt(0, member)) for member in range(4)]
    run(on)
    assert [req.cached_tokens for req in reqs] == [0] + [NUM_SHARED // 16 * 16] * 3


def test_repeats_that_come_at_once_wait_for_the_first() -> None:
    on = scheduler()
    reqs = [submit(on, prompt(0, 0)) for _ in range(4)]
    run(on)
    assert [req.cached_tokens for req in reqs] == [0] + [NUM_SHARED + NUM_OWN - 1] * 3


def test_where_nothing_decodes_they_wait_for_what_is_being_computed() -> None:
    """A prefill server's running batch is always empty."""
    on = scheduler()
    on._running_batch = lambda: SimpleNamespace(reqs=[])  # type: ignore[method-assign]
    reqs = [submit(on, prompt(0, member)) for member in range(5)]
    run(on)
    assert [req.cached_tokens for req in reqs] == [0] + [NUM_SHARED] * 4


def test_tenants_wait_for_none_but_their_own() -> None:
    on = scheduler()
    reqs = [submit(on, prompt(0, member), (None, f"tenant {member % 2}")) for member in range(4)]
    run(on)
    assert [req.cached_tokens for req in reqs] == [0, 0, NUM_SHARED, NUM_SHARED]


def test_who_waits_for_a_request_that_is_aborted_is_computed() -> None:
    on = scheduler()
    first, *others = [submit(on, prompt(0, member)) for member in range(3)]
    on.step()
    on.abort(first)
    run(on)
    assert all(req.finished() for req in others)


def test_a_request_that_is_passed_over_gives_back_what_its_match_took() -> None:
    """Its hit is copied to a slot of its own when it is matched; every slot is there again at the end."""
    on = scheduler()
    submit(on, prompt(0, 0)[:100])
    run(on)
    held = on.cache.status().num_states
    reqs = [submit(on, prompt(0, member)) for member in range(6)]
    run(on)
    slots = on.cache.req_to_token_pool.mamba_allocator
    assert slots.available_size() + on.cache.status().num_states == slots.size
    assert on.cache.status().num_states > held
    assert [req.cached_tokens for req in reqs[1:]] == [NUM_SHARED] * 5


def test_more_may_wait_than_are_looked_at_in_one_round() -> None:
    """What is passed over is matched first, so a round ends after so many; nobody is lost or computed twice."""
    on = scheduler()
    reqs = [submit(on, prompt(0, member)) for member in range(MAX_PASSED + 10)]
    on.step()
    assert len(on.waiting) == len(reqs) - 1
    run(on)
    assert [req.cached_tokens for req in reqs] == [0] + [NUM_SHARED] * (len(reqs) - 1)


def num_hits_of_the_last_round(on: HostScheduler) -> int:
    """Ten prompts of 300 tokens, all at once in two rounds: those of the last one that start near their end.

    Two run at a time.
    """
    prompts = [array("q", range(1_000 * number, 1_000 * number + 300)) for number in range(10)]
    for _ in range(2):
        reqs = [submit(on, each) for each in prompts]
        run(on)
    on.cache.sanity_check()
    return sum(req.cached_tokens >= 284 for req in reqs)


def test_what_waiting_requests_would_start_from_goes_last_and_the_end_of_the_queue_first() -> None:
    """By worth some would be evicted just before their turn comes.

    Memory is for eight: two are not held when the round starts, and take the memory of the two that come last.
    """
    assert num_hits_of_the_last_round(scheduler(num_kv_tokens=2_600, num_rows=2)) == 6


def test_a_queue_that_nobody_looks_at_is_evicted_from_its_front(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control of the test above."""
    monkeypatch.setattr(HybridCache, "queue", lambda *_: None)
    assert num_hits_of_the_last_round(scheduler(num_kv_tokens=2_600, num_rows=2)) <= 4
