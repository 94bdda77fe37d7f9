"""A forecast of uses, kept up to date by what a cache does.

It follows every state from when it is left, in its role and with its traits (`traits.py`), through uses and
evictions. An evicted end is followed as long as its ghost is remembered: a request that would have started from it ends
its life in a use, so that what was evicted too early is noticed. A state on the way leaves no ghost of its own, and its
life is cut off when it is evicted; so is that of a ghost whose KV is held again for the sake of something deeper. That
a ghost was forgotten is not said, so a tree should remember more ghosts than there are lives here.

Rates are fitted at the arrivals in `FIRST_FITS` and then every `ARRIVALS_A_FIT`, from the last `MAX_LIVES` lives; the
cost per request is constant. The caller's clock is the only one.

It also knows how far before its end a path is left, where a second state is worth having. A prompt that shares all but
the end of an earlier one (the same document, another question; a template whose last lines are dropped) finds no state
where it leaves that path, for none stood there the first time. If such distances repeat, a state kept `distance_tokens`
before the end, a *guard*, would have served.

A loss is (d, t): a prompt left a path d tokens before the path's next state and had to compute t tokens of what it
shared. A guard at distance g would have saved t - (g - d) of it if d <= g < d + t. The distance is the g, of those
seen, that would have saved most over the window; the gain is what it would have saved a request.

Losses are counted as if no guards were there, or a good guard would take away the reason for itself: one that a guard
has saved is a loss all the same.
"""

from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Final

import numpy as np

from marconi.policy.eviction.base import NodeView
from marconi.policy.forecast.hazard import Floats, HazardModel, Lives, waiting_index
from marconi.policy.forecast.traits import NUM_LEVELS, SHAPE, Role, Traits, stratum_of, traits_of
from marconi.policy.request import Lease

WINDOW_REQUESTS: Final = 2048
MAX_LOSSES: Final = 512
"""Where there are more, the window is as much shorter."""
MAX_DISTANCES: Final = 64
"""Distances tried, the shortest first: a state far from the end is a branch point's business."""
REQUESTS_A_CHOICE: Final = 64


class DivergenceWindow:
    """The losses of the last requests, and the guard that would have saved most of them."""

    __slots__ = ("_losses", "_num_requests", "distance_tokens", "gain_tokens")

    def __init__(self) -> None:
        self._losses: deque[tuple[int, int, int]] = deque(maxlen=MAX_LOSSES)
        self._num_requests = 0
        self.distance_tokens = 0
        """Where a guard should stand, before the end; 0 while none is worth it."""
        self.gain_tokens = 0.0
        """Tokens a request that such guards would have saved."""

    def observe(self, distance_tokens: int, lost_tokens: int) -> None:
        """A request came; it left a known path `distance_tokens` before its next state, 0 if it did not."""
        self._num_requests += 1
        if distance_tokens > 0 and lost_tokens > 0:
            self._losses.append((self._num_requests, distance_tokens, lost_tokens))
        if self._num_requests % REQUESTS_A_CHOICE == 0:
            self._choose()

    def _choose(self) -> None:
        losses = self._losses
        num_requests = min(self._num_requests, WINDOW_REQUESTS)
        while losses and losses[0][0] <= self._num_requests - num_requests:
            losses.popleft()
        self.distance_tokens, self.gain_tokens = 0, 0.0
        if losses:
            if len(losses) == MAX_LOSSES:
                num_requests = self._num_requests + 1 - losses[0][0]
            _, distances, lost = np.array(losses).T
            guards = np.unique(distances)[:MAX_DISTANCES]
            further = guards[:, None] - distances
            saved = np.where((further >= 0) & (further < lost), lost - further, 0).sum(axis=1)
            best = int(saved.argmax())
            self.distance_tokens = int(guards[best])
            self.gain_tokens = int(saved[best]) / num_requests


MAX_LIVES: Final = 16_384
MAX_TRAITS: Final = 131_072
ARRIVALS_A_FIT: Final = 128
FIRST_FITS: Final = frozenset({32, 64, 96, 192, 320, 448})

_PASSED: Final = stratum_of(Role.PASSED, 0)
_WAYPOINT: Final = stratum_of(Role.WAYPOINT, 0)
_BRANCH: Final = stratum_of(Role.BRANCH, 0)
_NO_TRAITS: Final = Traits(0.0, None, 0, (0,) * len(NUM_LEVELS))


class Forecast:
    """At what rate states will be used, and how far before the end paths are left."""

    def __init__(self) -> None:
        self.divergence = DivergenceWindow()
        self._model = HazardModel(SHAPE)
        self._lives = Lives(MAX_LIVES, len(NUM_LEVELS))
        self._traits: OrderedDict[int, Traits] = OrderedDict()
        """Traits by serial; the longest unused first."""
        self._waypoints: dict[int, tuple[int, int]] = {}
        """Of each state left on the way, by serial: for a guard the depth of the state above it and the tokens to the
        end, when it was left; for a branch point, which is no reason for a guard, its own depth and 0."""
        self._passed: set[int] = set()
        """Serials of states with traits from which something has gone on since a request last ended there."""
        self._num_arrivals = 0
        self.index: Floats = waiting_index(self._model.baseline)
        """Uses per second worth waiting for, [stratum, age bin]."""

    def arrived(self, lease: Lease, now_s: float) -> None:
        """A request has been looked up."""
        self._num_arrivals += 1
        if self._num_arrivals in FIRST_FITS or self._num_arrivals % ARRIVALS_A_FIT == 0:
            self._model.fit(self._lives, now_s)
            self.index = waiting_index(self._model.baseline)
        self._observe_divergence(lease)
        for used in (lease.missed, lease.source):
            if used is not None:
                self._lives.end(used.serial, now_s, used=True)
                if used.serial in self._traits:
                    self._traits.move_to_end(used.serial)

    def left(self, nodes: Sequence[NodeView], lease: Lease, now_s: float) -> None:
        """A request has left states at `nodes`, in rising depth."""
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
                self._waypoints[serial] = (node.checkpoint_depth_above, end - depth)
            else:
                self._waypoints[serial] = (depth, 0)
        while len(traits) > MAX_TRAITS:
            forgotten, _ = traits.popitem(last=False)
            self._passed.discard(forgotten)

    def gone(self, node: NodeView, now_s: float) -> None:
        """The state of `node` is gone or about to go; of an end the ghost will tell whether it is missed."""
        self._waypoints.pop(node.serial, None)
        if node.num_children:
            self._lives.end(node.serial, now_s)

    def standing(self, node: NodeView, now_s: float) -> tuple[int, float]:
        """The stratum of a held state and the weight of its rate.

        Begins a life if none goes on in that stratum; a remnant has none.
        """
        serial = node.serial
        traits = self._traits.get(serial, _NO_TRAITS)
        levels = traits.levels
        stratum = self._stratum(node, traits)
        if serial in self._passed and not node.num_proven_children:
            self._lives.end(serial, now_s)
        elif self._lives.stratum(serial) != stratum:
            self._lives.begin(serial, stratum, levels, now_s)
        return stratum, self._model.weight(stratum, levels)

    def _traits_before(self, lease: Lease) -> Traits | None:
        """Find the traits of the state that the request went on from, or would have; a ghost need not have had one."""
        for node in (lease.missed, lease.source):
            if node is not None and node.serial in self._traits:
                return self._traits[node.serial]
        return None

    def _stratum(self, node: NodeView, traits: Traits) -> int:
        """Choose the stratum of a state by its role."""
        serial, num_children = node.serial, node.num_proven_children
        if not num_children:
            return traits.rhythm
        if traits is not _NO_TRAITS:
            self._passed.add(serial)
        if num_children > 1:
            return _BRANCH
        return _WAYPOINT if serial in self._waypoints else _PASSED

    def _observe_divergence(self, lease: Lease) -> None:
        request, match = lease
        seen = min(match.num_seen_tokens, request.num_prompt_tokens - 1)
        above, to_end = self._waypoints.get(match.checkpoint.serial, (match.checkpoint.depth, 0))
        distance = 0
        if match.num_span_tokens_left:
            distance = match.num_span_tokens_left + match.num_seen_tokens - seen
        elif match.diverges and seen == match.checkpoint.depth:
            distance = to_end
        left_by = match.last.left_by
        if distance and left_by is not None and left_by.num_prompt_tokens > seen:
            # A server's guard stands before the end of its prompt, whatever state is the path's next.
            distance = left_by.num_prompt_tokens - seen
        self.divergence.observe(distance, seen - above)
