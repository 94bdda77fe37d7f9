"""A forecast by its definition: every life in a list, every role read off the tree, every fit in plain loops."""

from collections.abc import Sequence
from dataclasses import dataclass

from marconi.policy.forecast import forecast
from marconi.policy.forecast.forecast import ARRIVALS_A_FIT, FIRST_FITS, NUM_RHYTHMS, SHAPE, Traits, traits_of
from marconi.policy.forecast.hazard import Shape
from marconi.policy.request import Lease
from marconi.tree import Node, RadixTree

STARTS_S = [0.0] + [2.0**power for power in range(19)]
WIDTHS_S = [1.0] + [2.0**power for power in range(19)]
NUM_BINS = 20
NO_LEVELS = (0, 0, 0, 0, 0)


@dataclass
class Life:
    """What a state was like, and how long it waited."""

    stratum: int
    levels: tuple[int, ...]
    began_s: float
    ended_s: float | None = None
    used: bool = False

    def age_s(self, now_s: float) -> float:
        return max((now_s if self.ended_s is None else self.ended_s) - self.began_s, 1e-3)


def bin_of(age_s: float) -> int:
    """The last bin that begins at the age or before."""
    return max(index for index, start_s in enumerate(STARTS_S) if start_s <= age_s)


def exposure_s(age_s: float, index: int) -> float:
    """Seconds of a wait that fall into a bin; the last bin has no end."""
    beyond_s = max(age_s - STARTS_S[index], 0.0)
    return beyond_s if index == NUM_BINS - 1 else min(beyond_s, WIDTHS_S[index])


@dataclass
class Estimate:
    """Uses per second [stratum][bin], and multipliers [factor][group][level]."""

    baseline: list[list[float]]
    weights: list[list[list[float]]]

    @classmethod
    def prior(cls, shape: Shape) -> "Estimate":
        baseline = [
            [shape.group_priors[group] / (start_s + width_s / 2 + 8) for start_s, width_s in zip(STARTS_S, WIDTHS_S)]  # noqa: B905
            for group in shape.group_of
        ]
        weights = [[[1.0] * num for _ in shape.group_priors] for num in shape.num_levels]
        return cls(baseline, weights)

    def weight(self, group: int, levels: Sequence[int], but_not: int = -1) -> float:
        product = 1.0
        for factor, level in enumerate(levels):
            if factor != but_not:
                product *= self.weights[factor][group][level]
        return product

    def fitted(self, shape: Shape, lives: Sequence[Life], now_s: float) -> "Estimate":
        """Two rounds of the closed forms of `hazard.py`, from where the factors stand."""
        groups, strata, bins = range(len(shape.group_priors)), range(len(shape.group_of)), range(NUM_BINS)
        estimate = Estimate([], [[list(levels) for levels in factor] for factor in self.weights])
        prior = Estimate.prior(shape).baseline
        for _ in range(2):
            events = [[0.0] * NUM_BINS for _ in strata]
            exposed_s = [[0.0] * NUM_BINS for _ in strata]
            for life in lives:
                age_s = life.age_s(now_s)
                weight = estimate.weight(shape.group_of[life.stratum], life.levels)
                events[life.stratum][bin_of(age_s)] += life.used
                for index in bins:
                    exposed_s[life.stratum][index] += weight * exposure_s(age_s, index)
            estimate.baseline = []
            for stratum in strata:
                peers = [other for other in strata if shape.group_of[other] == shape.group_of[stratum]]
                row = []
                for index in bins:
                    group_events = sum(events[peer][index] for peer in peers)
                    group_exposed_s = sum(exposed_s[peer][index] for peer in peers)
                    of_group = (group_events + 1) / (group_exposed_s + 1 / prior[stratum][index])
                    row.append((events[stratum][index] + 6) / (exposed_s[stratum][index] + 6 / of_group))
                estimate.baseline.append(row)
            for factor, num_levels in enumerate(shape.num_levels):
                used = [[0.0] * num_levels for _ in groups]
                expected = [[0.0] * num_levels for _ in groups]
                for life in lives:
                    group, level = shape.group_of[life.stratum], life.levels[factor]
                    used[group][level] += life.used
                    rates = estimate.baseline[life.stratum]
                    cumulated = sum(exposure_s(life.age_s(now_s), index) * rates[index] for index in bins)
                    expected[group][level] += estimate.weight(group, life.levels, but_not=factor) * cumulated
                estimate.weights[factor] = [
                    [(used[group][level] + 12) / (expected[group][level] + 12) for level in range(num_levels)]
                    for group in groups
                ]
        return estimate


class NaiveForecast:
    """What a forecast receives, kept by node and never forgotten; roles are read off the tree."""

    def __init__(self, tree: RadixTree) -> None:
        self.tree = tree
        self.lives: list[Life] = []
        self.going_on: dict[Node, Life] = {}
        self.traits: dict[Node, Traits] = {}
        self.waypoints: set[Node] = set()
        self.branches: set[Node] = set()
        self.passed: set[Node] = set()
        self.num_arrivals = 0
        self.estimate = Estimate.prior(SHAPE)
        self.fitted = 0, self.estimate
        """The arrival from which the last fit holds, and the fit."""

    def arrived(self, lease: Lease, now_s: float) -> None:
        self.num_arrivals += 1
        if (self.num_arrivals in FIRST_FITS or self.num_arrivals % ARRIVALS_A_FIT == 0) and self.lives:
            num_later = 0 if len(self.lives) <= forecast.WHOLE_FIT_LIVES else 3
            self.fitted = self.num_arrivals + num_later, self.estimate.fitted(SHAPE, self.lives, now_s)
        if self.num_arrivals == self.fitted[0]:
            self.estimate = self.fitted[1]
        for node in (lease.match.ghost, lease.match.source):
            if node is not None:
                self._end(node, now_s, used=True)

    def admitted(self, nodes: Sequence[Node], lease: Lease, now_s: float) -> None:
        origins = [node for node in (lease.match.ghost, lease.match.source) if node is not None and node in self.traits]
        before = self.traits[origins[0]] if origins else None
        for node in nodes:
            self.traits[node] = traits_of(lease.request, node.depth, lease.match.num_seen_tokens, before, now_s)
        self.waypoints -= set(nodes)
        self.waypoints |= set(nodes[:-1])
        branch = min(lease.match.num_seen_tokens, lease.request.num_prompt_tokens - 1)
        self.branches |= {node for node in nodes[:-1] if node.depth == branch}
        self.passed -= set(nodes[-1:])

    def evicting(self, node: Node, now_s: float) -> None:
        self.waypoints.discard(node)
        self.branches.discard(node)
        if any(child.is_live for child in node.children.values()):
            self._end(node, now_s)

    def look(self, now_s: float) -> None:
        """Every state that is not in use is in a life of its stratum; what is held without a state is in none."""
        for node in self.tree.nodes():
            if not node.has_state:
                self._end(node, now_s)
            elif not node.num_locks:
                if node in self.traits and any(child.is_live for child in node.children.values()):
                    self.passed.add(node)
                elif node in self.passed:
                    self._end(node, now_s)
                    continue
                stratum = self.stratum(node)
                life = self.going_on.get(node)
                if life is None or life.stratum != stratum:
                    self._end(node, now_s)
                    self.going_on[node] = Life(stratum, self.levels(node), now_s)
                    self.lives.append(self.going_on[node])
        for node in list(self.going_on):
            if not node.is_live and node.parent is None and node not in self.tree.ghosts and node.num_children:
                self._end(node, now_s)  # merged into what is below

    def levels(self, node: Node) -> tuple[int, ...]:
        return self.traits[node].levels if node in self.traits else NO_LEVELS

    def stratum(self, node: Node) -> int:
        """Ends by rhythm, then passed ends, stops on the way, branch points."""
        num_children = sum(child.is_live for child in node.children.values())
        if node in self.branches:
            return NUM_RHYTHMS + 2
        if num_children == 0:
            return self.traits[node].rhythm if node in self.traits else 0
        if num_children > 1:
            return NUM_RHYTHMS + 2
        return NUM_RHYTHMS + 1 if node in self.waypoints else NUM_RHYTHMS

    def _end(self, node: Node, now_s: float, *, used: bool = False) -> None:
        life = self.going_on.pop(node, None)
        if life is not None:
            life.ended_s, life.used = now_s, used
