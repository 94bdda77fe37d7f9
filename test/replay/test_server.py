"""The replay that takes memory as a server does loses none of it, and keeps what its docstrings promise."""

import random
from collections.abc import Callable

import pytest

from marconi.policy.admission.plan import STEP_TOKENS, Judicious
from marconi.policy.base import Costs, Eviction, Need
from marconi.policy.eviction.best import BestEviction
from marconi.policy.eviction.lru import SeparateLru
from marconi.policy.eviction.order import Order
from marconi.policy.forecast.forecast import Forecast
from marconi.policy.hybrid_cache import HybridCache
from marconi.policy.request import Request, pack
from marconi.replay.pools import TwoPools
from marconi.replay.scheduling import Scheduling
from marconi.replay.server import ServerReplay
from marconi.tree import RadixTree, check_invariants

TWO_POOLS = frozenset({Need.KV, Need.STATE})
COSTS = Costs(kv_bytes_per_token=3, state_bytes=20, flops=lambda num_tokens: num_tokens * (num_tokens + 10))


def replay_of(
    rule: Eviction, pools: TwoPools, page: int = 1, scheduling: Scheduling | None = None, step_tokens: int = STEP_TOKENS
) -> ServerReplay:
    tree = RadixTree(page, max_ghosts=20, ids_per_unit=page)
    hybrid = HybridCache(tree, Judicious(page), Order(rule), step_tokens, fills_spare=True)
    return ServerReplay(hybrid, pools, scheduling or Scheduling())


def request(prompt: list[int], answer: list[int], arrival_s: float) -> Request:
    return Request(pack(prompt + answer), len(prompt), len(answer), len(prompt) + len(answer), arrival_s)


def checkpoints(replay: ServerReplay) -> list[int]:
    return sorted(node.depth for node in replay.hybrid.tree.nodes() if node.has_state)


def test_a_repeat_and_an_extension_hit_at_the_last_but_one_token() -> None:
    replay = replay_of(SeparateLru(TWO_POOLS), TwoPools(1000, 10))
    prompt = list(range(100))
    assert replay.serve(request(prompt, [], 1.0)) == 0
    assert checkpoints(replay) == [99, 100]
    assert replay.serve(request(prompt, [], 2.0)) == 99
    assert replay.serve(request([*prompt, *range(500, 520)], [], 3.0)) == 100


def test_a_branch_point_is_kept_from_the_second_occurrence_on() -> None:
    """A shared prefix of 60 tokens; the third request that has it starts from its end."""
    replay = replay_of(SeparateLru(TWO_POOLS), TwoPools(1000, 20))
    hits = [replay.serve(request([*range(60), *range(1000 * n, 1000 * n + 40)], [], n)) for n in (1, 2, 3)]
    assert hits == [0, 0, 60]


def test_a_conversation_goes_on_from_its_last_processed_token() -> None:
    replay = replay_of(SeparateLru(TWO_POOLS), TwoPools(1000, 10))
    prompt, answer = list(range(50)), list(range(500, 530))
    replay.serve(request(prompt, answer, 1.0))
    assert replay.serve(request([*prompt, *answer, 7, 8, 9], [], 2.0)) == 79


def test_pages_round_every_position_down() -> None:
    replay = replay_of(SeparateLru(TWO_POOLS), TwoPools(960, 10), page=16)
    prompt = list(range(100))
    replay.serve(request(prompt, list(range(500, 530)), 1.0))
    assert checkpoints(replay) == [96, 128]
    assert replay.serve(request(prompt, [], 2.0)) == 96


def test_where_decoding_is_tracked_the_last_state_stands_at_a_multiple_that_it_passed() -> None:
    replay = replay_of(SeparateLru(TWO_POOLS), TwoPools(960, 10), 16, Scheduling(track_tokens=64))
    replay.serve(request(list(range(100)), list(range(500, 530)), 1.0))
    assert checkpoints(replay) == [96, 128]
    replay.serve(request(list(range(1000, 1064)), list(range(1500, 1560)), 2.0))
    assert checkpoints(replay) == [48, 96, 128], "64 was passed by the prompt, 128 not reached"


def test_the_slots_that_a_request_needs_itself_go_before_its_planned_states() -> None:
    """Three slots for the request, none left for the state before its prompt's end."""
    replay = replay_of(SeparateLru(TWO_POOLS), TwoPools(1000, 4), scheduling=Scheduling(num_working_slots=3))
    replay.serve(request(list(range(40)), [1, 2, 3], 1.0))
    assert checkpoints(replay) == [39, 42]
    replay.serve(request([*range(40), 1, 2, 9, 9], [], 2.0))
    assert checkpoints(replay) == [42, 44], "that at 39 went for the request, none was free for 43"
    replay.check_invariants()


def test_a_page_beyond_what_is_taken_is_asked_for_and_evicted_for() -> None:
    """Two pages are free and the prompt takes two: SGLang asks for three, and what is held goes."""
    num_evictions = []
    for num_tokens in (64, 80):
        replay = replay_of(SeparateLru(TWO_POOLS), TwoPools(num_tokens, 10), 16)
        for first in (0, 100):
            replay.serve(request(list(range(first, first + 32)), [], float(first)))
        num_evictions.append(replay.hybrid.counters.num_evictions[Need.KV])
    assert num_evictions == [1, 0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Scheduling(chunk_tokens=0), "chunk_tokens must be 1 or more, got 0"),
        (lambda: Scheduling(track_tokens=0), "track_tokens must be 1 or more, got 0"),
        (lambda: TwoPools(-1, 5), "each pool must be 0 or more, got -1 tokens"),
    ],
)
def test_bad_settings_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_speculative_state_takes_the_slot_of_one_that_is_worth_less_alone() -> None:
    """Four slots, one to work with: by worth, what short prompts may need again leaves a long one its state."""
    long = list(range(400))
    hits = {}
    for name, rule in (("lru", SeparateLru(TWO_POOLS)), ("best", BestEviction(COSTS, Forecast(), TWO_POOLS))):
        replay = replay_of(rule, TwoPools(1000, 4))
        replay.serve(request(long, [1, 2, 3], 1.0))
        for number in range(2, 8):
            replay.serve(request(list(range(1000 * number, 1000 * number + 10)), [1, 2, 3], float(number)))
        hits[name] = replay.serve(request(long, [1, 2, 3], 9.0))
    assert hits["lru"] == 0
    assert hits["best"] >= 400 - 16


def test_with_steps_kv_that_is_short_takes_a_path_back_no_further_than_it_must() -> None:
    """Two paths of 60 in KV for 100: without steps the first one goes whole, with them what is over."""
    hits = {}
    for step_tokens in (20, 60):
        replay = replay_of(SeparateLru(TWO_POOLS), TwoPools(100, 20), step_tokens=step_tokens)
        replay.serve(request(list(range(60)), [], 1.0))
        replay.serve(request(list(range(100, 160)), [], 2.0))
        hits[step_tokens] = replay.serve(request(list(range(60)), [], 3.0))
    assert hits == {20: 39, 60: 0}


@pytest.mark.parametrize(
    ("num_slots", "kept"), [(20, [19, 29, 39, 49, 59, 60]), (6, [29, 49, 59, 60]), (5, [29, 59, 60])]
)
def test_between_steps_states_take_slots_that_are_spare_and_nothing_is_evicted_for_them(
    num_slots: int, kept: list[int]
) -> None:
    """A prompt of 60 with steps of 30, beside the two states of another one."""
    replay = replay_of(SeparateLru(TWO_POOLS), TwoPools(1000, num_slots), step_tokens=30)
    replay.serve(request(list(range(500, 510)), [1, 2], 1.0))
    replay.serve(request(list(range(60)), [], 2.0))
    depths = {node.depth for node in replay.hybrid.tree.nodes() if node.has_state}
    assert sorted(depths) == [9, 11, *kept]
    assert replay.counters.num_evictions[Need.STATE] == 0


@pytest.mark.parametrize("pools", [TwoPools(100, 3), TwoPools(200, 1), TwoPools(0, 3)])
def test_a_request_that_does_not_fit_alone_is_counted_and_leaves_nothing(pools: TwoPools) -> None:
    """101 tokens, a slot to work on and one for the state that it might start from."""
    replay = replay_of(SeparateLru(TWO_POOLS), pools)
    assert replay.serve(request(list(range(101)), [], 1.0)) == 0
    assert replay.hybrid.counters.num_too_large == 1
    assert not list(replay.hybrid.tree.nodes())


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("num_slots", "step_tokens"), [(4, STEP_TOKENS), (7, 6)])
@pytest.mark.parametrize("page", [1, 4])
def test_nothing_is_lost_under_pressure(page: int, num_slots: int, step_tokens: int) -> None:
    """Random prompts over few letters, most of them going on from an answer, in pools of a few requests."""
    rng = random.Random(page)  # noqa: S311 - a workload, not a secret
    scheduling = Scheduling(8, num_working_slots=2)
    replay = replay_of(SeparateLru(TWO_POOLS), TwoPools(64, num_slots), page, scheduling, step_tokens)
    num_hits, said = 0, list[int]()
    for step in range(3000):
        going_on = said if rng.random() < 0.8 else []
        prompt = [*going_on, *(rng.randrange(2) for _ in range(rng.randint(1, 40 - len(going_on))))]
        answer = [rng.randrange(2) for _ in range(rng.randint(1, 20))]
        hit = replay.serve(request(prompt, answer, float(step)))
        assert hit < len(prompt)
        assert hit % page == 0
        num_hits += hit > 0
        said = [*prompt, *answer][:39]
        replay.check_invariants()
        check_invariants(replay.hybrid.tree)
    counters = replay.hybrid.counters
    assert num_hits > 20
    assert counters.num_evictions[Need.KV] > 100
    assert counters.num_evictions[Need.STATE] > 100
