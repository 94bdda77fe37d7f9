"""What classes cost: the victim's S exceeds the least of all, each node looked at, by no more than is promised."""

import random
from dataclasses import dataclass

import pytest

from marconi.policy.base import Need, NodeView
from marconi.policy.eviction.classed import CLASSES_PER_OCTAVE, ClassedEviction, benefit_class

ROUNDING = 1e-9


@dataclass(eq=False, slots=True)
class Worth:
    """As much of a node as a rule of this form looks at."""

    serial: int
    last_hit_s: float
    benefit: float
    num_children: int = 0


class ByWorth(ClassedEviction):
    """The benefit that a node was given."""

    def benefit(self, node: NodeView) -> float:
        assert isinstance(node, Worth)
        return node.benefit


def excess(held: list[Worth], victim: NodeView | None, weight: float, now_s: float) -> tuple[float, float]:
    """By how much the victim's S is above the least, and by how much it may be, by the definitions."""
    assert isinstance(victim, Worth)
    t_min = min(node.last_hit_s for node in held)
    benefits = [node.benefit for node in held]
    spread = (max(benefits) - min(benefits)) or 1.0

    def score(node: Worth) -> float:
        recency = (node.last_hit_s - t_min) / ((now_s - t_min) or 1.0)
        return recency + weight * (node.benefit - min(benefits)) / spread

    least = min(held, key=score)
    allowed = weight * least.benefit * (2 ** (1 / CLASSES_PER_OCTAVE) - 1) / spread
    return score(victim) - score(least), allowed


@pytest.mark.parametrize("num_octaves", [0.05, 1, 6])
@pytest.mark.parametrize("weight", [0.0, 0.3, 1.0, 8.0])
def test_a_victim_is_the_least_but_for_the_width_of_a_class(weight: float, num_octaves: float) -> None:
    rng = random.Random(7)  # noqa: S311 - no secret
    rule, held, excesses = ByWorth(weight), [], []
    for serial in range(1500):
        now_s = float(serial)
        node = Worth(serial, now_s, 100 * 2 ** rng.uniform(0, num_octaves))
        held.append(node)
        rule.update(node)
        hit = rng.choice(held)
        hit.last_hit_s = now_s
        rule.update(hit)
        if len(held) > 100:
            victim = rule.victim(Need.BYTES, now_s)
            over, allowed = excess(held, victim, weight, now_s)
            assert over <= allowed + ROUNDING
            excesses.append(over)
            assert isinstance(victim, Worth)
            held.remove(victim)
            rule.discard(victim)
    if num_octaves > 1:
        assert sum(excesses) / len(excesses) <= 0.01 * max(1.0, weight), "of what recency and benefit may count"


def test_of_a_class_the_oldest_goes_though_another_has_less_benefit() -> None:
    """What is given up: the younger of two in one class is less by recency plus benefit, by a hair."""
    rule = ByWorth(1.0)
    older, younger = Worth(0, 10.0, 107.0), Worth(1, 10.1, 101.0)
    assert benefit_class(older.benefit) == benefit_class(younger.benefit)
    held = [older, younger, Worth(2, 0.0, 1000.0), Worth(3, 99.0, 50.0)]
    for node in held:
        rule.update(node)
    assert rule.victim(Need.BYTES, 100.0) is older
    over, allowed = excess(held, older, 1.0, 100.0)
    assert 0 < over <= allowed


def test_benefits_of_one_class_still_count_by_themselves() -> None:
    """Of equal age, two classes' oldest are ordered by benefit; the range is that of all nodes."""
    rule = ByWorth(1.0)
    nodes = [Worth(0, 5.0, 300.0), Worth(1, 5.0, 100.0), Worth(2, 5.0, 200.0)]
    for node in nodes:
        rule.update(node)
    order = []
    while (victim := rule.victim(Need.BYTES, 9.0)) is not None:
        assert isinstance(victim, Worth)
        order.append(victim.serial)
        rule.discard(victim)
    assert order == [1, 2, 0]


def test_a_class_that_was_emptied_is_filled_again() -> None:
    rule = ByWorth(1.0)
    for serial in range(3):
        node = Worth(serial, float(serial), 100.0)
        rule.update(node)
        assert rule.victim(Need.BYTES, 10.0) is node
        rule.discard(node)
        assert rule.victim(Need.BYTES, 10.0) is None
