"""Requests in flight lose nothing in either tier, whenever copies arrive; and a copy that is not waited for is seen."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.mem_cache.hicache_storage import PoolName

from marconi.engine.guards.memory import before_flush_cache
from marconi.engine.reports.status import Status
from rig.late_copies import LateCopies
from rig.pools import Division, Strategy
from rig.scheduler import Outcome
from rig.soak import Soak, SoakFailure, SoakPlan, soak_on_marconi, soak_pools

pytestmark = pytest.mark.usefixtures("one_thread")

EXTRA, NO = Strategy.EXTRA_BUFFER, Strategy.NO_BUFFER
NUM_REQUESTS = 200


def soak(
    strategy: Strategy = EXTRA,
    page_tokens: int = 1,
    host_ratio: float = 3.0,
    num_requests: int = NUM_REQUESTS,
    check_every_steps: int = 8,
    memory: Division = Division.TWO_POOLS,
) -> Soak:
    host = soak_pools(strategy, page_tokens, memory=memory, host_ratio=host_ratio)
    plan = SoakPlan(num_requests, 5, check_every_steps=check_every_steps, drain_every_requests=100)
    return soak_on_marconi(host, plan)


@pytest.mark.parametrize(
    ("strategy", "page_tokens", "host_ratio"),
    [
        (EXTRA, 1, 1.1),
        (NO, 1, 3.0),
        (EXTRA, 1, 3.0),
        (EXTRA, 16, 1.1),
        (NO, 1, 1.1),
    ],
)
@pytest.mark.parametrize("memory", Division, ids=str)
@pytest.mark.one_in(5)
def test_nothing_is_lost_in_either_tier(
    memory: Division, strategy: Strategy, page_tokens: int, host_ratio: float
) -> None:
    """Nor is what one pool moves, which it does not while a copy is under way."""
    run = soak(strategy, page_tokens, host_ratio, check_every_steps=16, memory=memory)
    run.run()
    outcomes = run.scheduler.outcomes
    assert outcomes.total() - outcomes[Outcome.RETRACTED] == NUM_REQUESTS
    assert outcomes[Outcome.ABORTED_RUNNING]
    assert outcomes[Outcome.ABORTED_BETWEEN_CHUNKS]
    assert run.num_flushes == 1
    use = run.scheduler.cache.host_use
    assert use.num_copied > 20
    assert use.num_loads > 5
    assert use.num_dropped > 5 or host_ratio > 2


@pytest.mark.parametrize(("dcp_size", "page_tokens"), [(2, 2), (4, 16)])
def test_nothing_is_lost_where_the_kv_of_a_page_is_dealt_out_among_ranks(dcp_size: int, page_tokens: int) -> None:
    host = replace(soak_pools(EXTRA, page_tokens, num_kv_tokens=960, host_ratio=3.0), dcp_size=dcp_size)
    run = soak_on_marconi(host, SoakPlan(120, 5, check_every_steps=16, drain_every_requests=60))
    run.run()
    use = run.scheduler.cache.host_use
    assert use.kv_tokens.size > 2 * host.num_kv_tokens, "the host counts tokens, not a rank's rows"
    assert min(use.num_copied, use.num_dropped, use.num_loads) > 20


CONTENTS = {"kv_tokens", "state_slots", "num_nodes", "num_ghosts", "num_states", "hit_rate"}
"""Of a status, what is there now; all else was given, or counts from the start of the server."""


def counts(status: Status) -> dict[str, Any]:
    values = status.as_dict()
    return {name: values[name] for name in values.keys() - CONTENTS - {"host"}} | {
        f"host.{name}": value for name, value in values["host"].items() if name not in CONTENTS
    }


def test_a_flush_restarts_no_count() -> None:
    run = soak(host_ratio=1.1, check_every_steps=50)
    cache, flushes = run.scheduler.cache, []
    reset = cache.reset

    def watched_reset() -> None:
        before = cache.status()
        reset()
        flushes.append((before, cache.status()))

    cache.reset = watched_reset
    run.run()
    ((before, after),) = flushes
    assert before.num_states > after.num_states == 0
    assert counts(after) == counts(before)
    assert min(before.num_requests, before.host.num_copied, before.host.num_dropped, before.host.num_loads) > 0


@pytest.mark.one_in(2)
@pytest.mark.parametrize("host_ratio", [1.1, 3.0], ids=["a-full-host", "a-roomy-host"])
def test_what_was_copied_is_there_or_was_dropped(host_ratio: float) -> None:
    """A copy that gives way before it was begun counts as neither."""
    run = soak(host_ratio=host_ratio, num_requests=90)
    while not run.is_done:
        run.advance()
        use = run.scheduler.cache.host_use
        assert use.num_copied - use.num_dropped == use.state_slots.size - use.state_slots.free
    assert run.num_flushes == 0
    assert use.num_copied > 20


@pytest.mark.slow
def test_the_states_that_the_last_request_of_a_row_started_from_are_reckoned_with() -> None:
    """The request after it may start from a state that is loaded, where there was none to lock before."""
    soak(host_ratio=1.1, num_requests=1_400, check_every_steps=100).run()


def test_a_flush_waits_for_the_copies_that_are_under_way() -> None:
    """Their places are used again at once."""
    run = soak()
    cache = run.scheduler.cache
    copies: LateCopies = cache.cache_controller.l2_transfer_engine
    while not run.is_done and not copies.num_under_way:
        run.advance()
    assert copies.num_under_way > 0
    cache.reset()
    assert copies.num_under_way == 0


def test_what_is_under_way_arrives_before_a_scheduler_flushes() -> None:
    """A paused one never looks, and flushes nothing while anything is under way."""
    run = soak(check_every_steps=50)
    cache = run.scheduler.cache
    while not run.is_done and not cache.ongoing_write_through:
        run.advance()
    assert cache.ongoing_write_through
    before_flush_cache(SimpleNamespace(tree_cache=cache))
    assert not cache.ongoing_write_through
    while not run.is_done and not cache.ongoing_load_back:
        run.advance()
    assert cache.ongoing_load_back
    before_flush_cache(SimpleNamespace(tree_cache=cache))
    assert not cache.ongoing_load_back
    cache.sanity_check()
    run.run()


# Controls: a single fault, and the check goes red


def evict_what_is_copied(cache: Any) -> None:
    """A copy to the host does not lock what it reads."""
    track = cache._track_write_through_node

    def unlocked(node_id: int, lock: Any, publish_node_ids: Any) -> None:
        cache.dec_lock_ref(node_id, lock)
        track(node_id, None, publish_node_ids)

    cache._track_write_through_node = unlocked


def free_a_slot_of_the_host(cache: Any) -> None:
    """A slot on the host is free, and used again, while it holds a copy."""
    core, finish = cache.tree_core, cache.tree_core.finish_write_through

    def finish_and_free(node_ids: Any, ack_id: int) -> None:
        finish(node_ids, ack_id)
        for node_id in node_ids:
            cache.host_pool_group.free(core.rows.states[core._nodes[node_id]], pool=PoolName.MAMBA)

    core.finish_write_through = finish_and_free


def forget_a_row_of_the_host(cache: Any) -> None:
    rows = cache.tree_core.rows
    rows.dropped = lambda node: rows._segments.pop(node)


def load_without_waiting(cache: Any) -> None:
    """A forward pass does not wait for what is loaded."""
    copies: LateCopies = cache.cache_controller.l2_transfer_engine
    copies.wait_for_loads = lambda: None  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (evict_what_is_copied, "locks on the tree"),
        (free_a_slot_of_the_host, "mamba on the host: .* lent twice"),
        (forget_a_row_of_the_host, "kv on the host: .* lost"),
        (load_without_waiting, "reads (KV|a state) of another sequence"),
    ],
)
def test_one_fault_is_seen(fault: Callable[[Any], None], message: str) -> None:
    run = soak(num_requests=1_000)
    fault(run.scheduler.cache)
    with pytest.raises(SoakFailure, match=rf"(?s)^seed 5, step \d+, request \d+: AssertionError: .*({message})"):
        run.run()


def test_what_is_evicted_while_it_is_copied_is_read_by_who_loads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the first control, without the balance that would see it earlier."""
    monkeypatch.setattr("rig.soak.check_balance", lambda *_: None)
    run = soak(num_requests=1_000)
    evict_what_is_copied(run.scheduler.cache)
    with pytest.raises(SoakFailure, match="of another sequence"):
        run.run()


def move_what_is_copied(cache: Any) -> None:
    """One pool moves entries while copies read or write them."""
    kv = cache.token_to_kv_pool_allocator
    for side in kv._move_gate_targets():
        side.host_transfer_move_gate = lambda: True


def lend_without_waiting(cache: Any) -> None:
    """What can be lent only once copies have arrived is asked for before."""
    cache._let_arrive = lambda: None


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (move_what_is_copied, "reads (KV|a state) of another sequence"),
        (lend_without_waiting, "Out of memory|no memory, where room was made for it"),
    ],
)
def test_one_fault_in_one_pool_is_seen(fault: Callable[[Any], None], message: str) -> None:
    run = soak(num_requests=1_000, memory=Division.ONE_POOL)
    fault(run.scheduler.cache)
    with pytest.raises(SoakFailure, match=rf"(?s)^seed 5, step \d+, request \d+: .*({message})"):
        run.run()
