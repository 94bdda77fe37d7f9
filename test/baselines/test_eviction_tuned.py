"""Marconi's own tuning: alpha 0 until the bootstrap window is full, then the best of a search from copies of a tree."""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from itertools import islice

import pytest

from marconi.model import DEVICES, PrefillLatency, load
from marconi.policy.base import Costs
from marconi.policy.catalog import PolicySpec
from marconi.policy.eviction.utility import UtilityEviction
from marconi.policy.request import Request
from marconi.replay.catalog import build
from marconi.replay.grid import execute
from marconi.replay.server import ServerReplay
from marconi.replay.target import CacheConfig
from marconi.replay.task import ReplayInputs, Task
from marconi.replay.trace import Demand, generate, preset
from marconi.tree import RadixTree
from marconi.tree.node import NONE_BELOW
from marconi_lab.catalog import ALPHAS
from marconi_lab.eviction.tuned import TunedUtilityEviction
from marconi_lab.tuned import TunedServer

MODEL = load("marconi-7b")
TRACE = generate(preset("chat-short"), Demand(25, 1.0, seed=0))
INPUTS = ReplayInputs(TRACE, MODEL, DEVICES["h100"], PrefillLatency(MODEL, DEVICES["h100"]))
MEMORY_BYTES = 5 * 10**8


def server_of(text: str) -> ServerReplay:
    config = CacheConfig(TRACE, INPUTS.costs, INPUTS.latency, MEMORY_BYTES)
    cache = build(PolicySpec.parse(text), config)
    assert isinstance(cache, ServerReplay)
    return cache


def hits(server: ServerReplay, requests: Sequence[Request], alpha: float) -> list[int]:
    rule = server.hybrid.order.rule
    assert isinstance(rule, UtilityEviction)
    rule.weight = alpha
    return [server.serve(request) for request in requests]


def num_until_eviction(server: ServerReplay) -> int:
    """Serve the trace until something is evicted; how many requests that took."""
    for number, request in enumerate(TRACE.requests, start=1):
        server.serve(request)
        if sum(server.counters.num_evictions.values()):
            return number
    raise AssertionError("nothing was evicted: the test would show nothing")


@pytest.mark.parametrize("multiple", [5, 8])
def test_alpha_is_0_through_the_window_and_then_the_best_of_a_search_from_copies_of_the_tree(multiple: int) -> None:
    fixed = server_of("marconi-static:0")
    before = num_until_eviction(fixed)
    end = before * (1 + multiple)
    window, later = TRACE.requests[before:end], TRACE.requests[end:]
    found = {alpha: sum(hits(deepcopy(fixed, {id(NONE_BELOW): NONE_BELOW}), window, alpha)) for alpha in ALPHAS}
    best = max(found, key=lambda alpha: (found[alpha], -alpha))
    assert len(set(found.values())) > 1
    assert best > 0

    tuned = server_of(f"marconi-tuned:{multiple}")
    assert isinstance(tuned, TunedServer)
    seen = [(tuned.serve(request), tuned.rule.weight, tuned.rule.num_before) for request in TRACE.requests]
    assert {alpha for _, alpha, _ in seen[:end]} == {0.0}
    assert [number for *_, number in seen[: before + 1]] == [*[None] * (before - 1), before, before]
    assert {alpha for _, alpha, _ in seen[end:]} == {best}
    assert [hit for hit, *_ in seen[before:]] == hits(fixed, window, 0.0) + hits(fixed, later, best)


def test_a_search_sees_the_requests_until_the_first_eviction_and_five_times_as_many_once() -> None:
    asked: list[tuple[int, int, float]] = []

    def hit_tokens(first: Sequence[Request], window: Sequence[Request], alpha: float) -> int:
        asked.append((len(first), len(window), alpha))
        return 7 if alpha else 3  # the two others are equal: the lower one is adopted

    rule = TunedUtilityEviction(Costs(1, 1, float), (0.0, 0.5, 1.0))
    for request in islice(TRACE.requests, 3):
        rule.coming(request, hit_tokens)
    for _ in range(2):
        rule.evicting(RadixTree().root(0), 0.0)
    for request in islice(TRACE.requests, 3, 3 + 15):
        rule.coming(request, hit_tokens)
        rule.evicting(RadixTree().root(0), 0.0)
    assert (asked, rule.weight, rule.is_tuned) == ([], 0.0, False)
    for request in islice(TRACE.requests, 18, 60):
        rule.coming(request, hit_tokens)
    assert asked == [(3, 15, 0.0), (3, 15, 0.5), (3, 15, 1.0)]
    assert (rule.weight, rule.is_tuned) == (0.5, True)


def test_without_an_eviction_alpha_stays_0() -> None:
    result = execute(INPUTS, Task(PolicySpec("marconi-tuned"), 10**12))
    fixed = execute(INPUTS, Task(PolicySpec("marconi-static", "0"), 10**12))
    assert replace(result, task=fixed.task, requests_per_s=fixed.requests_per_s) == fixed


def test_a_result_says_which_alpha_was_adopted() -> None:
    tuned = server_of("marconi-tuned")
    assert isinstance(tuned, TunedServer)
    for request in TRACE.requests:
        tuned.serve(request)
    assert execute(INPUTS, Task(PolicySpec("marconi-tuned"), MEMORY_BYTES)).chosen == f"alpha {tuned.rule.weight:g}"


@pytest.mark.parametrize("multiple", [0, 4, 16])
def test_a_window_that_is_not_the_papers_is_refused(multiple: int) -> None:
    with pytest.raises(ValueError, match=rf"'marconi-tuned:{multiple}': MULTIPLE must be 5 to 15, got {multiple}"):
        server_of(f"marconi-tuned:{multiple}")
