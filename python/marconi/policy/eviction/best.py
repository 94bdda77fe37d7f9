"""The rule `best`: the least expected saving per byte and second is evicted first.

    worth(n) = g(n, age) * share(n) * saved tokens(n) / bytes that evicting n frees

g is the Gittins index of the time to the next use (`forecast/hazard.py`), in uses per second, forecast from how states
of its role, rhythm and traits were used so far (`forecast/forecast.py`); age is the time since its last use. Saved
tokens are those beyond the nearest shallower state. A prompt that nobody has gone on from yet has several states near
its end, and g is then the prompt's: share is the part of what goes on from such prompts that would start from this one
(`forecast/turns.py`), as counted in this server and, before anything was, by a prior. It is 1 for every other state.

A state that is only planned has the worth that it would have now, and gets a slot if that is more than the worth of
what would be evicted for it (`outranks`). What that does, without a rule for any of it:

- where slots are short, a prompt keeps the one state near its end that serves most of what may come; where they are
  not, it keeps all;
- dead KV does not exist in the tree; a state that its conversation has passed is used so rarely that it goes first,
  which thins a path to its end, its guard and its branch points;
- a branch point that has proved itself is young at every use, and many come through;
- conversations are waited for by their own rhythm, and no longer than others like them took; where more of them wait
  than fit, those that have waited longest stay until they go on;
- a document read once is worth less than a conversation, as soon as that is how it was;
- what was evicted too early counts as used when its ghost is missed, so a wrong prior costs a few requests.

Rates are learned while serving (`forecast/forecast.py`); before the first uses are seen they fall as 1 / age for all,
and the rule is LRU by saving per byte.

A node is ranked with the forecast of when it was last reported; the least is ranked again with the present one before
it goes, up to `MAX_RERANKS` times. A victim costs O(classes + log n), with classes no more than strata times levels
(`ageing.py`).

Classes and not a sample: the least of 64 candidates drawn at random (as libCacheSim's sampled policies) would need no
classes, but moves the hit rates of docs/hit-rate.md by -1.07 to +0.95 points, at five of 32 below -0.3, and of 512
still by -0.39 to +0.95.
"""

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from marconi.policy.base import Costs, Eviction, Need, NodeView, PlannedState, Scope
from marconi.policy.eviction.ageing import AgeingClasses, level_of, log2_worth
from marconi.policy.forecast.forecast import Forecast
from marconi.policy.forecast.hazard import rounded
from marconi.policy.request import Lease

MAX_RERANKS: Final = 4


class BestEviction(Eviction):
    """Forecast saving per byte and second."""

    scope = Scope.ANY

    def __init__(
        self,
        costs: Costs,
        forecast: Forecast,
        needs: frozenset[Need] = frozenset({Need.BYTES}),
        saved: Callable[[NodeView], float] | None = None,
    ) -> None:
        """`saved` is what a use of a node saves, in place of the tokens beyond the nearest shallower state."""
        self._costs = costs
        self.forecast = forecast
        self.turns, self.guard = forecast.turns, forecast.divergence
        self._saved = saved or _saved_tokens
        self._classes = {need: AgeingClasses() for need in sorted(needs, key=lambda need: need.value)}
        self._of_leaves = self._classes.get(Need.KV)
        self._of_all = [(need, classes) for need, classes in self._classes.items() if need is not Need.KV]
        self._now_s = 0.0
        self._log2_index = rounded(np.log2(forecast.index))

    def for_copies(self, needs: frozenset[Need], saved: Callable[[NodeView], float]) -> "BestEviction":
        """Rank copies by the same forecast: a state on the host is used as one on the device is."""
        return BestEviction(self._costs, self.forecast, needs, saved)

    def arrived(self, lease: Lease, now_s: float) -> None:
        """Learn from the request."""
        self._now_s = now_s
        before = self.forecast.index
        self.forecast.arrived(lease, now_s)
        if self.forecast.index is not before:
            self._log2_index = rounded(np.log2(self.forecast.index))

    def admitted(self, nodes: Sequence[NodeView], lease: Lease, now_s: float) -> None:
        """Note what the states are like."""
        self._now_s = now_s
        self.forecast.left(nodes, lease, now_s)

    def evicting(self, node: NodeView, now_s: float) -> None:
        """Note that `node` cannot be used any more, or only in vain."""
        self._now_s = now_s
        if not node.has_copy:
            self.forecast.gone(node, now_s)

    def update(self, node: NodeView) -> None:
        """Rank `node` with the present forecast."""
        stratum, weight = self.forecast.standing(node, self._now_s)
        saved = weight * self._saved(node)
        if self._of_leaves is not None:
            if node.num_children:
                self._of_leaves.discard(node)
            else:
                # What costs nothing to hold counts as one byte.
                freed_bytes = max(node.freed_tokens * self._costs.kv_bytes_per_token, 1)
                self._of_leaves.put(node, stratum, level_of(saved / freed_bytes))
        for need, classes in self._of_all:
            num_bytes = self._costs.state_bytes if need is Need.STATE else self._costs.freed_bytes(node)
            classes.put(node, stratum, level_of(saved / max(num_bytes, 1)))

    def discard(self, node: NodeView) -> None:
        """Forget its rank; what is not in use, waited for, leaving or in another tier has lost its state."""
        for classes in self._classes.values():
            classes.discard(node)
        if not (node.is_locked or node.has_copy or node.first_waiting is not None or node.leaving is not None):
            self.forecast.gone(node, self._now_s)

    def outranks(self, planned: PlannedState, victim: NodeView, need: Need, now_s: float) -> bool:
        """Compare what is expected of a state that is left now with the worth of `victim`."""
        held = self._classes[need].class_of(victim)
        if held is None:
            return True
        stratum, weight = self.forecast.expected(planned, now_s)
        level = level_of(weight * planned.share * planned.num_saved_tokens / self._costs.state_bytes)
        worth = log2_worth(self._log2_index[stratum], level, 0.0)
        return worth > log2_worth(self._log2_index[held[0]], held[1], now_s - victim.last_hit_s)

    def victim(self, need: Need, now_s: float) -> NodeView | None:
        """The node of least worth; `KeyError` for a need that the rule was not made for."""
        self._now_s = now_s
        classes = self._classes[need]
        for _ in range(MAX_RERANKS):
            node = classes.least(self._log2_index, now_s)
            if node is None:
                return None
            before = classes.class_of(node)
            self.update(node)
            if classes.class_of(node) == before:
                return node
        return classes.least(self._log2_index, now_s)


def _saved_tokens(node: NodeView) -> float:
    return node.depth - node.checkpoint_depth_above
