"""The guard's distance, worked by hand and against every choice tried."""

import random

import pytest

from marconi.policy.forecast.turns import (
    MAX_DISTANCES,
    MAX_LOSSES,
    REQUESTS_A_CHOICE,
    WINDOW_REQUESTS,
    DivergenceWindow,
)


def window_of(*losses: tuple[int, int], num_requests: int = REQUESTS_A_CHOICE) -> DivergenceWindow:
    """A window that has seen `losses`, then requests without any."""
    window = DivergenceWindow()
    for distance, lost in losses:
        window.observe(distance, lost)
    for _ in range(num_requests - len(losses)):
        window.observe(0, 0)
    return window


def saved_by(guard: int, losses: list[tuple[int, int]]) -> int:
    """Tokens that guards at a distance would have saved, loss by loss."""
    total = 0
    for distance, lost in losses:
        if distance <= guard < distance + lost:
            total += lost - (guard - distance)
    return total


def test_without_a_loss_there_is_no_guard() -> None:
    window = window_of()
    assert (window.distance_tokens, window.gain_tokens) == (0, 0.0)


def test_the_guard_stands_where_prompts_leave() -> None:
    window = window_of((30, 1000), (30, 500))
    assert (window.distance_tokens, window.gain_tokens) == (30, 1500 / 64)


def test_the_guard_stands_a_little_further_where_that_serves_more_prompts() -> None:
    # at 10 it serves one prompt, 100; at 40 both, 100 - 30 + 100; at 90 three, 100 - 80 + 100 - 50 + 100
    window = window_of((10, 100), (40, 100), (90, 100))
    assert [saved_by(guard, [(10, 100), (40, 100), (90, 100)]) for guard in (10, 40, 90)] == [100, 170, 170]
    assert window.distance_tokens == 40, "of equal ones the shortest"
    assert window.gain_tokens == 170 / 64


def test_a_guard_before_the_shared_part_saves_nothing() -> None:
    window = window_of((10, 50), (60, 49))
    assert window.distance_tokens == 10, "at 60, the first prompt shares nothing with a path up to there"


def test_a_prompt_that_left_no_path_or_lost_nothing_is_no_loss() -> None:
    window = window_of((0, 1000), (50, 0), (50, -3))
    assert window.distance_tokens == 0


def test_a_choice_is_made_every_so_many_requests() -> None:
    window = window_of((30, 100), num_requests=REQUESTS_A_CHOICE - 1)
    assert window.distance_tokens == 0
    window.observe(0, 0)
    assert window.distance_tokens == 30


def test_losses_older_than_the_window_are_forgotten() -> None:
    window = window_of((30, 100), num_requests=WINDOW_REQUESTS)
    assert (window.distance_tokens, window.gain_tokens) == (30, 100 / WINDOW_REQUESTS)
    for _ in range(REQUESTS_A_CHOICE):
        window.observe(0, 0)
    assert (window.distance_tokens, window.gain_tokens) == (0, 0.0)


def test_where_losses_are_many_the_gain_is_over_the_requests_that_they_are_of() -> None:
    window = window_of(*[(30, 100)] * (4 * MAX_LOSSES), num_requests=4 * MAX_LOSSES)
    assert window.gain_tokens == 100.0, "every request would have saved 100"


@pytest.mark.one_in(4)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_the_choice_is_the_best_of_all_distances_seen(seed: int) -> None:
    rng = random.Random(seed)  # noqa: S311 - test data
    window = DivergenceWindow()
    losses: list[tuple[int, int, int]] = []
    num_chosen = 0
    for number in range(1, 4000):
        distance = rng.choice((0, 0, 30, 35, rng.randrange(1, 50)))
        lost = rng.choice((0, 5, rng.randrange(200)))
        window.observe(distance, lost)
        if distance and lost:
            losses.append((number, distance, lost))
        if number % REQUESTS_A_CHOICE == 0:
            losses = [loss for loss in losses if loss[0] > number - WINDOW_REQUESTS][-MAX_LOSSES:]
            seen = [(distance, lost) for _, distance, lost in losses]
            best = max(saved_by(guard, seen) for guard, _ in seen)
            assert saved_by(window.distance_tokens, seen) == best
            assert window.distance_tokens == min(guard for guard, _ in seen if saved_by(guard, seen) == best)
            span = number - losses[0][0] + 1 if len(losses) == MAX_LOSSES else min(number, WINDOW_REQUESTS)
            assert window.gain_tokens == best / span
            num_chosen += 1
    assert num_chosen == 3999 // REQUESTS_A_CHOICE


def test_only_so_many_distances_are_tried_the_shortest_first() -> None:
    long = MAX_DISTANCES + 10
    window = DivergenceWindow()
    for _ in range(5):
        for distance in range(1, long + 1):
            window.observe(distance, 1 if distance < long else 10_000)
    while window._num_requests % REQUESTS_A_CHOICE:
        window.observe(0, 0)
    assert 0 < window.distance_tokens <= MAX_DISTANCES
