"""Places in the order of eviction, in hundredths: those of a sort of tuples, in any slices."""

import random
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pytest

from marconi.policy.base import Eviction, NodeView
from marconi.policy.forecast.hazard import Floats
from marconi.view.standing import UNRANKED, Standing

from .trees import worths_by_definition


class Drawn:
    """Nodes of given rows, some without a place."""

    def __init__(self, num: int, draw: random.Random) -> None:
        self.nodes: list[Any] = [Numbered(serial) for serial in draw.sample(range(10 * num), num)]
        self.rows = {
            node: [np.nan] * 3 if draw.random() < 0.2 else [float(draw.randrange(most)) for most in (2, 4, 3)]
            for node in self.nodes
        }

    def worths(self, nodes: Sequence[NodeView], now_s: float) -> Floats:
        return np.array([self.rows[node] for node in nodes]).reshape(-1, 3)


class Numbered:
    def __init__(self, serial: int) -> None:
        self.serial = serial


def hundredths(order: Any, nodes: list[Any], num_in_slice: int) -> list[int]:
    standing = Standing(cast("Eviction", order), 0.0)
    for begin in range(0, len(nodes), num_in_slice):
        standing.weigh(nodes[begin : begin + num_in_slice])
    return standing.hundredths([node.serial for node in nodes])


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("num", [0, 1, 2, 3, 60, 250])
def test_places_are_those_of_a_sort_of_tuples_in_any_slices(num: int, seed: int) -> None:
    order = Drawn(num, random.Random(seed))  # noqa: S311 - a test's
    expected = worths_by_definition(cast("Eviction", order), order.nodes, 0.0)
    for num_in_slice in (1, 7, 1000):
        assert hundredths(order, order.nodes, num_in_slice) == expected
    assert expected.count(0) <= 1, "only the next victim has 0"


def test_an_order_of_other_ties_would_be_seen() -> None:
    """The control: serials decide between equal rows."""
    order = Drawn(60, random.Random(0))  # noqa: S311 - a test's
    expected = worths_by_definition(cast("Eviction", order), order.nodes, 0.0)
    for node in order.nodes:
        node.serial = -node.serial
    assert hundredths(order, order.nodes, 7) != expected


def test_a_state_alone_is_next_and_without_states_nothing_has_a_place() -> None:
    order = Drawn(2, random.Random(0))  # noqa: S311 - a test's
    first, second = order.nodes
    order.rows = {first: [1.0, 0.0, 0.0], second: [np.nan] * 3}
    assert hundredths(order, order.nodes, 2) == [0, UNRANKED]
    order.rows[first] = [np.nan] * 3
    assert hundredths(order, order.nodes, 2) == [UNRANKED, UNRANKED]
