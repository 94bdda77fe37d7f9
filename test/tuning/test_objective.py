"""Scores by hand."""

import pytest

from marconi.replay.result import Percentiles
from marconi.tuning import Objective, Score


def prefill_s(num_cached_tokens: int, num_prompt_tokens: int) -> float:
    return 1.0 + (num_prompt_tokens - num_cached_tokens) / 100


def test_the_token_hit_rate_is_a_share_of_prompt_tokens() -> None:
    assert Score()([30, 0], [100, 50]) == pytest.approx(0.2)


def test_flops_saved_weigh_a_long_hit_more() -> None:
    score = Score(Objective.FLOPS_SAVED, flops=lambda num_tokens: float(num_tokens**2))
    assert score([50, 0], [100, 100]) == pytest.approx(2500 / 20_000)
    assert score([30, 20], [100, 100]) == pytest.approx(1300 / 20_000)


def test_p95_ttft_looks_at_the_slowest_only() -> None:
    score = Score(Objective.P95_TTFT, prefill_s=prefill_s)
    prompts = [100] * 18 + [900] * 2
    assert score([0] * 20, prompts) == 0.0
    assert score([50] * 18 + [0] * 2, prompts) == 0.0
    # Uncached, the two long ones take 10 seconds; with 800 tokens cached they take 2, as the others do.
    assert score([0] * 18 + [800] * 2, prompts) == pytest.approx(1 - 2.0 / 10.0)


@pytest.mark.parametrize("objective", list(Objective))
def test_no_requests_score_nothing(objective: Objective) -> None:
    assert Score(objective, float, prefill_s)([], []) == 0.0


@pytest.mark.parametrize("objective", [Objective.FLOPS_SAVED, Objective.P95_TTFT])
def test_an_objective_without_its_costs_is_refused(objective: Objective) -> None:
    with pytest.raises(ValueError, match=objective.value):
        Score(objective)


def test_p95_ttft_is_by_nearest_rank_as_the_tables_are() -> None:
    score = Score(Objective.P95_TTFT, prefill_s=prefill_s)
    # Of ten requests the 95th percentile is the slowest, not something between the two slowest.
    cached, prompts = [0] * 10, [100 * number for number in range(1, 11)]
    cached[9] = 500
    ttft_s = [prefill_s(*lengths) for lengths in zip(cached, prompts, strict=True)]
    assert score(cached, prompts) == 1 - Percentiles.of(ttft_s).p95 / 11.0 == 1 - 10.0 / 11.0
