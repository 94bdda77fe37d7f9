"""Generated workloads: sessions grow as they should, and the presets have the statistics they name."""

import dataclasses
import itertools

import numpy as np
import pytest

from marconi.policy.request import Request, Trace, unpack
from marconi.replay.trace import PRESETS, Demand, generate, in_blocks, preset
from marconi.replay.trace.arrivals import Pace
from marconi.replay.trace.workload import Skewed, SystemPrompts, Workload

FEW = Demand(num_sessions=20, session_rate=1.0, seed=2)


def sessions(trace: Trace) -> list[list[Request]]:
    found: dict[int, list[Request]] = {}
    for request in trace.requests:
        found.setdefault(request.session, []).append(request)
    return [found[number] for number in sorted(found)]


@pytest.mark.parametrize("name", PRESETS)
def test_the_same_seed_gives_the_same_trace_in_order_of_arrival(name: str) -> None:
    trace = generate(preset(name), FEW)
    assert trace == generate(preset(name), FEW)
    assert trace != generate(preset(name), dataclasses.replace(FEW, seed=3))
    times = [request.arrival_s for request in trace.requests]
    assert times == sorted(times)
    assert len(sessions(trace)) == 20
    for request in trace.requests:
        assert len(request.path) == 4 * request.num_known_tokens
        assert request.num_known_tokens == request.num_prompt_tokens + request.num_output_tokens
        assert request.num_known_tokens <= preset(name).max_context_tokens


@pytest.mark.parametrize("name", ["chat-short", "chat-long", "agent-append", "wildchat"])
def test_an_append_only_prompt_goes_on_from_the_last_output(name: str) -> None:
    for requests in sessions(generate(preset(name), FEW)):
        assert [request.turn for request in requests] == list(range(len(requests)))
        for before, after in itertools.pairwise(requests):
            assert after.path[: 4 * after.num_prompt_tokens].startswith(before.path)
            assert after.num_prompt_tokens > before.num_known_tokens
            decoded_s = before.num_output_tokens / preset(name).pace.answer_tokens_per_s
            assert after.arrival_s >= before.arrival_s + decoded_s


def test_a_dropped_observation_makes_the_prompt_branch_off_where_it_stood() -> None:
    fixed = Workload(
        "w",
        turns=Skewed(5, 0, 5, 5),
        first_prompt=Skewed(10, 0, 10, 10),
        next_prompt=Skewed(100, 0, 100, 100),
        output=Skewed(7, 0, 7, 7),
        pace=Pace(1.0),
        system_prompts=SystemPrompts(1, 50),
        keep_observations=2,
        note_tokens=3,
    )
    (requests,) = sessions(generate(fixed, Demand(1, 1.0)))
    lengths = [request.num_prompt_tokens for request in requests]
    assert lengths == [60, 167, 274, 60 + 7 + 3 + 7 + 100 + 7 + 100, 60 + 7 + 3 + 7 + 3 + 7 + 100 + 7 + 100]
    shared = [
        next(i for i, (a, b) in enumerate(zip(unpack(x.path), unpack(y.path), strict=False)) if a != b)
        for x, y in itertools.pairwise(requests[2:])
    ]
    # The first observation stood behind 67 tokens, the second behind that one's note and an output.
    assert shared == [67, 77]
    assert requests[1].path.startswith(requests[0].path)


def test_sessions_share_their_system_prompt_and_nothing_else() -> None:
    workload = dataclasses.replace(preset("chat-short"), system_prompts=SystemPrompts(3, 40))
    firsts = [unpack(requests[0].path) for requests in sessions(generate(workload, FEW))]
    heads = {tuple(tokens[:40]) for tokens in firsts}
    assert len(heads) == 3
    rests = [token for tokens in firsts for token in tokens[40:]]
    assert len(rests) == len(set(rests))


def test_the_rate_moves_sessions_but_does_not_change_them() -> None:
    slow, fast = (generate(preset("chat-short"), Demand(200, rate, seed=1)) for rate in (0.5, 2.0))
    starts = [np.array([requests[0].arrival_s for requests in sessions(trace)]) for trace in (slow, fast)]
    assert starts[0] == pytest.approx(4 * starts[1])
    assert np.diff(starts[1]).mean() == pytest.approx(0.5, rel=0.2)
    assert [r.path for s in sessions(slow) for r in s] == [r.path for s in sessions(fast) for r in s]


# Mean turns, prompt tokens a later turn adds, output tokens; from the preset's docstring.
@pytest.mark.parametrize(
    ("name", "num_sessions", "turns", "prompt", "output"),
    [
        ("chat-short", 1500, 14, 70, 215),
        ("chat-long", 1500, 12, 94, 348),
        ("agent-append", 150, 12, 4000, 120),
        ("wildchat", 1500, 2.5, 296, 441),
    ],
)
def test_a_preset_has_the_means_it_names(
    name: str, num_sessions: int, turns: float, prompt: float, output: float
) -> None:
    unlimited = dataclasses.replace(preset(name), max_context_tokens=10**6)
    drawn = sessions(generate(unlimited, Demand(num_sessions, 1.0)))
    added = [
        after.num_prompt_tokens - before.num_known_tokens
        for requests in drawn
        for before, after in itertools.pairwise(requests)
    ]
    assert np.mean([len(requests) for requests in drawn]) == pytest.approx(turns, rel=0.12)
    assert np.mean(added) == pytest.approx(prompt, rel=0.12)
    assert np.mean([r.num_output_tokens for requests in drawn for r in requests]) == pytest.approx(output, rel=0.12)


@pytest.mark.parametrize("evenness", [1.0, 4.0])
def test_pauses_have_the_mean_and_the_spread_that_a_pace_names(evenness: float) -> None:
    rng = np.random.default_rng(0)
    pauses = np.array([Pace(5.0, evenness=evenness).gap_s(0, rng) for _ in range(4000)])
    assert pauses.mean() == pytest.approx(5.0, rel=0.05)
    assert pauses.std() == pytest.approx(5.0 / evenness**0.5, rel=0.05)


def test_wildchat_has_a_tail_of_long_conversations() -> None:
    turns = np.array([len(requests) for requests in sessions(generate(preset("wildchat"), Demand(3000, 1.0)))])
    assert 0.02 < (turns > 10).mean() < 0.04
    assert 0.4 < (turns == 1).mean() < 0.75


def test_blocks_are_those_of_the_token_trace() -> None:
    assert generate(preset("agent-drop"), FEW, unit_tokens=64) == in_blocks(generate(preset("agent-drop"), FEW), 64)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: preset("vhs"), "a workload must be one of chat-short.*, got 'vhs'"),
        (lambda: Demand(0, 1.0), "^num_sessions must be at least 1, got 0$"),
        (lambda: Demand(1, 0.0), "^session_rate must be a number of .*, got 0.0$"),
        (lambda: Demand(1, 1.0, -1), "^seed must be 0 or more, got -1$"),
        (lambda: Pace(-1.0), "^think_time_s must be 0 or more seconds, got -1.0$"),
        (lambda: Pace(1.0, evenness=0.0), "^evenness must be a positive number, got 0.0$"),
        (lambda: Skewed(1.0, 1.0, 5, 9), "must have 0 <= minimum <= mean <= maximum"),
        (
            lambda: dataclasses.replace(preset("agent-drop"), keep_observations=0),
            "^keep_observations must be at least 1, got 0$",
        ),
        (
            lambda: generate(preset("wildchat"), Demand(1, 1.0), unit_tokens=0),
            "^block_tokens must be at least 1, got 0$",
        ),
    ],
)
def test_a_demand_that_makes_no_sense_is_one_line(make: object, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make()  # type: ignore[operator]
