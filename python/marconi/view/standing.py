"""Where each state stands in the order of eviction, in hundredths.

    worth = 0                            the next victim
            ceil(100 * place / last)     the others: 1 .. 100, by their place 1 .. last in the order
            UNRANKED                     no place: in use, or on the host alone

Rules weigh states in units of their own: seconds, log2 of a saving, a score. A place needs no unit, so pages of two
rules can be compared and share one scale of colours. It is a place in the order as it stands: every eviction and every
request may change the order behind it. Looking must change nothing, so the rule is not asked for a victim: `best`
ranks its least again before it evicts it, and `marconi` names the least of its classes' oldest, so that the victim of
either may be another state near the front. Nor are the wishes of name spaces in it, but for states that are set aside:
a demoted state is evicted before its place, and a retained one after it (`policy/retention.py`).

Rows of keys are taken from the order in slices, as the walk is; the time is that of the first for all of them. The
sorting comes last and is a slice of its own in a large tree.
"""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from marconi.policy.base import Eviction, NodeView
from marconi.policy.forecast.hazard import Floats, Ints

UNRANKED: Final = -1
_HUNDREDTHS: Final = 100


class Standing:
    """Collects the rows of an order, then ranks."""

    __slots__ = ("_now_s", "_order", "_rows")

    def __init__(self, order: Eviction, now_s: float) -> None:
        """`order` gives nan for states that have no place in it."""
        self._order, self._now_s = order, now_s
        self._rows: list[Floats] = []

    def weigh(self, nodes: Sequence[NodeView]) -> None:
        """Take the rows of further nodes."""
        self._rows.append(self._order.worths(nodes, self._now_s))

    def hundredths(self, serials: Sequence[int]) -> list[int]:
        """The worth of every node that was weighed, in the order of weighing; of equal rows the lowest serial first."""
        rows = np.zeros((len(serials), max((each.shape[1] for each in self._rows), default=1)))
        begin = 0
        for each in self._rows:
            rows[begin : begin + len(each), : each.shape[1]] = each
            begin += len(each)
        ranked = np.flatnonzero(~np.isnan(rows[:, 0]))
        worths = np.full(len(rows), UNRANKED)
        places = np.arange(len(ranked))
        order = _order([*rows[ranked].T, np.array(serials, np.int64)[ranked]])
        worths[ranked[order]] = -(-_HUNDREDTHS * places // max(len(ranked) - 1, 1))
        found: list[int] = worths.tolist()
        return found


def _order(keys: list[npt.NDArray[Any]]) -> Ints:
    """Indexes that sort by the first of `keys`, then by the others, the last of which is unique.

    As `np.lexsort` finds it, in a tenth of the time: columns of one number are skipped, and only ties are sorted twice.
    """
    while len(keys) > 1 and (not len(keys[0]) or keys[0].min() == keys[0].max()):
        keys = keys[1:]
    order: Ints = np.argsort(keys[0])
    if len(keys) > 1:
        is_equal = np.diff(keys[0][order]) == 0
        tied = np.flatnonzero(np.append(is_equal, False) | np.append(False, is_equal))
        at = order[tied]
        order[tied] = at[np.lexsort([key[at] for key in reversed(keys)])]
    return order
