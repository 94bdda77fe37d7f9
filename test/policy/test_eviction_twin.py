"""`BudgetCache` and its brute-force twin side by side: every hit, every byte held and every victim agree.

To add a rule, add a line to `RULES`: the rule, its definition as an `Order`, and the kinds of memory it is made for.
"""

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import count

import pytest
from hypothesis import strategies as st

from marconi.policy.base import Eviction, Need, NodeView
from marconi.policy.eviction.lru import SeparateLru
from marconi.policy.eviction.utility import AgeingUtilityEviction, UtilityEviction
from marconi_lab.eviction.joint_lru import JointLru
from marconi_lab.eviction.seglen import SegmentLengthEviction
from tree.faults import keep_to_itself

from .brute_order import (
    AgeingUtilityOrder,
    JointLruOrder,
    Order,
    SegmentLengthOrder,
    SeparateLruOrder,
    UtilityOrder,
)
from .random_runs import Extent, extents, sources
from .side_by_side import COSTS, ONE_POOL, TWO_POOLS, Rule, Setting, drive


def utility(alpha: float, needs: frozenset[Need] = ONE_POOL) -> Rule:
    name = f"marconi-static {alpha}" + (", two pools" if needs is TWO_POOLS else "")
    return Rule(name, lambda: UtilityEviction(COSTS, alpha, needs), lambda: UtilityOrder(COSTS, alpha), needs)


def ageing(alpha: float, needs: frozenset[Need] = ONE_POOL) -> Rule:
    name = f"marconi {alpha}" + (", two pools" if needs is TWO_POOLS else "")
    return Rule(
        name, lambda: AgeingUtilityEviction(COSTS, alpha, needs), lambda: AgeingUtilityOrder(COSTS, alpha), needs
    )


RULES = (
    Rule("lru", lambda: SeparateLru(TWO_POOLS), SeparateLruOrder, TWO_POOLS),
    Rule("lru, one pool", SeparateLru, SeparateLruOrder),
    Rule("lru-joint", JointLru, JointLruOrder),
    Rule("lru-joint, two pools", lambda: JointLru(TWO_POOLS), JointLruOrder, TWO_POOLS),
    Rule("lru by marconi-static 0.0", lambda: UtilityEviction(COSTS, 0.0), SeparateLruOrder),
    utility(0.0),
    utility(0.3),
    utility(1.0),
    utility(4.0),
    utility(1.0, TWO_POOLS),
    ageing(0.3),
    ageing(4.0),
    ageing(4.0, TWO_POOLS),
    Rule("seglen", SegmentLengthEviction, lambda: SegmentLengthOrder(1.0)),
    Rule("seglen, two pools", lambda: SegmentLengthEviction(TWO_POOLS), lambda: SegmentLengthOrder(1.0), TWO_POOLS),
)
SETTINGS = (
    Setting("ghosts", unit_tokens=1, max_ghosts=6, num_running=1),
    Setting("no ghosts, overlapping", unit_tokens=1, max_ghosts=0, num_running=3, num_namespaces=2),
    Setting("blocks, overlapping", unit_tokens=3, max_ghosts=12, num_running=3),
    Setting(
        "grid, namespaces", unit_tokens=2, max_ghosts=3, num_running=1, num_namespaces=2, units_per_grid=2, num_units=60
    ),
)


@extents
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_hits_bytes_and_victims_are_those_of_the_brute_force_twin(rule: Rule, extent: Extent) -> None:
    def victims(setting: Setting, rng: random.Random, num_operations: int) -> int:
        return len(drive(rule, setting, num_operations, rng, extent.every).twin.victims)

    num_victims = extent.draw(victims, SETTINGS, rng=sources, num_operations=st.integers(40, 120))
    assert num_victims > 20 * extent.num_runs, "the runs hardly evict: they would show nothing"


# Negative controls: a planted fault turns the comparison red.


def forgetful(rule: Eviction) -> Eviction:
    """`rule`, to which every twentieth update is lost."""
    update, numbers = rule.update, count(1)

    def lossy(node: NodeView) -> None:
        if next(numbers) % 20:
            update(node)

    rule.update = lossy  # type: ignore[method-assign]
    return rule


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_rule_that_loses_an_update_is_caught(rule: Rule) -> None:
    faulty = replace(rule, eviction=lambda: forgetful(rule.eviction()))
    with pytest.raises(AssertionError):
        drive(faulty, SETTINGS[0], 1000, random.Random(3))  # noqa: S311 - a workload, not a secret


@pytest.mark.parametrize("note", ["_note_nearest_below", "_note_only_leaf"])
def test_a_tree_that_does_not_tell_what_changed_is_caught(note: str, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_to_itself(monkeypatch, note)
    with pytest.raises(AssertionError, match="victims"):
        drive(utility(4.0), SETTINGS[0], 1000, random.Random(3))  # noqa: S311 - a workload, not a secret


@pytest.mark.parametrize(
    "order", [SeparateLruOrder, lambda: UtilityOrder(COSTS, 0.3), lambda: AgeingUtilityOrder(COSTS, 1.0)]
)
def test_a_rule_held_against_another_definition_is_caught(order: Callable[[], Order]) -> None:
    with pytest.raises(AssertionError, match="victims"):
        drive(replace(utility(1.0), order=order), SETTINGS[0], 1000, random.Random(3))  # noqa: S311 - no secret
