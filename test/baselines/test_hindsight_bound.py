"""The bound of hindsight: never below the optimum of a search through all that could be held, nor below any rule."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marconi.model import load
from marconi.model.device import device
from marconi.policy.catalog import PolicySpec, parse_list
from marconi.policy.request import Request, Trace, pack
from marconi.replay.bound import bounded, limits_of
from marconi.replay.grid import execute
from marconi.replay.most_hit import Limit, most_hit_tokens
from marconi.replay.reuse import Reuse
from marconi.replay.task import Mode, ReplayInputs, Task, unbounded_bytes
from policy.random_runs import random_requests
from replay.worlds import SecondAToken

Item = tuple[bool, str]
"""The KV of the last token of a prefix, or the state at its end (True)."""


def trace_of(*texts: str) -> Trace:
    """Prompts of letters, each answered by the letters after a space."""
    split = [(*text.split(), "")[:2] for text in texts]
    return Trace(
        "letters",
        1,
        tuple(
            Request(pack(map(ord, prompt + answer)), len(prompt), len(answer), len(prompt + answer), float(now))
            for now, (prompt, answer) in enumerate(split)
        ),
    )


def optimum(trace: Trace, limits: Sequence[Limit]) -> int:
    """The most tokens that can be hit, over all sets that could be held after each request."""
    texts = ["".join(map(chr, memoryview(request.path).cast("I"))) for request in trace.requests]
    hits: dict[frozenset[Item], int] = {frozenset(): 0}
    for now, (request, text) in enumerate(zip(trace.requests, texts, strict=True)):
        after: dict[frozenset[Item], int] = {}
        processed = text[: request.last_known_depth(1)]
        for held, num_hit in hits.items():
            for depth in usable(held, text[: request.num_prompt_tokens - 1]):
                prefixes = [processed[:end] for end in range(1, len(processed) + 1)]
                left = {(False, each) for each in prefixes} | {(True, each) for each in prefixes if len(each) > depth}
                wanted = {item for item in held | left if any(later.startswith(item[1]) for later in texts[now + 1 :])}
                for kept in fitting(wanted, limits):
                    after[kept] = max(after.get(kept, 0), num_hit + depth)
        hits = after
    return max(hits.values())


def usable(held: frozenset[Item], prompt: str) -> Iterator[int]:
    """Depths that a prompt can start from: at a state whose KV is held, or at none."""
    yield 0
    for depth in range(1, len(prompt) + 1):
        if (False, prompt[:depth]) not in held:
            return
        if (True, prompt[:depth]) in held:
            yield depth


def fitting(items: set[Item], limits: Sequence[Limit]) -> Iterator[frozenset[Item]]:
    """Sets of `items` within `limits`, each with the KV of every prefix of what it holds."""
    for size in range(len(items) + 1):
        of_size = [kept for kept in map(frozenset, combinations(sorted(items), size)) if fits(kept, limits)]
        if not of_size:
            return
        yield from (kept for kept in of_size if all(not text or (False, text) in kept for text in needed_by(kept)))


def fits(kept: frozenset[Item], limits: Sequence[Limit]) -> bool:
    num_states = sum(is_state for is_state, _ in kept)
    num_tokens = len(kept) - num_states
    return all(limit.per_token * num_tokens + limit.per_state * num_states <= limit.size for limit in limits)


def needed_by(kept: frozenset[Item]) -> list[str]:
    """Prefixes whose KV they need, "" for none."""
    return [text if is_state else text[:-1] for is_state, text in kept]


short_texts = st.lists(
    st.tuples(st.text("ab", min_size=1, max_size=4), st.text("ab", max_size=1)).map(" ".join), min_size=2, max_size=5
)
memories = st.one_of(
    st.integers(1, 6).map(lambda size: [Limit(size, 1, 2)]),
    st.tuples(st.integers(1, 4), st.integers(1, 2)).map(lambda two: [Limit(two[0], 1, 0), Limit(two[1], 0, 1)]),
)


@given(short_texts, memories)
def test_no_choice_of_what_to_hold_exceeds_the_bound(texts: list[str], limits: list[Limit]) -> None:
    trace = trace_of(*texts)
    assert optimum(trace, limits) <= most_hit_tokens(Reuse.of(trace), limits)


def test_a_use_that_pays_for_more_time_than_it_takes_gives_a_bound_that_is_exceeded() -> None:
    """The control: memory counted since the first request that computed a stretch, not the last."""
    trace, limits = trace_of("aab", "aab", "aab", "aab"), [Limit(4, 1, 2)]
    reuse = Reuse.of(trace)
    assert most_hit_tokens(reuse, limits) == optimum(trace, limits) == 6
    assert most_hit_tokens(replace(reuse, since=reuse.since * 0), limits) < 6


def test_the_bound_is_the_optimum_where_memory_pays_for_one_of_two() -> None:
    """Aaaa and bbbb take 3 tokens and a state of 2 until they return: with 5 only one can stay, with 10 both."""
    trace = trace_of("aaaa", "bbbb", "aaaa", "bbbb")
    reuse = Reuse.of(trace)
    assert reuse.num_shared_tokens == 6
    found = {size: most_hit_tokens(reuse, [Limit(size, 1, 2)]) for size in (0, 10)}
    assert found == {0: 0, 10: 6}
    assert optimum(trace, [Limit(5, 1, 2)]) == 3 <= most_hit_tokens(reuse, [Limit(5, 1, 2)]) < 6


@given(st.lists(st.text("abc", min_size=1, max_size=9), min_size=1, max_size=12))
def test_a_stretch_is_what_was_computed_before_and_dates_from_the_last_time(prompts: list[str]) -> None:
    reuse = Reuse.of(trace_of(*prompts))
    found = [[] for _ in prompts]  # type: list[list[int]]
    for request, num_tokens, since in zip(reuse.request, reuse.num_tokens, reuse.since, strict=True):
        found[request] += [int(since)] * int(num_tokens)
    for index, prompt in enumerate(prompts):
        depths = range(1, len(prompt))
        since = [[j for j in range(index) if prompts[j].startswith(prompt[:depth])] for depth in depths]
        assert found[index] == [max(those) for those in since if those]


POLICIES = parse_list("lru,lru-joint,marconi,best,belady,coverage,seglen,tail,lru@no-buffer")


def random_inputs(seed: int) -> ReplayInputs:
    """Conversations, forks and answers that return."""
    model = load("nemotron-h-8b")
    trace = Trace("random", 64, tuple(random_requests(seed, 150)))
    trace = replace(
        trace,
        requests=tuple(
            replace(
                each,
                num_prompt_tokens=each.num_prompt_tokens * 64,
                num_output_tokens=each.num_output_tokens * 64,
                num_known_tokens=each.num_known_tokens * 64,
            )
            for each in trace.requests
        ),
    )
    return ReplayInputs(trace, model, device("h100"), SecondAToken())


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_no_rule_exceeds_the_bound_of_its_memory(seed: int) -> None:
    inputs = random_inputs(seed)
    whole = unbounded_bytes(inputs)
    tasks = [
        Task(policy, int(share * whole), ratio)
        for share in (0.05, 0.15, 0.4)
        for policy in POLICIES
        for ratio in (None, 0.5)
    ]
    runs = bounded(inputs, [execute(inputs, task) for task in tasks], 1)
    rates = [(run.token_hit_rate, run.bound_token_hit_rate) for run in runs]
    assert all(bound is not None and rate <= bound for rate, bound in rates)
    assert max(rate / bound for rate, bound in rates if bound) > 0.8, "the bound says something"
    assert all(run.amplification >= 1 for run in runs)


def test_more_memory_or_a_host_tier_never_lowers_the_bound() -> None:
    inputs = random_inputs(0)
    whole = unbounded_bytes(inputs)
    task, reuse = Task(PolicySpec("best"), whole // 10), Reuse.of(inputs.trace)
    tasks = [task, replace(task, mamba_ratio=0.3), replace(task, host_bytes=whole // 5)]
    one, two, host = (most_hit_tokens(reuse, limits_of(inputs, each)) for each in tasks)
    assert two <= one <= host <= reuse.num_shared_tokens


def test_requests_beside_each_other_have_no_bound_but_an_amplification() -> None:
    inputs = random_inputs(0)
    run = execute(inputs, Task(PolicySpec("lru"), unbounded_bytes(inputs)))
    (beside,) = bounded(replace(inputs, mode=Mode.QUEUEING), [run], 1)
    (alone,) = bounded(inputs, [run], 1)
    assert beside.bound_token_hit_rate is None
    assert beside.amplification == alone.amplification > 1
