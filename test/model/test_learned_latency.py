"""Prefill times that are learned: right where prefills follow the formula, unmoved by a few that waited."""

import random

import pytest

from marconi.model.latency import LatencyModel
from marconi.model.learned_latency import MIN_OBSERVED, LearnedLatency


def flops(num_tokens: int) -> float:
    return 1e9 * num_tokens + 1e4 * num_tokens**2


def learned(overhead_s: float, s_per_flop: float, num_late: int = 0) -> LearnedLatency:
    rng = random.Random(1)  # noqa: S311 - a workload, not a secret
    model = LearnedLatency(flops)
    for index in range(160):
        cached, new = rng.randrange(0, 20_000), rng.randrange(1, 20_000)
        seconds = overhead_s + s_per_flop * (flops(cached + new) - flops(cached))
        model.observe(cached, cached + new, seconds + (30.0 if index % 160 < num_late else 0.0))
    return model


def test_what_follows_the_formula_is_learned() -> None:
    model = learned(0.02, 1e-14)
    assert model.overhead_s == pytest.approx(0.02)
    assert model.s_per_flop == pytest.approx(1e-14)
    assert model.seconds(1000, 5000) == pytest.approx(0.02 + 1e-14 * (flops(5000) - flops(1000)))


def test_a_few_that_waited_for_others_do_not_move_it() -> None:
    rng = random.Random(2)  # noqa: S311 - a workload, not a secret
    model = LearnedLatency(flops)
    for _ in range(160):
        num = rng.randrange(1000, 20_000)
        model.observe(0, num, 0.02 + 1e-14 * flops(num) + (30.0 if rng.random() < 0.1 else 0.0))
    assert model.s_per_flop == pytest.approx(1e-14, rel=0.05)
    assert model.overhead_s == pytest.approx(0.02, rel=0.2)


def test_nothing_is_claimed_before_enough_was_observed() -> None:
    model = LearnedLatency(flops)
    for _ in range(MIN_OBSERVED - 1):
        model.observe(0, 1000, 1.0)
    assert not model.is_known
    assert model.smallest_cached_tokens(1000, 0.5) is None
    model.observe(0, 1000, 1.0)
    assert model.is_known


def test_prefills_of_one_size_still_tell_what_a_flop_takes() -> None:
    model = LearnedLatency(flops)
    for _ in range(20):
        model.observe(0, 1000, 2.0)
    assert model.seconds(0, 1000) == pytest.approx(2.0)


def test_the_least_prefix_that_meets_a_budget_is_the_inverse_of_the_seconds() -> None:
    model = learned(0.02, 1e-14)
    for prompt in (100, 5000, 20_000):
        for budget_s in (0.03, 0.1, 0.5):
            least = model.smallest_cached_tokens(prompt, budget_s)
            assert least is not None
            assert model.seconds(least, prompt) <= budget_s
            assert not least or model.seconds(least - 1, prompt) > budget_s
    assert model.smallest_cached_tokens(100, 0.01) is None


def test_a_device_that_got_slower_is_followed() -> None:
    model = learned(0.02, 1e-14)
    rng = random.Random(3)  # noqa: S311 - a workload, not a secret
    for _ in range(200):
        num = rng.randrange(1000, 20_000)
        model.observe(0, num, 0.02 + 3e-14 * flops(num))
    assert model.s_per_flop == pytest.approx(3e-14, rel=0.01)


class Fast(LatencyModel):
    """A data sheet's."""

    def seconds(self, num_cached_tokens: int, num_prompt_tokens: int) -> float:
        return 1e-6

    def smallest_cached_tokens(self, num_prompt_tokens: int, budget_s: float) -> int | None:
        return None


@pytest.mark.parametrize("answer", ["of one length", "of any length"])
def test_whole_answers_tell_what_prefills_take_where_prompts_differ(answer: str) -> None:
    rng = random.Random(4)  # noqa: S311 - a workload, not a secret
    model = LearnedLatency(flops, Fast())
    for _ in range(120):
        num = rng.randrange(100, 20_000)
        passes = 64 if answer == "of one length" else rng.randrange(1, 200)
        model.observe_whole(0, num, passes, 0.01 + 0.02 * (passes - 1) + 1e-13 * flops(num))
    for num in (1000, 20_000):
        assert 0.5 < model.seconds(0, num) / (0.01 + 1e-13 * flops(num)) < 2


def test_whole_answers_to_prompts_of_one_length_tell_no_more_than_a_pass() -> None:
    model = LearnedLatency(flops, Fast())
    for _ in range(40):
        model.observe_whole(0, 1000, 100, 5.0)
    assert model.seconds(0, 1000) == pytest.approx(0.05), "more would count the decoding of an answer as a prefill"


def test_whole_answers_count_only_until_prefills_were_timed() -> None:
    model = LearnedLatency(flops, Fast())
    for _ in range(MIN_OBSERVED):
        model.observe_whole(0, 1000, 1, 5.0)
    assert (model.is_known, model.is_timed) == (True, False)
    assert model.seconds(0, 1000) == pytest.approx(5.0)
    for _ in range(MIN_OBSERVED):
        model.observe(0, 1000, 2.0)
    model.observe_whole(0, 1000, 1, 5.0)
    assert model.is_timed
    assert model.seconds(0, 1000) == pytest.approx(2.0)
