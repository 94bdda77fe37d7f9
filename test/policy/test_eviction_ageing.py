"""Classes that age alike: the least by a scan of all nodes, ties, and classes that empty."""

import random
from dataclasses import dataclass, field
from itertools import count

import numpy as np
import pytest

from marconi.policy.base import NodeView
from marconi.policy.eviction.ageing import LEVELS_PER_OCTAVE, AgeingClasses, level_of, log2_worth
from marconi.policy.forecast.hazard import NUM_BINS, Floats

_SERIALS = count()


@dataclass(eq=False)
class Aged:
    """All that classes look at."""

    last_hit_s: float
    serial: int = field(default_factory=lambda: next(_SERIALS))


def falling_index(seed: int, num_strata: int = 4) -> Floats:
    """log2 of an index that falls with age, level in places."""
    rng = np.random.default_rng(seed)
    steps = rng.exponential(1.0, (num_strata, NUM_BINS)) * (rng.random((num_strata, NUM_BINS)) < 0.6)
    index: Floats = -np.cumsum(steps, axis=1)
    return index


def peaked_index(seed: int, num_strata: int = 4) -> Floats:
    """log2 of an index that rises to a peak and falls, level in places; the peak may be at either end."""
    rng = np.random.default_rng(seed)
    index = falling_index(seed, num_strata)
    for stratum, peak in enumerate(rng.integers(0, NUM_BINS, num_strata)):
        index[stratum, : peak + 1] = index[stratum, : peak + 1][::-1]
    return np.where(index < -30, -30, index)


def put(classes: AgeingClasses, node: Aged, stratum: int, level: int) -> None:
    classes.put(node, stratum, level)  # type: ignore[arg-type]


def worth_of(index: Floats, stratum: int, level: int, age_s: float) -> float:
    return log2_worth(index[stratum].tolist(), level, age_s)


def test_a_level_is_a_third_of_an_octave_of_worth() -> None:
    assert [level_of(worth) for worth in (0.5, 1.0, 1.25, 1.26, 2.0, 8.0)] == [-3, 0, 0, 1, 3, 9]
    assert level_of(0.0) == level_of(1e-30)


def test_worth_is_the_index_at_the_middles_of_the_bins_and_between_them_along_the_logarithm() -> None:
    index = np.array([-np.arange(NUM_BINS, dtype=float)])
    middle_s = 2.0**4.5
    assert worth_of(index, 0, 0, middle_s) == pytest.approx(-5)
    assert worth_of(index, 0, 0, middle_s * 2**0.25) == pytest.approx(-5.25)
    assert worth_of(index, 0, LEVELS_PER_OCTAVE, middle_s) == pytest.approx(-4), "an octave more"
    assert worth_of(index, 0, 0, 0.0) == 0.0
    assert worth_of(index, 0, 0, 1e12) == -(NUM_BINS - 1), "as the last bin from its middle on"


@pytest.mark.parametrize("seed", range(4))
def test_worth_never_rises_with_age(seed: int) -> None:
    index = falling_index(seed)
    ages_s = np.sort(np.exp(np.random.default_rng(seed).uniform(-2, 14, 5000)))
    for stratum in range(len(index)):
        worth = [worth_of(index, stratum, 0, age_s) for age_s in ages_s]
        assert (np.diff(worth) <= 1e-12).all()


def test_where_the_index_is_level_worth_is_the_same_to_the_last_bit() -> None:
    index = np.full((1, NUM_BINS), np.log2(0.0123))
    ages_s = np.exp(np.random.default_rng(3).uniform(-2, 14, 5000))
    assert len({worth_of(index, 0, 0, age_s) for age_s in ages_s}) == 1


def test_nothing_is_the_least_of_none() -> None:
    classes = AgeingClasses()
    assert classes.least(falling_index(0), 1.0) is None
    node = Aged(0.0)
    put(classes, node, 0, 0)
    classes.discard(node)  # type: ignore[arg-type]
    assert classes.least(falling_index(0), 1.0) is None
    assert classes.class_of(node) is None  # type: ignore[arg-type]


def test_of_equal_worth_the_oldest_goes_first_then_the_one_made_first() -> None:
    level = np.zeros((2, NUM_BINS))
    classes = AgeingClasses()
    young, twin, old = Aged(9.0), Aged(5.0), Aged(5.0)
    for node, stratum in ((young, 0), (old, 1), (twin, 0)):
        put(classes, node, stratum, 7)
    assert twin.serial < old.serial
    assert classes.least(level, 10.0) is twin
    classes.discard(twin)  # type: ignore[arg-type]
    assert classes.least(level, 10.0) is old


def test_a_node_is_in_the_class_it_was_last_put_in() -> None:
    classes = AgeingClasses()
    node, other = Aged(0.0), Aged(0.0)
    put(classes, node, 0, 3)
    put(classes, other, 0, 5)
    put(classes, node, 2, 9)
    assert classes.class_of(node) == (2, 9)  # type: ignore[arg-type]
    assert classes.least(np.zeros((3, NUM_BINS)), 1.0) is other


def test_a_class_that_was_empty_for_a_while_is_weighed_again() -> None:
    classes, index = AgeingClasses(), np.zeros((1, NUM_BINS))
    low, high, later = Aged(0.0), Aged(0.0), Aged(5.0)
    put(classes, low, 0, 1)
    put(classes, high, 0, 2)
    assert classes.least(index, 9.0) is low
    classes.discard(low)  # type: ignore[arg-type]
    assert classes.least(index, 9.0) is high
    put(classes, later, 0, 1)
    assert classes.least(index, 9.0) is later


def test_before_the_peak_the_youngest_of_a_class_goes_first() -> None:
    index = -np.abs(np.arange(NUM_BINS) - 7.0)[None, :]
    classes = AgeingClasses()
    old, middle, young = Aged(0.0), Aged(30.0), Aged(60.0)
    for node in (old, middle, young):
        put(classes, node, 0, 0)
    assert classes.least(index, 64.0) is young, "the others have waited longer for a use that is due after 64 s or more"
    assert classes.least(index, 10_000.0) is old, "none has been used when it was due"


@pytest.mark.parametrize("seed", range(4))
def test_the_least_is_that_of_a_scan_of_the_classes_ends(seed: int) -> None:
    rng = random.Random(seed)  # noqa: S311 - test data
    classes, index = AgeingClasses(), peaked_index(seed)
    held: dict[Aged, tuple[int, int]] = {}
    now_s, num_compared = 0.0, 0
    for step in range(3000):
        now_s += rng.choice((0.0, 0.3, 7.0))
        if not held or rng.random() < 0.55:
            node = rng.choice(list(held)) if held and rng.random() < 0.4 else Aged(now_s)
            node.last_hit_s = now_s
            held[node] = (rng.randrange(4), rng.randrange(-3, 6))
            put(classes, node, *held[node])
        else:
            node = rng.choice(list(held))
            del held[node]
            classes.discard(node)  # type: ignore[arg-type]
        if step % 500 == 0:
            index = peaked_index(seed + step)
        if held and step % 3 == 0:
            least: NodeView | None = classes.least(index, now_s)
            assert least is _scanned(held, index, now_s)
            num_compared += 1
    assert num_compared > 800


def _scanned(held: dict[Aged, tuple[int, int]], index: Floats, now_s: float) -> Aged:
    def order(node: Aged) -> tuple[float, float, int]:
        return worth_of(index, *held[node], now_s - node.last_hit_s), node.last_hit_s, node.serial

    ends = []
    for of_class in set(held.values()):
        members = [node for node in held if held[node] == of_class]
        ends.append(min(members, key=lambda node: (node.last_hit_s, node.serial)))
        ends.append(min(members, key=lambda node: (-node.last_hit_s, node.serial)))
    found = min(ends, key=order)
    assert order(found)[0] == min(order(node)[0] for node in held), "no node is worth less than a class's ends"
    return found
