"""A forecast of the uses of states, updated at every arrival, use and eviction.

It follows every state from when it is left, in its role and with its traits, through uses and evictions (`Lives`). An
evicted end is followed as long as its ghost is remembered: a request that would have started from it ends its life in a
use, so that premature evictions are noticed. A state on the way leaves no ghost of its own, and its life is cut
off when it is evicted; so is that of a ghost whose KV is held again for the sake of something deeper. That a ghost was
forgotten is not said, so a tree should remember more ghosts than there are lives here.

Rates are fitted to the last `MAX_LIVES` lives as they are at the arrivals in `FIRST_FITS` and then at every
`ARRIVALS_A_FIT`. Above `WHOLE_FIT_LIVES`, a fit takes a step at each arrival, the first at its own, and the rates
change after its last, so no arrival waits for a long fit and every rank changes its rates at the same request. The cost
per request is constant. The caller's clock is the only one.

A state's *traits* are what is known of it when it is left, in levels of a few factors:

- `known`: how much of its path had been seen before: nothing beyond the first `SHORT_TOKENS` (a system prompt that
  everyone shares says little), else by octaves of the part that was new.
- `new`: tokens of the path that were new, in octaves. A conversation grows by little, a document is new as a whole.
- `length`: tokens of the path, in octaves.
- `answer`: tokens of the output, in octaves.
- `turn`: how many states precede it, each started from the last.

and apart from these the *rhythm*: the octave of the time between the conversation's requests so far, halving the
weight of the past with each. It chooses the baseline rather than multiply it, for it says not whether but when.

Its *role* is its use to later requests (`policy/base.py`). The role decides how a state is used, so each role has its
own rates. The states that a prompt leaves near its end wait for a request that continues it, at a rate that depends on
the conversation's rhythm, so every rhythm is a stratum of its own. They wait for the same request, so the last of them
has the life, which ends in a use wherever near its end the prompt is left, and each has its share of the rate
(`turns.py`). Once that has happened they are passed: one is used again only if a request returns to it. A stop on the
way was left there on purpose (a guard). A branch point serves every request that passes: where prompts parted before,
or where several paths continue now; not where a conversation leaves its last prompt, as its template always does.

Where all continuations of a state are evicted, it is a *remnant*, the rest of a path. It waits as the end did, and is
ranked as one; but it has no life of its own. A path that is evicted state by state would leave one life after the
other, most of them unused, and among the lives of ends they would make it seem that no conversation comes back.
"""

import math
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np

from marconi.policy.base import NodeView, PlannedState, Role
from marconi.policy.forecast.hazard import Floats, HazardModel, Observations, Shape, rounded, waiting_index
from marconi.policy.forecast.turns import DivergenceWindow, Turns, end_below
from marconi.policy.request import Lease, Request

SHORT_TOKENS: Final = 512
NUM_RHYTHMS: Final = 7
"""None yet, and octave pairs of seconds: up to 4, 16, 64, 256, 1024, and beyond."""
NUM_LEVELS: Final = (8, 10, 12, 8, 5)
"""The number of levels of `known`, `new`, `length`, `answer` and `turn`."""


class Traits(NamedTuple):
    """The traits of a state when it was left."""

    left_s: float
    log2_gap: float | None
    """log2 of the usual seconds between the requests of its conversation; None for a first one."""
    turn: int
    levels: tuple[int, ...]
    rhythm: int = 0
    """The level of the usual time."""


def traits_of(request: Request, depth: int, num_seen_tokens: int, before: Traits | None, now_s: float) -> Traits:
    """Describe a state at `depth` tokens that `request` leaves, whose path was seen for `num_seen_tokens` tokens.

    `before` are the traits of the state that the request resumed from, or would have, were it still held.
    """
    seen = min(num_seen_tokens, depth)
    if before is None:
        log2_gap, turn = None, 0
    else:
        gap = math.log2(max(now_s - before.left_s, 1.0))
        log2_gap = gap if before.log2_gap is None else 0.5 * (gap + before.log2_gap)
        turn = before.turn + 1
    known = 0 if seen <= SHORT_TOKENS else 1 + min(6, int(-math.log2(max(1.0 - seen / depth, 1 / 64))))
    levels = (
        known,
        # An octave is a bit length: 0 below 1, then 1 for each factor of two.
        min(((depth - seen) // 64).bit_length(), NUM_LEVELS[1] - 1),
        min((depth // 256).bit_length(), NUM_LEVELS[2] - 1),
        min((request.num_output_tokens // 16).bit_length(), NUM_LEVELS[3] - 1),
        min(turn, NUM_LEVELS[4] - 1),
    )
    rhythm = 0 if log2_gap is None else 1 + min(NUM_RHYTHMS - 2, int(log2_gap / 2))
    return Traits(now_s, log2_gap, turn, levels, rhythm)


SHAPE: Final = Shape(
    group_of=(Role.END,) * NUM_RHYTHMS + (Role.PASSED, Role.WAYPOINT, Role.BRANCH),
    group_priors=(0.3, 0.03, 0.03, 0.6),
    num_levels=NUM_LEVELS,
)
"""Ends by rhythm first, then a stratum for each other role."""

NUM_STRATA: Final = len(SHAPE.group_of)


def stratum_of(role: Role, rhythm: int) -> int:
    """The stratum of a state."""
    return rhythm if role is Role.END else NUM_RHYTHMS - 1 + role


MAX_LIVES: Final = 16_384
WHOLE_FIT_LIVES: Final = 4096
"""A fit to so many lives takes about a millisecond."""
MAX_TRAITS: Final = 131_072
ARRIVALS_A_FIT: Final = 128
FIRST_FITS: Final = frozenset({16, 24, 32, 48, 64, 96, 192, 320, 448})

_PASSED: Final = stratum_of(Role.PASSED, 0)
_WAYPOINT: Final = stratum_of(Role.WAYPOINT, 0)
_BRANCH: Final = stratum_of(Role.BRANCH, 0)
_NO_TRAITS: Final = Traits(0.0, None, 0, (0,) * len(NUM_LEVELS))


class Lives:
    """A ring of the last `capacity` lives, at most one unfinished for each state; the oldest is overwritten.

    It is written a life at a time, for which the standard library's arrays are quicker than numpy's; a fit reads them
    in place. A state is known by the serial of its node, so that a life keeps no node, and nothing of its span, in
    memory.
    """

    __slots__ = ("_next", "_num_factors", "_serials", "began_s", "ended_s", "going_on", "levels", "strata", "used")

    def __init__(self, capacity: int, num_factors: int) -> None:
        """`ValueError` for a capacity below 1. A life has a level, 0 to 255, of each of `num_factors` factors."""
        if capacity < 1:
            raise ValueError(f"capacity must be >= 1 life, got {capacity}")
        self.strata = array("q", bytes(8 * capacity))
        self.levels = bytearray(capacity * num_factors)
        self.began_s = array("d", bytes(8 * capacity))
        self.ended_s = array("d", [math.nan]) * capacity
        self.used = bytearray(capacity)
        self._num_factors = num_factors
        self._serials: list[int | None] = [None] * capacity
        """Serial of the state whose unfinished life is in each slot."""
        self.going_on: dict[int, tuple[int, int]] = {}
        """The slot and the stratum of each unfinished life, by serial."""
        self._next = 0

    def __len__(self) -> int:
        return min(self._next, len(self._serials))

    def begin(self, serial: int, stratum: int, levels: Sequence[int], now_s: float) -> None:
        """A life of a state begins; an unfinished one ends unused."""
        if serial in self.going_on:
            self.end(serial, now_s)
        slot = self._next % len(self._serials)
        self._next += 1
        oldest = self._serials[slot]
        if oldest is not None:
            del self.going_on[oldest]
        self.strata[slot] = stratum
        first = slot * self._num_factors
        self.levels[first : first + self._num_factors] = bytes(levels)
        self.began_s[slot] = now_s
        self.ended_s[slot] = math.nan
        self.used[slot] = False
        self._serials[slot] = serial
        self.going_on[serial] = slot, stratum

    def end(self, serial: int, now_s: float, *, used: bool = False) -> None:
        """The unfinished life of a state, if there is one, ends."""
        going_on = self.going_on.pop(serial, None)
        if going_on is not None:
            slot = going_on[0]
            self.ended_s[slot] = now_s
            self.used[slot] = used
            self._serials[slot] = None

    def seen(self, now_s: float) -> Observations:
        """Every life, as it is at `now_s`, until the next report."""
        num, num_factors = len(self), self._num_factors
        began_s, ended_s = np.frombuffer(self.began_s)[:num], np.frombuffer(self.ended_s)[:num]
        ages_s = np.maximum(np.where(np.isnan(ended_s), now_s, ended_s) - began_s, 1e-3)
        levels = np.frombuffer(self.levels, np.uint8)[: num * num_factors].reshape(num, num_factors)
        strata, used = np.frombuffer(self.strata, np.int64), np.frombuffer(self.used, np.bool_)
        return Observations(strata[:num], levels.astype(np.int64), used[:num], ages_s)


class Forecast:
    """At what rate states will be used, and how far before the end paths are left."""

    def __init__(self, turns: Turns | None = None) -> None:
        """The driver of the tree reports requests to `turns`."""
        self.turns = turns or Turns()
        self.divergence = DivergenceWindow()
        self._model = HazardModel(SHAPE)
        self._fit: Iterator[None] = iter(())
        """The steps that are left of the fit."""
        self._weights: dict[tuple[int, tuple[int, ...]], float] = {}
        """By stratum and levels, since the last fit."""
        self._lives = Lives(MAX_LIVES, len(NUM_LEVELS))
        self._traits: OrderedDict[int, Traits] = OrderedDict()
        """Traits by serial; the longest unused first."""
        self._waypoints: dict[int, tuple[int, int]] = {}
        """States left on the way, by serial: for a guard the depth of the state above it and the tokens to the end when
        it was left; for a branch point, which is no reason for a guard, its own depth and 0."""
        self._passed: set[int] = set()
        """Serials of states with traits that were continued since a request last ended there."""
        self._branches: set[int] = set()
        """Serials of states left where several prompts part."""
        self._num_arrivals = 0
        self.now_s = 0.0
        """The time of the last report, by the rule of either tier."""
        self.index: Floats = waiting_index(self._model.baseline)
        """Uses per second worth waiting for, [stratum, age bin]; a fit replaces it."""
        self.log2_index = rounded(np.log2(self.index))

    def arrived(self, lease: Lease, now_s: float) -> None:
        """A request has been looked up."""
        self.now_s = now_s
        self._num_arrivals += 1
        if self._num_arrivals in FIRST_FITS or self._num_arrivals % ARRIVALS_A_FIT == 0:
            self._fit = self._fitted(self._lives.seen(now_s))
            if len(self._lives) <= WHOLE_FIT_LIVES:
                for _ in self._fit:
                    pass
        next(self._fit, None)
        self._observe_divergence(lease)
        last = lease.match.last
        left = end_below(last) if last.left_by is not None and self.turns.distance(lease) is not None else None
        for used in (lease.match.ghost, lease.match.source, left):
            if used is not None:
                if used.serial in self._lives.going_on:
                    self._lives.end(used.serial, now_s, used=True)
                if used.serial in self._traits:
                    self._traits.move_to_end(used.serial)

    def _fitted(self, seen: Observations) -> Iterator[None]:
        yield from self._model.fit(seen)
        self._weights.clear()
        self.index = waiting_index(self._model.baseline)
        self.log2_index = rounded(np.log2(self.index))

    def left(self, nodes: Sequence[NodeView], lease: Lease, now_s: float) -> None:
        """A request has left states at `nodes`, in rising depth; those on trial have no part in it."""
        self.now_s = now_s
        nodes = [node for node in nodes if not node.on_trial]
        before = self._traits_before(lease)
        request, traits, num_seen_tokens = lease.request, self._traits, lease.match.num_seen_tokens
        end = nodes[-1].depth if nodes else 0
        for node in nodes:
            serial, depth = node.serial, node.depth
            traits[serial] = traits_of(request, depth, num_seen_tokens, before, now_s)
            traits.move_to_end(serial)
            if depth == end:
                self._waypoints.pop(serial, None)
                self._passed.discard(serial)
            elif depth > num_seen_tokens:
                self._waypoints[serial] = (node.lasting_depth_above, end - depth)
            else:
                self._waypoints[serial] = (depth, 0)
                if self.turns.parts_at(lease, depth):
                    self._branches.add(serial)
        while len(traits) > MAX_TRAITS:
            forgotten, _ = traits.popitem(last=False)
            self._passed.discard(forgotten)

    def gone(self, node: NodeView, now_s: float) -> None:
        """The state of `node` is evicted; of an end the ghost will show whether it is missed."""
        serial = node.serial
        self._waypoints.pop(serial, None)
        self._branches.discard(serial)
        if serial in self._lives.going_on and node.num_children:
            self._lives.end(serial, now_s)

    def standing(self, node: NodeView, now_s: float) -> tuple[int, float]:
        """The stratum of a held state and the weight of its rate.

        Begins a life if there is none unfinished in that stratum; a remnant has none, nor has any but the last state of
        a prompt.
        """
        serial, left_by = node.serial, node.left_by
        traits = self._traits.get(serial, _NO_TRAITS)
        levels = traits.levels
        if left_by is not None and left_by.is_open:
            below = node.state_below if node.num_children else None
            is_last = below is None or below.left_by is not left_by
            share = self.turns.share(left_by, node.depth, None if is_last or below is None else below.depth)
            stratum = traits.rhythm
            if not is_last and traits is not _NO_TRAITS:
                self._passed.add(serial)
            has_life = is_last and serial not in self._passed
        else:
            share, num_children = 1.0, node.num_proven_children
            if num_children and traits is not _NO_TRAITS:
                self._passed.add(serial)
            if num_children > 1 or serial in self._branches:
                stratum = _BRANCH
            elif not num_children:
                stratum = _PASSED if node.is_passed_over else traits.rhythm
            else:
                stratum = _WAYPOINT if serial in self._waypoints else _PASSED
            has_life = num_children > 0 or serial not in self._passed
        going_on = self._lives.going_on.get(serial)
        if has_life:
            if going_on is None or going_on[1] != stratum:
                self._lives.begin(serial, stratum, levels, now_s)
        elif going_on is not None:
            self._lives.end(serial, now_s)
        weight = self._weights.get((stratum, levels))
        return stratum, (self.weight(stratum, levels) if weight is None else weight) * share

    def weight(self, stratum: int, levels: tuple[int, ...]) -> float:
        """The product of the factors of a state with these traits."""
        weight = self._weights.get((stratum, levels))
        if weight is None:
            weight, group = 1.0, SHAPE.group_of[stratum]
            for multipliers, level in zip(self._model.multipliers, levels, strict=True):
                weight *= multipliers[group][level]
            self._weights[stratum, levels] = weight
        return weight

    def expected(self, planned: PlannedState, now_s: float) -> tuple[int, float]:
        """The stratum and the weight of a planned state, without its share."""
        lease = planned.lease
        traits = traits_of(lease.request, planned.depth, lease.match.num_seen_tokens, self._traits_before(lease), now_s)
        stratum = stratum_of(planned.role, traits.rhythm)
        return stratum, self.weight(stratum, traits.levels)

    def _traits_before(self, lease: Lease) -> Traits | None:
        """Find the traits of the state that the request resumed from, or would have; a ghost need not have had one."""
        match, traits = lease.match, self._traits
        missed = None if match.ghost is None else traits.get(match.ghost.serial)
        return missed or traits.get(match.checkpoint.serial)

    def _observe_divergence(self, lease: Lease) -> None:
        request, match = lease
        seen = min(match.num_seen_tokens, request.num_prompt_tokens - 1)
        start = match.checkpoint
        above, to_end = self._waypoints.get(start.serial, (start.depth, 0))
        if start.on_trial:
            above = start.lasting_depth_above
        distance, last = 0, match.last
        while last.on_trial and len(last.live_children) == 1:
            (last,) = last.live_children
        if match.num_span_tokens_left:
            distance = match.num_span_tokens_left + match.num_seen_tokens - seen + last.depth - match.last.depth
        elif match.diverges and seen == match.checkpoint.depth:
            distance = to_end
        left_by = last.left_by
        if distance and left_by is not None and left_by.num_prompt_tokens > seen:
            # A server's guard stands before the end of its prompt, whatever state is the path's next.
            distance = left_by.num_prompt_tokens - seen
        self.divergence.observe(distance, seen - above)
