"""Requests that wait, before the real cache: the first of a group leaves a state, and the others wait for it."""

from array import array
from types import SimpleNamespace
from typing import Any

import pytest

from marconi.engine.cache.scheduler import MAX_PASSED
from marconi.engine.launch.policies import PolicyChoice
from rig.clock import TraceClock
from rig.pools import HostPools, Strategy, marconi, stock
from rig.scheduler import HostScheduler
from rig.workload import Origin, Script

pytestmark = pytest.mark.usefixtures("sglang_configuration")

NUM_SHARED, NUM_OWN = 200, 30


def scheduler(strategy: Strategy = Strategy.EXTRA_BUFFER, *, is_stock: bool = False) -> HostScheduler:
    host = HostPools(20_000, 200, 4_096, strategy=strategy, num_rows=24)
    if is_stock:
        return HostScheduler(stock(host), host)
    clock = TraceClock()

    class Stepping(HostScheduler):
        """A second passes with every step."""

        def step(self) -> bool:
            clock.now_s += 1.0
            return super().step()

    return Stepping(marconi(host, PolicyChoice(), host.costs, clock), host)


def prompt(group: int, member: int) -> "array[int]":
    shared, own = 1_000 * group + 1_000, 100 * (20 * group + member) + 100_000
    return array("q", [*range(shared, shared + NUM_SHARED), *range(own, own + NUM_OWN)])


def submit(on: HostScheduler, ids: "array[int]") -> Any:
    return on.submit(Script(Origin.NEW, ids, array("q", [3, 4, 5]), 3, (None, None)))


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


def test_where_nothing_decodes_they_wait_for_what_is_being_computed() -> None:
    """A prefill server's running batch is always empty."""
    on = scheduler()
    on._running_batch = lambda: SimpleNamespace(reqs=[])  # type: ignore[method-assign]
    reqs = [submit(on, prompt(0, member)) for member in range(5)]
    run(on)
    assert [req.cached_tokens for req in reqs] == [0] + [NUM_SHARED] * 4


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
