"""Serial replay: hits and times of a trace worked by hand."""

from marconi.replay import serial

from . import worlds
from .worlds import SecondAToken, request, trace

WORKED = trace(
    request("abcd", "efg", 0.0),  # nothing known; leaves a state after "abcdef", the last token being unprocessed
    request("abcdefgh!", "", 1.0),  # starts from there
    request("abxyz", "", 2.0),  # no state at "ab", but it branches there: leaves one
    request("abq", "", 3.0),  # starts from it
)


def test_a_trace_worked_by_hand_hits_what_it_should() -> None:
    outcome = serial.replay(WORKED, worlds.server(), SecondAToken())
    assert outcome.hit_tokens == [0, 6, 0, 2]
    assert outcome.ttft_s == [4.0, 3.0, 5.0, 1.0]


def test_the_last_prompt_token_is_always_computed() -> None:
    # The state before the prompt's last token is there on the chance that the prompt comes again.
    same = trace(request("abcd", "ef", 0.0), request("abcd", "gh", 1.0), request("abcd", "ij", 2.0))
    assert serial.replay(same, worlds.server(), SecondAToken()).hit_tokens == [0, 3, 3]


def test_a_request_larger_than_the_memory_is_served_counted_and_not_inserted() -> None:
    cache = worlds.server(25)
    outcome = serial.replay(trace(request("abcdefgh", "", 0.0), request("xy", "", 1.0)), cache, SecondAToken())
    assert outcome.ttft_s == [8.0, 2.0]
    assert cache.counters.num_too_large == 1
    assert cache.held == (2, 2)


def test_progress_counts_every_request() -> None:
    steps: list[int] = []
    many = worlds.conversations(num_sessions=100, num_turns=7)
    serial.replay(many, worlds.server(), SecondAToken(), steps.append)
    assert len(steps) > 1
    assert sum(steps) == len(many.requests)
