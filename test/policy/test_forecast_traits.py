"""What a state was like when it was left, worked by hand."""

import pytest

from marconi.policy.forecast.forecast import NUM_LEVELS, NUM_RHYTHMS, Traits, traits_of
from marconi.policy.request import Request, pack

KNOWN, NEW, LENGTH, ANSWER, TURN = range(5)


def left(depth: int, seen: int = 0, num_output: int = 0, before: Traits | None = None, now_s: float = 0.0) -> Traits:
    return traits_of(Request(pack([]), depth, num_output, 0, 0.0), depth, seen, before, now_s)


def test_a_state_of_a_first_request_worked_by_hand() -> None:
    traits = left(depth=2048, seen=1024, num_output=100, now_s=7.0)
    # half of it was new; 1024 / 64 = 2**4; 2048 / 256 = 2**3; 100 / 16 is between 2**2 and 2**3; no turn before
    assert traits == Traits(left_s=7.0, log2_gap=None, turn=0, levels=(2, 5, 4, 3, 0))
    assert traits.rhythm == 0


@pytest.mark.parametrize(
    ("depth", "seen", "level"),
    [
        (10_000, 0, 0),
        (10_000, 512, 0),
        (10_000, 513, 1),
        (2048, 1023, 1),
        (2048, 1024, 2),
        (4096, 3072, 3),
        (64_000, 63_000, 6 + 1),
        (64_000, 62_001, 1 + 5),
        (4096, 4096, 7),
        (4096, 9999, 7),
        (512, 512, 0),
    ],
)
def test_known_is_nothing_up_to_a_system_prompt_then_octaves_of_the_new_part(depth: int, seen: int, level: int) -> None:
    assert left(depth, seen).levels[KNOWN] == level


@pytest.mark.parametrize(("new", "level"), [(0, 0), (63, 0), (64, 1), (127, 1), (128, 2), (64 << 8, 9), (1 << 30, 9)])
def test_new_is_in_octaves_of_64_tokens(new: int, level: int) -> None:
    assert left(100 + new, 100).levels[NEW] == level


@pytest.mark.parametrize(("depth", "level"), [(1, 0), (255, 0), (256, 1), (511, 1), (512, 2), (1 << 30, 11)])
def test_length_is_in_octaves_of_256_tokens(depth: int, level: int) -> None:
    assert left(depth).levels[LENGTH] == level


@pytest.mark.parametrize(("output", "level"), [(0, 0), (15, 0), (16, 1), (31, 1), (32, 2), (1 << 20, 7)])
def test_answer_is_in_octaves_of_16_tokens(output: int, level: int) -> None:
    assert left(1000, num_output=output).levels[ANSWER] == level


def test_every_level_is_one_of_its_factor() -> None:
    traits: Traits | None = None
    for power in range(25):
        for seen in (0, 1 << power, (1 << power) - 1):
            traits = left(1 << power, seen, 1 << power, traits, float(1 << power))
            assert all(0 <= level < num for level, num in zip(traits.levels, NUM_LEVELS, strict=True))
            assert 0 <= traits.rhythm < NUM_RHYTHMS


def test_turns_are_counted_up_to_the_last_level() -> None:
    traits = left(10)
    turns = []
    for _ in range(6):
        traits = left(10, before=traits)
        turns.append((traits.turn, traits.levels[TURN]))
    assert turns == [(1, 1), (2, 2), (3, 3), (4, 4), (5, 4), (6, 4)]


@pytest.mark.parametrize(
    ("gap_s", "rhythm"),
    [(0.0, 1), (3.99, 1), (4.0, 2), (15.9, 2), (16.0, 3), (64.0, 4), (256.0, 5), (1023.0, 5), (1024.0, 6), (1e9, 6)],
)
def test_the_rhythm_is_the_octave_pair_of_the_first_gap(gap_s: float, rhythm: int) -> None:
    assert left(10, before=left(10, now_s=5.0), now_s=5.0 + gap_s).rhythm == rhythm


def test_the_past_of_a_rhythm_weighs_half_with_each_gap() -> None:
    first = left(10, now_s=0.0)
    second = left(10, before=first, now_s=4.0)
    third = left(10, before=second, now_s=4.0 + 64.0)
    fourth = left(10, before=third, now_s=68.0 + 1024.0)
    assert [second.log2_gap, third.log2_gap, fourth.log2_gap] == [2.0, (2 + 6) / 2, (4 + 10) / 2]
    assert [second.rhythm, third.rhythm, fourth.rhythm] == [2, 3, 4]
