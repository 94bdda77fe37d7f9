"""A forecast of uses, kept up to date by what a cache does.

It follows every state from when it is left, in its role (`roles.py`), with its traits (`traits.py`), through uses and
evictions. An evicted end is followed as long as its ghost is remembered: a request that would have started from it ends
its life in a use, so that what was evicted too early is noticed. A state on the way leaves no ghost of its own, and its
life is cut off when it is evicted; so is that of a ghost whose KV is held again for the sake of something deeper. That
a ghost was forgotten is not said, so a tree should remember more ghosts than there are lives here.

Rates are fitted at the arrivals in `FIRST_FITS` and then every `ARRIVALS_A_FIT`, from the last `MAX_LIVES` lives; the
cost per request is constant. The caller's clock is the only one.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from marconi.policy.eviction.base import NodeView
from marconi.policy.forecast.ages import Floats
from marconi.policy.forecast.divergence import DivergenceWindow
from marconi.policy.forecast.gittins import waiting_index
from marconi.policy.forecast.hazard import HazardModel
from marconi.policy.forecast.lives import Lives
from marconi.policy.forecast.roles import SHAPE, Role, stratum_of
from marconi.policy.forecast.traits import NUM_LEVELS, Traits, traits_of
from marconi.policy.request import Lease

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
        """By serial; the longest unused first."""
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
        """Of the state that the request went on from, or would have; a ghost need not have had one."""
        for node in (lease.missed, lease.source):
            if node is not None and node.serial in self._traits:
                return self._traits[node.serial]
        return None

    def _stratum(self, node: NodeView, traits: Traits) -> int:
        """As `stratum_of` its role."""
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
