"""Evaluates alerting rules as Prometheus does, over samples that a test makes up: just the PromQL that alerts use.

    or
    and                       labels of both sides equal, without the metric's name
    == != < <= > >=           with vectors a filter: a series stays, with its own value
    + -
    * /
    sum by (a, b) (...), rate(metric{a="b"}[15m] offset 1h), increase(...), metric{a=~"b|c"}, numbers

Of Prometheus 3: an instant selector takes the latest sample of the last 5 minutes, a range is open at its left, `rate`
and `increase` read a smaller value as a restart and extrapolate to the edges of the range where samples come near them
(promql/functions.go, `extrapolatedRate`). All else is a `ValueError`.
"""

import operator
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final, TypeAlias

from . import promql

Labels: TypeAlias = frozenset[tuple[str, str]]
Vector: TypeAlias = dict[Labels, float]
Node: TypeAlias = Callable[[float], "Vector | float"]

NAME: Final = "__name__"
_LOOKBACK_S: Final = 300.0
_SECONDS: Final = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_ARITHMETIC: Final = {"+": operator.add, "-": operator.sub, "*": operator.mul}
_COMPARISONS: Final = {
    **{"==": operator.eq, "!=": operator.ne, "<": operator.lt},
    **{"<=": operator.le, ">": operator.gt, ">=": operator.ge},
}
_LEVELS: Final = (("or",), ("and",), tuple(_COMPARISONS), ("+", "-"), ("*", "/"))
"""Binary operators, from those that bind least to those that bind most."""


def seconds(text: str) -> float:
    """The length of a duration such as `15m`."""
    return float(text[:-1]) * _SECONDS[text[-1]]


@dataclass(slots=True)
class Series:
    """The samples of one series, in order of time."""

    times_s: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def within(self, start_s: float, end_s: float) -> tuple[Sequence[float], Sequence[float]]:
        """Times and values after `start_s` and up to `end_s`."""
        first, last = bisect_right(self.times_s, start_s), bisect_right(self.times_s, end_s)
        return self.times_s[first:last], self.values[first:last]


Store: TypeAlias = Mapping[Labels, Series]


def increase(times_s: Sequence[float], values: Sequence[float], start_s: float, end_s: float) -> float | None:
    """By how much a counter grew in a range, extrapolated to its edges; None for fewer than two samples."""
    if len(values) < 2:
        return None
    grown = values[-1] - values[0]
    grown += sum(before for before, after in pairwise(values) if after < before)
    sampled_s = times_s[-1] - times_s[0]
    between_s = sampled_s / (len(values) - 1)
    before_s, after_s = times_s[0] - start_s, end_s - times_s[-1]
    if before_s >= 1.1 * between_s:
        before_s = between_s / 2
    if grown > 0 and values[0] >= 0:
        # It was not below 0 where the range begins.
        before_s = min(before_s, sampled_s * values[0] / grown)
    if after_s >= 1.1 * between_s:
        after_s = between_s / 2
    return grown * (sampled_s + before_s + after_s) / sampled_s


def parse(text: str, store: Store) -> Node:
    """The function of the time that an expression is."""
    parser = _Parser(promql.tokens(text), store)
    node = parser.binary()
    if parser.next:
        raise ValueError(f"{text!r} has more than one expression, the second begins with {parser.next!r}")
    return node


class _Parser:
    def __init__(self, tokens: Sequence[str], store: Store) -> None:
        self._tokens = [*tokens, ""]
        self._at = 0
        self._store = store

    @property
    def next(self) -> str:
        return self._tokens[self._at]

    def _take(self, *wanted: str) -> str:
        token = self.next
        if wanted and token not in wanted:
            raise ValueError(f"must be {' or '.join(wanted)}, got {token!r}")
        self._at += 1
        return token

    def binary(self, level: int = 0) -> Node:
        if level == len(_LEVELS):
            return self._unary()
        left = self.binary(level + 1)
        while self.next in _LEVELS[level]:
            left = _combined(self._take(), left, self.binary(level + 1))
        return left

    def _unary(self) -> Node:
        if self.next == "(":
            self._take()
            node = self.binary()
            self._take(")")
            return node
        token = self._take()
        if re.fullmatch(r"[0-9.]+", token):
            return lambda _now_s, number=float(token): number  # type: ignore[misc]
        if token == "sum":  # noqa: S105
            return self._sum()
        if token in ("rate", "increase"):
            return self._growth(is_rate=token == "rate")  # noqa: S105
        if not re.match(r"[a-zA-Z_]", token) or self.next == "(":
            raise ValueError(f"no metric and no function of an alert: {token!r}")
        found = self._selected(token)
        return lambda now_s: {
            labels: values[-1] for labels, series in found if (values := series.within(now_s - _LOOKBACK_S, now_s)[1])
        }

    def _sum(self) -> Node:
        self._take("by")
        self._take("(")
        kept = {self._take()}
        while self._take(",", ")") == ",":
            kept.add(self._take())
        self._take("(")
        inner = self.binary()
        self._take(")")

        def total(now_s: float) -> Vector:
            sums: defaultdict[Labels, float] = defaultdict(float)
            for labels, value in _vector(inner(now_s)).items():
                sums[frozenset(each for each in labels if each[0] in kept)] += value
            return dict(sums)

        return total

    def _growth(self, *, is_rate: bool) -> Node:
        self._take("(")
        found = self._selected(self._take())
        range_s = seconds(self._take().strip("[]"))
        offset_s = seconds(self._take()) if self.next == "offset" and self._take() else 0.0
        self._take(")")

        def grown(now_s: float) -> Vector:
            end_s = now_s - offset_s
            start_s = end_s - range_s
            values = {
                _nameless(labels): increase(*series.within(start_s, end_s), start_s, end_s) for labels, series in found
            }
            return {
                labels: value / range_s if is_rate else value for labels, value in values.items() if value is not None
            }

        return grown

    def _selected(self, metric: str) -> list[tuple[Labels, Series]]:
        tests: list[tuple[str, str, str]] = []
        if self.next == "{":
            while self._take("{", ",", "}") != "}":
                tests.append((self._take(), self._take("=", "=~"), self._take().strip('"')))
        return [
            (labels, series)
            for labels, series in self._store.items()
            if (NAME, metric) in labels and all(_matches(dict(labels), *each) for each in tests)
        ]


def _matches(labels: Mapping[str, str], label: str, sign: str, text: str) -> bool:
    value = labels.get(label, "")
    return value == text if sign == "=" else re.fullmatch(text, value) is not None


def _nameless(labels: Labels) -> Labels:
    return frozenset(each for each in labels if each[0] != NAME)


def _vector(value: Vector | float) -> Vector:
    if isinstance(value, float):
        raise ValueError(f"must be a vector, got {value}")
    return value


def _divided(left: float, right: float) -> float:
    return left / right if right else float("nan") if left == 0 else float("inf")


def _combined(sign: str, left: Node, right: Node) -> Node:
    """A binary operation; series of two vectors are matched one to one."""

    def combined(now_s: float) -> Vector | float:
        one, other = left(now_s), right(now_s)
        if sign in ("and", "or"):
            one, other = _vector(one), _vector(other)
            theirs, ours = ({_nameless(each) for each in side} for side in (other, one))
            if sign == "and":
                return {labels: value for labels, value in one.items() if _nameless(labels) in theirs}
            return one | {labels: value for labels, value in other.items() if _nameless(labels) not in ours}
        return _compared(sign, one, other) if sign in _COMPARISONS else _computed(sign, one, other)

    return combined


def _pairs(one: Vector | float, other: Vector | float) -> Iterator[tuple[Labels, float, float]]:
    """Labels of the result, and both numbers."""
    if isinstance(one, float):
        yield from ((labels, one, value) for labels, value in _vector(other).items())
    elif isinstance(other, float):
        yield from ((labels, value, other) for labels, value in one.items())
    else:
        theirs = {_nameless(labels): value for labels, value in other.items()}
        if len(theirs) < len(other):
            raise ValueError("several series of one side have the same labels")
        for labels, value in one.items():
            if _nameless(labels) in theirs:
                yield labels, value, theirs[_nameless(labels)]


def _compared(sign: str, one: Vector | float, other: Vector | float) -> Vector:
    holds = _COMPARISONS[sign]
    is_reversed = isinstance(one, float)
    return {labels: right if is_reversed else left for labels, left, right in _pairs(one, other) if holds(left, right)}


def _computed(sign: str, one: Vector | float, other: Vector | float) -> Vector | float:
    compute = _divided if sign == "/" else _ARITHMETIC[sign]
    if isinstance(one, float) and isinstance(other, float):
        return float(compute(one, other))
    return {_nameless(labels): compute(left, right) for labels, left, right in _pairs(one, other)}


@dataclass(frozen=True, slots=True)
class Firing:
    """An alert that fires."""

    at_s: float
    """When it began to."""
    labels: Mapping[str, str]


def firings(expression: str, for_s: float, store: Store, times_s: Iterable[float]) -> list[Firing]:
    """The alerts of a rule that is evaluated at these times: one for each series whose expression held for so long."""
    node = parse(expression, store)
    active: dict[Labels, float] = {}
    fired: dict[Labels, Firing] = {}
    for now_s in times_s:
        found = {_nameless(labels) for labels in _vector(node(now_s))}
        active = {labels: active.get(labels, now_s) for labels in found}
        for labels, since_s in active.items():
            if now_s - since_s >= for_s and labels not in fired:
                fired[labels] = Firing(now_s, dict(labels))
    return list(fired.values())
