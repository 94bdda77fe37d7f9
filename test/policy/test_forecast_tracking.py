"""A forecast that follows a cache, worked by hand, and what it keeps in memory.

`test_eviction_best.py` holds its lives and rates against a forecast that sees all.
"""

import gc
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from marconi.policy.admission.plan import Guarded, Judicious
from marconi.policy.base import Costs, Need
from marconi.policy.eviction.best import BestEviction
from marconi.policy.forecast import forecast as forecast_module
from marconi.policy.forecast.forecast import ARRIVALS_A_FIT, FIRST_FITS, MAX_LIVES, NUM_RHYTHMS, Forecast
from marconi.policy.forecast.turns import DivergenceWindow
from marconi.policy.request import Request, pack
from marconi.tree import Match, Node, RadixTree
from rig.budget_cache import BudgetCache, JointBudget

from .best_twin import WatchedBest, cache_of
from .random_runs import WORLDS, random_requests

COSTS = Costs(kv_bytes_per_token=1, state_bytes=10, flops=float)
PASSED, WAYPOINT, BRANCH = range(NUM_RHYTHMS, NUM_RHYTHMS + 3)


def request(text: str, now_s: float = 0.0, num_output: int = 1) -> Request:
    """A prompt of all but the last letters, which are its answer."""
    return Request(pack(map(ord, text)), len(text) - num_output, num_output, len(text), now_s)


def cache() -> tuple[BudgetCache, Forecast]:
    """With room for everything, without guards."""
    forecast = Forecast()
    rule = BestEviction(COSTS, forecast)
    return BudgetCache(RadixTree(max_ghosts=99), Judicious(least_tokens=1), rule, COSTS, JointBudget(10_000)), forecast


def blind(forecast: Forecast) -> None:
    """Does not see states go."""
    forecast.gone = lambda node, now_s: None  # type: ignore[method-assign]


def deaf(forecast: Forecast) -> None:
    """Does not hear that something evicted is asked for."""
    arrived = forecast.arrived
    forecast.arrived = lambda lease, now_s: arrived(  # type: ignore[method-assign]
        lease._replace(match=lease.match._replace(ghost=None)), now_s
    )


@pytest.mark.parametrize("fault", [blind, deaf])
def test_a_forecast_that_misses_something_is_caught(fault: Callable[[Forecast], None]) -> None:
    costs, budget, _, needs = WORLDS["hybrid"]
    held = cache_of(costs, budget, needs)
    rule = held.eviction
    assert isinstance(rule, WatchedBest)
    fault(rule.forecast)
    try:
        for new in random_requests(7, 150):
            held.serve(new)
    except AssertionError as error:
        assert "is right" in str(error)  # noqa: PT017 - a victim differs, or else the rates do
    else:
        assert rule.forecast._model.baseline != pytest.approx(np.array(rule.naive.estimate.baseline), rel=1e-6)


# Lives, worked by hand.


def lives_of(forecast: Forecast, now_s: float) -> list[tuple[int, float, bool]]:
    """Stratum, age and use of every life, oldest first."""
    strata, _, used, ages_s = forecast._lives.seen(now_s)
    return list(zip(strata.tolist(), ages_s.tolist(), used.tolist(), strict=True))


def state(held: BudgetCache, text: str) -> Node:
    match = held.tree.match(pack(map(ord, text)), len(text))
    assert match.checkpoint.depth == len(text)
    return match.checkpoint


def evict(held: BudgetCache, text: str, now_s: float) -> None:
    node = state(held, text)
    held.evict_node(node, Need.BYTES, now_s)


def test_an_end_waits_until_its_conversation_goes_on_and_is_then_passed() -> None:
    held, forecast = cache()
    held.serve(request("aaaa_", 0.0))
    assert lives_of(forecast, 30.0) == [(0, 30.0, False)]
    held.serve(request("aaaabbbb_", 50.0))
    rhythm = 3  # 50 s are between 16 and 64, the third pair of octaves
    assert sorted(lives_of(forecast, 60.0)) == [(0, 50.0, True), (rhythm, 10.0, False), (PASSED, 10.0, False)]


def test_a_state_where_prompts_part_is_a_branch_point_whatever_is_left_of_them() -> None:
    held, forecast = cache()
    for now_s, text in enumerate(("aaaabb_", "aaaacc_", "aaaadd_")):
        held.serve(request(text, float(now_s)))
    assert forecast.standing(state(held, "aaaa"), 3.0)[0] == BRANCH
    evict(held, "aaaadd", 3.0)
    evict(held, "aaaacc", 3.0)
    assert forecast.standing(state(held, "aaaa"), 3.0)[0] == BRANCH, "with one child left"
    evict(held, "aaaabb", 3.0)
    assert forecast.standing(state(held, "aaaa"), 3.0)[0] == BRANCH, "with none left: prompts have parted there"


def test_a_state_on_the_way_from_which_one_path_goes_on_is_a_waypoint() -> None:
    held, forecast = cache()
    held.admission = Guarded(Judicious(least_tokens=1), forecast.divergence, COSTS)
    forecast.divergence.distance_tokens, forecast.divergence.gain_tokens = 3, 1e9
    held.serve(request("aaaabbbb_"))
    assert forecast.standing(state(held, "aaaab"), 3.0)[0] == WAYPOINT


def test_what_is_left_of_a_path_is_ranked_as_an_end_and_has_no_life_until_a_request_ends_there_again() -> None:
    held, forecast = cache()
    held.serve(request("aaaa_", 0.0))
    held.serve(request("aaaabbbb_", 50.0))
    evict(held, "aaaabbbb", 60.0)
    assert forecast.standing(state(held, "aaaa"), 60.0)[0] < NUM_RHYTHMS
    lives = [(0, 50.0, True), (3, 40.0, False), (PASSED, 10.0, False)]
    assert sorted(lives_of(forecast, 90.0)) == lives, "of the ends one is unused: the evicted one, as its ghost"
    held.serve(request("aaaa_", 100.0))
    assert [life[2] for life in lives_of(forecast, 130.0) if life[:2] == (0, 30.0)] == [False], "an end"


def test_what_was_evicted_too_early_is_used_when_it_is_asked_for() -> None:
    held, forecast = cache()
    held.serve(request("aaaa_", 0.0))
    evict(held, "aaaa", 10.0)
    assert lives_of(forecast, 30.0) == [(0, 30.0, False)], "it waits on as a ghost"
    held.serve(request("aaaabb_", 40.0))
    assert lives_of(forecast, 40.0)[0] == (0, 40.0, True)


def test_a_state_on_the_way_is_seen_no_more_once_it_is_evicted() -> None:
    held, forecast = cache()
    held.serve(request("aaaa_", 0.0))
    held.serve(request("aaaabbbb_", 50.0))
    evict(held, "aaaa", 60.0)
    assert (PASSED, 10.0, False) in lives_of(forecast, 99.0)


def test_a_ghost_whose_kv_is_held_again_for_something_deeper_is_seen_no_more() -> None:
    held, forecast = cache()
    held.serve(request("aaaa_", 0.0))
    held.serve(request("aaaabbbb_", 50.0))
    evict(held, "aaaabbbb", 60.0)
    evict(held, "aaaa", 60.0)
    held.serve(request("aaaabbbbcccc_", 100.0))
    lives = lives_of(forecast, 500.0)
    assert (3, 50.0, True) in lives, "the deeper one is what would have been used"
    assert (PASSED, 10.0, False) in lives, "the other had none from 60 s on"


def test_the_turns_of_a_conversation_are_counted_through_evictions() -> None:
    held, forecast = cache()
    held.serve(request("aaaa_", 0.0))
    evict(held, "aaaa", 1.0)
    held.serve(request("aaaabb_", 4.0))
    traits = forecast._traits[state(held, "aaaabb").serial]
    assert (traits.turn, traits.log2_gap) == (1, 2.0)


def test_a_ghost_that_never_had_a_state_hides_no_conversation() -> None:
    held, forecast = cache()
    held.serve(request("aaaa_", 0.0))
    held.serve(request("aaaabbcc_", 4.0))
    held.serve(request("aaaabbdd_", 4.0))
    for text in ("aaaabbcc", "aaaabbdd", "aaaabb"):
        evict(held, text, 5.0)
    held.serve(request("aaaabbee_", 8.0))  # would have started from 'aaaabb'
    assert forecast._traits[state(held, "aaaabbee").serial].turn == 2
    parted, fresh = cache()
    parted.admission = Ends()
    for now_s, text in enumerate(("aaaa_", "aaaabbcc_", "aaaabbdd_")):
        parted.serve(request(text, 4.0 * now_s))
    for text in ("aaaabbcc", "aaaabbdd"):
        evict(parted, text, 9.0)
    lease = parted.start(request("aaaabbee_", 16.0), 16.0)
    assert lease.match.ghost is not None
    assert lease.match.ghost.depth == 6, "a ghost of the fork, where no state ever stood"
    parted.finish(lease, 16.0)
    assert fresh._traits[state(parted, "aaaabbee").serial].turn == 1, "it went on from 'aaaa'"


class Ends:
    """The end only."""

    plans_ahead = False
    grid_tokens = 1

    def depths(self, new: Request, match: Match) -> Sequence[int]:
        return (new.num_known_tokens - 1,)


@pytest.mark.parametrize(("whole_fit_lives", "num_later"), [(MAX_LIVES, 0), (0, 3)])
def test_rates_are_fitted_early_and_then_now_and_then_and_change_once_a_fit_is_done(
    whole_fit_lives: int, num_later: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("marconi.policy.forecast.forecast.WHOLE_FIT_LIVES", whole_fit_lives)
    held, forecast = cache()
    fitted = []
    before = forecast.index
    for number in range(1, 5 * ARRIVALS_A_FIT):
        held.serve(request(f"{number:04d}_", float(number)))
        if forecast.index is not before:
            fitted.append(number)
            before = forecast.index
    due = FIRST_FITS | {number * ARRIVALS_A_FIT for number in range(1, 6)}
    assert fitted == [number + num_later for number in sorted(due - {5 * ARRIVALS_A_FIT})]


# Where paths are left.


class Recording(DivergenceWindow):
    """Records each call; chooses nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[int, int]] = []

    def observe(self, distance_tokens: int, lost_tokens: int) -> None:
        self.told.append((distance_tokens, lost_tokens))


def recorded(guard_tokens: int, *requests: Request) -> tuple[list[tuple[int, int]], list[int]]:
    """What the window receives of each request, and the hits, with guards at a fixed distance or none."""
    held, forecast = cache()
    window = forecast.divergence = Recording()
    window.distance_tokens, window.gain_tokens = guard_tokens, 1e9
    held.admission = Guarded(Judicious(least_tokens=1), window, COSTS)
    hits = [held.serve(new) for new in requests]
    return window.told, hits


def test_a_prompt_that_leaves_a_path_within_a_span_lost_what_it_shared_beyond_its_hit() -> None:
    told, hits = recorded(0, request("aaaaaaaabb_"), request("aaaaaaaacc_"), request("aaaaaaaadd_"))
    assert hits == [0, 0, 8]
    assert told[:2] == [(0, 0), (2, 8)]


def test_a_prompt_that_goes_on_from_the_end_or_shares_nothing_lost_nothing() -> None:
    told, _ = recorded(0, request("aaaa_"), request("aaaabb_"), request("qqqq_"))
    assert [told[index][0] for index in range(3)] == [0, 0, 0]


def test_a_loss_is_the_same_whether_a_guard_saved_it_or_not() -> None:
    texts = ("aaaaaaaabb_", "aaaaaaaacc_")
    without, hits = recorded(0, *map(request, texts))
    assert hits == [0, 0]
    exact, hits = recorded(2, *map(request, texts))
    assert (exact, hits) == (without, [0, 8])
    early, hits = recorded(4, *map(request, texts))
    assert (early, hits) == (without, [0, 6]), "the guard stands further up, and saved less"


def test_a_branch_point_that_saved_a_prompt_is_no_reason_for_a_guard() -> None:
    told, hits = recorded(0, request("aaaaaaaabb_"), request("aaaaaaaacccc_"), request("aaaaaaaadd_"))
    assert hits == [0, 0, 8]
    assert told == [(0, 0), (2, 8), (0, 0)], "the second found no state where it left the path, the third did"


def test_a_prompt_known_as_a_whole_needs_its_state_a_token_before_its_end() -> None:
    first, again = request("aaaabbbb", num_output=4), request("aaaacccc", num_output=4)
    told, _ = recorded(0, first, again)
    # The state stands at 7, the prompt has 4 tokens, of which 3 can be reused: 4 before the state.
    assert told[1] == (4, 3)


# Memory.


def nodes_alive(tree: RadixTree) -> tuple[int, int]:
    """Nodes in memory that hang on the rule or the tree, and nodes in the tree."""
    gc.collect()
    in_tree = {id(node) for root in tree.roots.values() for node in root.walk()}
    alive = {id(thing) for thing in gc.get_objects() if isinstance(thing, Node)}
    return len(alive - in_tree), len(in_tree)


@pytest.mark.slow
def test_what_is_kept_of_states_is_bounded_and_keeps_no_node_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forecast_module, "MAX_LIVES", 64)
    monkeypatch.setattr(forecast_module, "MAX_TRAITS", 32)
    costs, budget, _, needs = WORLDS["hybrid-split"]
    gc.collect()
    before = {id(thing): thing for thing in gc.get_objects() if isinstance(thing, Node)}
    held = cache_of(costs, budget, needs, max_ghosts=10, watched=False)
    rule = held.eviction
    assert isinstance(rule, BestEviction)
    forecast = rule.forecast
    most_left = 0
    for number, new in enumerate(random_requests(11, 2000)):
        held.serve(new)
        states = {node.serial for node in held.tree.nodes() if node.has_state}
        assert set(forecast._waypoints) <= states
        assert len(forecast._traits) <= 32
        assert len(forecast._lives.going_on) <= 64
        if number % 500 == 499:
            num_left, _ = nodes_alive(held.tree)
            most_left = max(most_left, num_left - len(before))
    assert next(held.tree._serials) > 2500
    assert most_left < 100, "nodes that are gone are in memory for a while at most: heaps forget lazily"


def test_the_traits_of_a_state_in_use_outlast_those_of_states_that_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forecast_module, "MAX_TRAITS", 8)
    held, forecast = cache()
    held.serve(request("system!_"))
    held.serve(request("system!a_", 1.0))
    root = state(held, "system!").serial
    for number in range(40):
        held.serve(request(f"system!{chr(1000 + number)}_", 2.0 + number))
        assert root in forecast._traits
    assert len(forecast._traits) == 8
