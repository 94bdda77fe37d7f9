"""Belady's rule: next uses by a look at every later request, victims by a scan, and the optimum where there is one."""

import random
from collections.abc import Callable

import pytest

from marconi.policy.admission.plan import Judicious
from marconi.policy.base import Costs, Eviction, Need
from marconi.policy.eviction.best import BestEviction
from marconi.policy.eviction.lru import SeparateLru
from marconi.policy.eviction.utility import UtilityEviction
from marconi.policy.forecast.forecast import Forecast
from marconi.policy.request import Request, Trace, pack
from marconi.tree import RadixTree
from marconi_lab.eviction.coverage import CoverageEviction
from marconi_lab.eviction.gdsf import GreedyDualSizeFrequency
from marconi_lab.eviction.joint_lru import JointLru
from marconi_lab.eviction.seglen import SegmentLengthEviction
from marconi_lab.hindsight.belady import BeladyEviction
from marconi_lab.hindsight.future import Future
from policy.random_runs import WORLDS, Extent, extents, random_requests
from rig.budget_cache import BudgetCache, JointBudget
from tree.faults import keep_to_itself

from .hindsight_twin import Definition, Items, compare, hits_of, most_hits, served


def belady(costs: Costs, future: Future, needs: frozenset[Need]) -> tuple[BeladyEviction, Definition]:
    return BeladyEviction(costs, future, needs), Definition(costs)


@extents
def test_next_uses_and_victims_are_those_of_a_look_at_all_that_comes(extent: Extent) -> None:
    compare(extent, belady)


def test_a_rule_that_does_not_hear_of_states_below_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_to_itself(monkeypatch, "_note_nearest_above")
    with pytest.raises(AssertionError, match="is right"):
        [served(belady, "hybrid-split", 3, seed, 150, 3) for seed in range(20)]  # one of the seeds shows it


COSTS = Costs(kv_bytes_per_token=1, state_bytes=10, flops=float)


def test_what_is_used_last_goes_first_and_what_is_never_used_before_it() -> None:
    def turn(text: str, now_s: float) -> Request:
        return Request(pack(map(ord, text)), len(text) - 1, 1, len(text), now_s)

    texts = ("aaaa_", "bbbb_", "cccc_", "dddd_", "aaaaa__", "bbbbb__", "dddddd__")
    trace = Trace("letters", 1, tuple(turn(text, float(now_s)) for now_s, text in enumerate(texts)))
    rule = BeladyEviction(COSTS, Future(trace))
    held = BudgetCache(RadixTree(), Judicious(least_tokens=1), rule, COSTS, JointBudget(1000))
    for request in trace.requests[:4]:
        held.serve(request)
    order = []
    for num_bytes in (50, 30, 20):
        before = {node.key for node in held.tree.nodes()}
        held.budget = JointBudget(num_bytes)
        held._shrink(4.0)
        (gone,) = before - {node.key for node in held.tree.nodes()}
        order.append(chr(gone[0]))
    assert order == ["c", "d", "b"]


def test_of_what_is_never_used_again_the_one_that_frees_most_goes_first() -> None:
    texts = ("aaaa_", "bbbbbbbb_", "cc_")
    requests = [Request(pack(map(ord, text)), len(text) - 1, 1, len(text), 0.0) for text in texts]
    trace = Trace("letters", 1, tuple(requests))
    rule = BeladyEviction(COSTS, Future(trace))
    held = BudgetCache(RadixTree(), Judicious(least_tokens=1), rule, COSTS, JointBudget(1000))
    for request in requests:
        held.serve(request)
    victim = rule.victim(Need.BYTES, 1.0)
    assert victim is not None
    assert victim.depth == 8


def test_another_trace_than_its_own_is_refused() -> None:
    one, other = (Request(pack(ids), 2, 0, 2, 0.0) for ids in ([1, 2], [1, 3]))
    held = BudgetCache(
        RadixTree(),
        Judicious(least_tokens=1),
        BeladyEviction(COSTS, Future(Trace("one", 1, (one,)))),
        COSTS,
        JointBudget(99),
    )
    with pytest.raises(ValueError, match="request 0 must be one of the trace"):
        held.serve(other)
    again = BudgetCache(
        RadixTree(),
        Judicious(least_tokens=1),
        BeladyEviction(COSTS, Future(Trace("one", 1, (one,)))),
        COSTS,
        JointBudget(99),
    )
    again.serve(one)
    with pytest.raises(ValueError, match="request 1 must be one of the trace"):
        again.serve(other)


def test_it_remembers_the_states_that_are_held_and_no_others() -> None:
    costs, budget, admission, needs = WORLDS["hybrid"]
    trace = Trace("random", 1, tuple(random_requests(5, 300)))
    rule = BeladyEviction(costs, Future(trace), needs)
    held = BudgetCache(RadixTree(max_ghosts=30), admission, rule, costs, budget)
    for request in trace.requests:
        held.serve(request)
        states = {node for node in held.tree.nodes() if node.has_state}
        assert set(rule._prefix_of) == states


# Entries of one size and benefit: states without KV, each of its own path.


@pytest.mark.parametrize("seed", range(30))
def test_of_equal_entries_it_has_as_many_hits_as_any_choice_of_victims_could(seed: int) -> None:
    rng = random.Random(seed)  # noqa: S311 - test data
    items = Items([rng.randrange(5) for _ in range(16)])
    num_places = rng.randint(1, 3)
    belady = BeladyEviction(items.costs, Future(items.trace))
    assert hits_of(items, belady, num_places) == most_hits(items.sequence, num_places)


OTHERS: dict[str, Callable[[Costs], Eviction]] = {
    "lru": lambda costs: SeparateLru(),
    "lru-joint": lambda costs: JointLru(),
    "marconi": lambda costs: UtilityEviction(costs, 0.5),
    "seglen": lambda costs: SegmentLengthEviction(),
    "coverage": lambda costs: CoverageEviction(),
    "gdsf": GreedyDualSizeFrequency,
    "best": lambda costs: BestEviction(costs, Forecast()),
}


@pytest.mark.parametrize("other", list(OTHERS))
@pytest.mark.parametrize("seed", range(3))
def test_of_equal_entries_no_rule_has_more_hits(other: str, seed: int) -> None:
    rng = random.Random(seed)  # noqa: S311 - test data
    items = Items([min(int(rng.expovariate(0.1)), rng.randrange(1, 40)) for _ in range(500)])
    for num_places in (1, 4, 12):
        most = hits_of(items, BeladyEviction(items.costs, Future(items.trace)), num_places)
        fewer = hits_of(items, OTHERS[other](items.costs), num_places)
        assert 0 < fewer <= most


def test_a_rule_that_is_not_optimal_is_told_from_the_optimum() -> None:
    items = Items([0, 1, 2, 0, 1, 2, 0, 1, 2])
    assert hits_of(items, JointLru(), 2) == 0
    assert hits_of(items, BeladyEviction(items.costs, Future(items.trace)), 2) == most_hits(items.sequence, 2) == 4
