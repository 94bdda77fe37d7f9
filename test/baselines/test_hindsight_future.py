"""The future of a trace against a look at every request of it."""

import random

import pytest

from marconi.policy.request import Request, Trace, pack, unpack
from marconi_lab.hindsight.future import Future


def random_trace(seed: int, unit_tokens: int, num_requests: int = 60) -> Trace:
    """Paths over two letters that share a lot, in two namespaces; some end inside a unit, some are their prompt."""
    rng = random.Random(seed)  # noqa: S311 - test data
    requests = []
    for index in range(num_requests):
        ids = [rng.randrange(2) for _ in range(rng.randrange(1, 10))]
        num_tokens = len(ids) * unit_tokens - rng.randrange(unit_tokens)
        num_prompt = rng.randint(1, num_tokens)
        known = num_tokens // unit_tokens * unit_tokens
        namespace = rng.randrange(2)
        requests.append(
            Request(pack(ids), num_prompt, num_tokens - num_prompt, known, float(index), namespace=namespace)
        )
    return Trace("random", unit_tokens, tuple(requests))


def users(trace: Trace, ids: list[int], namespace: int) -> list[int]:
    """Requests that could start from a state after `ids`: all of them known, and a prompt token left to compute."""
    return [
        index
        for index, request in enumerate(trace.requests)
        if request.namespace == namespace
        and unpack(request.path)[: len(ids)] == ids
        and len(ids) * trace.unit_tokens <= min(request.num_known_tokens, request.num_prompt_tokens - 1)
    ]


@pytest.mark.parametrize("unit_tokens", [1, 3])
@pytest.mark.parametrize("seed", range(6))
def test_who_reaches_a_prefix_is_who_is_found_by_looking_at_every_request(seed: int, unit_tokens: int) -> None:
    trace = random_trace(seed, unit_tokens)
    future = Future(trace)
    num_found = num_inside = 0
    for request in trace.requests:
        ids = unpack(request.path)
        for length in range(1, request.num_known_tokens // unit_tokens + 1):
            expected = users(trace, ids[:length], request.namespace)
            prefix = future.prefix(request.path, length * unit_tokens, request.namespace)
            assert (prefix.uses if prefix else []) == expected
            num_found += prefix is not None
            further = future.prefix(request.path, (length + 1) * unit_tokens, request.namespace)
            num_inside += prefix is not None and prefix is further
            for index in range(0, len(trace.requests), 7):
                if prefix is not None:
                    assert prefix.is_used_by(index) == (index in expected)
                    assert prefix.next_use(index) == next((user for user in expected if user > index), None)
    assert num_found > 30
    assert num_inside > 0, "no prefix ended within a span"


@pytest.mark.parametrize("seed", range(6))
def test_the_next_use_but_for_those_who_get_further(seed: int) -> None:
    trace = random_trace(seed, 1)
    future = Future(trace)
    rng = random.Random(seed)  # noqa: S311 - test data
    num_shifted = 0
    for _ in range(300):
        request = rng.choice(trace.requests)
        ids, namespace = unpack(request.path), request.namespace
        depth, now = rng.randint(1, len(ids)), rng.randrange(len(trace.requests))
        below = [[*ids[:depth], letter] for letter in range(2) if rng.random() < 0.7]
        prefix = future.prefix(request.path, depth, namespace)
        spans = [future.prefix(pack(longer), depth + 1, namespace) for longer in below]
        others = {index for longer in below for index in users(trace, longer, namespace)}
        left = [index for index in users(trace, ids[:depth], namespace) if index > now]
        expected = next((index for index in left if index not in others), None)
        if prefix is None:
            assert expected is None
        else:
            assert prefix.next_use(now, [span for span in spans if span is not None]) == expected
            num_shifted += expected != prefix.next_use(now)
    assert num_shifted > 5


def test_the_last_prompt_token_is_computed_by_every_request() -> None:
    trace = Trace("two", 1, (Request(pack([1, 2, 3]), 3, 0, 3, 0.0), Request(pack([1, 2, 3, 4]), 4, 0, 4, 1.0)))
    future = Future(trace)
    at_two, at_three = future.prefix(trace.requests[0].path, 2), future.prefix(trace.requests[0].path, 3)
    assert at_two is not None
    assert at_three is not None
    assert (at_two.uses, at_three.uses) == ([0, 1], [1])
    assert future.prefix(trace.requests[1].path, 4) is None


def test_a_prefix_is_known_in_its_namespace_only() -> None:
    trace = Trace("one", 1, (Request(pack([1, 2]), 2, 0, 2, 0.0, namespace=5),))
    future = Future(trace)
    assert future.prefix(pack([1]), 1, namespace=5) is not None
    assert future.prefix(pack([1]), 1, namespace=0) is None
