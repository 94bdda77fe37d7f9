"""A hook that raises costs states and nothing else: SGLang goes on without it, and the cache stops planning."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

from marconi.engine.faults import OF_SCHEDULER, Faults, Unrecoverable, around, beside, fails_open
from marconi.engine.policies import CHUNK_END, PolicyChoice
from marconi.engine.touch import Kind
from rig import scheduler as rig_scheduler
from rig.clock import TraceClock
from rig.pools import Division, Strategy, marconi
from rig.ranks import Ranks
from rig.soak import Soak, SoakFailure, SoakPlan, soak_pools

from . import ledger
from .host_replays import COSTS

EXTRA, NO = Strategy.EXTRA_BUFFER, Strategy.NO_BUFFER
NUM_REQUESTS = 160


@pytest.fixture(scope="module", autouse=True)
def _one_thread(sglang_configuration: None) -> None:
    """Operations on indices are small: threads that wait for each other take longer."""
    torch.set_num_threads(1)


@pytest.fixture
def faults() -> Any:
    token = OF_SCHEDULER.set(Faults())
    yield OF_SCHEDULER.get()
    OF_SCHEDULER.reset(token)


def fault(*_: Any, **__: Any) -> Any:
    raise KeyError("planted")


# Hooks


def test_a_hook_beside_what_it_hooks_did_nothing(faults: Faults) -> None:
    assert beside("prefill.hook", lambda result: result + 1)(1) == 2
    assert beside("prefill.hook", fault)(1) is None
    assert faults.num == 1
    assert faults.first == "prefill.hook raised KeyError"


def raises_before(original: Callable[[int], int], value: int) -> int:
    fault()
    return original(value)


def raises_after(original: Callable[[int], int], value: int) -> int:
    original(value)
    return int(fault())


@pytest.mark.parametrize("hook", [raises_before, raises_after])
def test_what_a_failing_hook_stands_around_runs_once(hook: Callable[..., int], faults: Faults) -> None:
    values: list[int] = []

    def original(value: int) -> int:
        values.append(value)
        return 2 * value

    assert around("prefill.hook", hook)(original, 3) == 6
    assert values == [3]
    assert faults.num == 1


def test_what_sglang_raises_below_a_hook_is_its_own(faults: Faults) -> None:
    with pytest.raises(KeyError, match="planted"):
        around("prefill.hook", lambda original, value: original(value))(fault, 1)
    assert faults.first is None


def test_half_of_what_was_to_run_is_no_answer(faults: Faults) -> None:
    def in_parts(original: Callable[[int], int], value: int) -> int:
        original(value)
        original(value)
        return int(fault())

    def unrecoverable(original: Callable[[int], int], value: int) -> int:
        original(value)
        raise Unrecoverable

    with pytest.raises(KeyError):
        around("prefill.hook", in_parts)(lambda value: value, 1)
    with pytest.raises(Unrecoverable):
        around("prefill.hook", unrecoverable)(lambda value: value, 1)


def test_a_fault_is_told_once_a_hook_with_its_traceback(faults: Faults, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            beside("prefill.hook", fault)()
            fails_open(fault)()
    assert [record.getMessage().split()[1] for record in caplog.records] == ["prefill.hook", "fault"]
    assert all(record.exc_info for record in caplog.records)
    assert faults.num == 6


def test_every_hook_without_which_sglang_can_go_on_fails_open() -> None:
    open_ones = {group.title for group in ledger.GROUPS if group.fails_open}
    assert open_ones == {"The queue", "Prefills", "Drafts", "Kernels", "The load"}
    assert all(touch.kind is not Kind.REPLACE for group in ledger.GROUPS if group.fails_open for touch in group.hooks)


# The cache


def soak_of(
    strategy: Strategy, page_tokens: int, memory: Division = Division.TWO_POOLS, host_ratio: float = 0.0
) -> Soak:
    host = soak_pools(strategy, page_tokens, memory=memory, host_ratio=host_ratio)
    clock = TraceClock()
    plan = SoakPlan(NUM_REQUESTS, seed=5, drain_every_requests=50)
    return Soak(marconi(host, PolicyChoice("best"), COSTS, clock), host, plan, clock)


def run_until(soak: Soak, num_submitted: int) -> None:
    while soak.num_submitted < num_submitted or soak.scheduler.is_idle:
        soak.advance()


@pytest.mark.parametrize(
    ("strategy", "page_tokens", "memory", "host_ratio", "keeps"),
    [
        (EXTRA, 1, Division.TWO_POOLS, 0.0, CHUNK_END),
        (EXTRA, 16, Division.TWO_POOLS, 0.0, CHUNK_END),
        (NO, 1, Division.TWO_POOLS, 0.0, CHUNK_END),
        (EXTRA, 1, Division.TWO_POOLS, 1.5, CHUNK_END),
        (EXTRA, 1, Division.ONE_POOL, 0.0, "ends"),
    ],
)
def test_nothing_is_lost_where_planning_stops_in_the_midst(
    strategy: Strategy, page_tokens: int, memory: Division, host_ratio: float, keeps: str
) -> None:
    """Requests that had begun end as well, and later ones go on to hit what is kept without a plan."""
    soak = soak_of(strategy, page_tokens, memory, host_ratio)
    run_until(soak, NUM_REQUESTS // 3)
    cache, hybrid = soak.scheduler.cache, soak.scheduler.cache.tree_core.hybrid
    assert cache.plans
    cache.first_rank.faults.catch("prefill.hook", KeyError())
    num_hits, num_written = soak.scheduler.num_hit_tokens, hybrid.counters.num_states_written
    soak.run()
    assert not cache.plans
    assert cache.cuts_prefills is (keeps == "ends")
    assert soak.scheduler.num_hit_tokens > num_hits
    assert hybrid.counters.num_states_written > num_written
    assert soak.scheduler.outcomes.total() >= NUM_REQUESTS


def test_a_chunk_after_planning_has_stopped_takes_no_slot() -> None:
    """SGLang tracks it: a state of ours beside would be another's, or nobody's."""
    soak = soak_of(EXTRA, 1)
    cache = soak.scheduler.cache
    while soak.scheduler.chunked is None:
        soak.advance()
    cache.first_rank.faults.catch("prefill.hook", KeyError())
    cache.adopt(cache.first_rank.tick(cache.clock()))
    taken: list[Any] = []
    plan = cache.plan_prefill
    cache.plan_prefill = lambda reqs: taken.extend(plan(reqs)) or []
    soak.run()
    assert taken == []


def test_control_slots_of_a_request_that_had_begun_would_be_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    from marconi.engine.scheduler import notes_of

    soak = soak_of(EXTRA, 1)
    run_until(soak, NUM_REQUESTS // 3)
    cache = soak.scheduler.cache
    while not any(run.checkpoints for req in soak.scheduler.in_flight() if (run := notes_of(req).run)):
        soak.advance()
    monkeypatch.setattr(cache, "_free_slots", lambda slots: None)
    cache.first_rank.faults.catch("prefill.hook", KeyError())
    with pytest.raises(SoakFailure):
        soak.run()


def test_ranks_stop_planning_at_the_same_step() -> None:
    host = soak_pools(EXTRA, 1)
    ranks = Ranks(2, host, PolicyChoice("best"), COSTS, SoakPlan(NUM_REQUESTS, seed=1, drain_every_requests=50))
    while ranks.ranks[0].soak.num_submitted < NUM_REQUESTS // 3:
        ranks.advance()
    first, other = ranks.caches
    first.first_rank.faults.catch("prefill.hook", KeyError())
    ranks.run()
    assert (first.plans, other.plans) == (False, False)
    assert first.status().evictions == other.status().evictions


# What was written


def prefilled(monkeypatch: pytest.MonkeyPatch, num_layers: int, others: Callable[[Any], None]) -> Any:
    """A cache whose prefills run so many layers of ours; `others` changes what ranks agree on as they would."""
    soak = soak_of(EXTRA, 1)
    cache = soak.scheduler.cache
    monkeypatch.setattr(
        rig_scheduler, "mark_written", lambda made, _: [setattr(each, "num_layers", num_layers) for each in made]
    )
    monkeypatch.setattr(cache, "_all_reduce_attn_groups", lambda flags, _: others(flags))
    soak.run()
    return cache


def test_a_prefill_that_wrote_nothing_stops_planning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A model whose recurrent layers run where no hook sees them is said once, and served by what SGLang tracks."""
    with caplog.at_level(logging.ERROR):
        cache = prefilled(monkeypatch, 0, lambda flags: None)
    assert not cache.cuts_prefills
    (line,) = [record.getMessage() for record in caplog.records if "no longer planned" in record.getMessage()]
    num_layers = len(cache.req_to_token_pool.mamba_map)
    assert f"a prefill ran 0 of {num_layers} recurrent layers where states can be taken" in line


@pytest.mark.parametrize("which", ["states", "faults"])
def test_what_another_rank_has_not_written_is_not_kept_here(
    which: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def others(flags: torch.Tensor) -> None:
        flags[1 if which == "states" else 0] = 0

    num_layers = len(soak_of(EXTRA, 1).scheduler.cache.req_to_token_pool.mamba_map)
    cache = prefilled(monkeypatch, num_layers, others)
    assert ("were not written" in caplog.text) is (which == "states")
    assert "a hook failed on another rank; states are no longer planned" in caplog.text
    assert not cache.plans


def test_control_alone_a_rank_keeps_what_it_has_written(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    num_layers = len(soak_of(EXTRA, 1).scheduler.cache.req_to_token_pool.mamba_map)
    assert prefilled(monkeypatch, num_layers, lambda flags: None).plans
    assert "were not written" not in caplog.text
