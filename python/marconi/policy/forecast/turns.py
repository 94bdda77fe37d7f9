"""Where later prompts leave an earlier one: which of its states the next turn will start from.

A prompt ends in the template's invitation to answer, and how much of that the next turn's prompt repeats, and whether
it repeats the answer as it was, is the template's affair. A reasoning model's, whose thinking is dropped:

    prompt   <user> Why? </user> <assistant> <think>
    answer                                           Because. </think> So it is. </assistant>
    next     <user> Why? </user> <assistant> So it is. </assistant> <user> And? </user> <assistant> <think>
                                            ^ goes on from here: a distance of 1 token before the prompt's end

So the *distance* at which a path is left first, in tokens before the end of the prompt that made it, is counted: 0 for
what goes on from the end of the answer, 1 for a repeat of the prompt, and up to `MAX_DISTANCE` and half of the prompt;
further back it is a branch point's or a guard's business. The last `WINDOW` distances count, of each name space, and
apart for prompts that went on from an answer themselves (the steps of an agent within a turn, whose thinking stays) and
for others; a name space with fewer than `MIN_OWN` goes by what all of them did. Added to these, until they are
outnumbered:

    one at 0 and a little less at 1     if nothing is known of the template
    two at the distance                 if the template is known (`engine/chat_template.py`)

With n(d) of n in all at distance d, of which m are beyond 0:

    kept          d >= 1 with n(d) >= max(2, n / 4), the two commonest
    on probation  other d >= 1 with n(d) >= m / 4, two of both kinds in all; d = 1 if that leaves none
    cold          for the first `COLD_REQUESTS`, before much can have been seen, also those of `COLD_DISTANCES` that lie
                  further back, on probation, where they give away no more than an eighth of what is computed
    the end       is on probation if n(0) < n / 4

Whether an answer is gone on from can be told from how it *closed*: a tool call, whose thinking stays until its result
is answered, ends in a token of its own, and whoever thought before an answer loses the thinking with the next turn. So
of each closing (`closing_of`) that was seen `MIN_CLOSINGS` times it is counted by itself whether it was gone on from or
left, and the end of an answer that closes so is on probation if fewer than a quarter were.

Where the distance repeats that is no template's (the same document, another question), no state stands where a prompt
leaves the path: one kept that far before each end, a *guard*, would have served.

A loss is (d, t): a prompt left a path d tokens before the path's next state and had to compute t tokens of what it
shared. A guard at distance g would have saved t - (g - d) of it if d <= g < d + t. The distance is the g, of those
seen, that would have saved most over the window; the gain is what it would have saved a request.

Losses are counted as if no guards were there, or a good guard would take away the reason for itself: one that a guard
has saved is a loss all the same.
"""

from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from marconi.policy.request import Lease
from marconi.tree import LeftBy, Node

MAX_DISTANCE: Final = 64
"""Tokens."""
WINDOW: Final = 64
"""Requests."""
MIN_OWN: Final = 8
MAX_POSITIONS: Final = 2
COLD_REQUESTS: Final = 64
COLD_DISTANCES: Final = (16, 64)
"""Few invitations are longer than the one, few questions about a document than the other."""
MIN_CLOSINGS: Final = 4
NO_CLOSING: Final = -1
"""Of an answer of which it is not known."""
MAX_NAMESPACES: Final = 4096
MAX_CLOSINGS: Final = 4096
_UNKNOWN: Final = {0: 1.0, 1: 0.9}
"""What was seen once outweighs what was only assumed."""
_SHARE: Final = 1 / 4
_COLD_SHARE: Final = 1 / 8
_MIN_SEEN: Final = 2
_MAX_STEPS: Final = 64
_GONE_ON, _LEFT = 0, 1


class NextTurn(NamedTuple):
    """Where a prompt will be gone on from, in tokens before its end, the likeliest first."""

    kept: tuple[int, ...] = ()
    """Likely enough for a state like any other."""
    on_probation: tuple[int, ...] = ()
    is_end_on_probation: bool = False
    """Whether few go on from the end of the answer."""


class Turns:
    """Counts where paths are left, and says where the next one will be."""

    def __init__(self, unit_tokens: int = 1, cold_requests: int = COLD_REQUESTS) -> None:
        """`unit_tokens` are a page's: a path is known to be left within one of them, and the end of it counts."""
        self._unit_tokens = unit_tokens
        self._cold_requests = cold_requests
        self._closings: OrderedDict[int, _Window] = OrderedDict()
        """What became of answers, by how they closed; the longest unseen first."""
        self._num_arrivals = 0
        self._all = {False: _Window(), True: _Window()}
        self._of: OrderedDict[tuple[int, bool], _Window] = OrderedDict()
        """Distances by namespace, and by whether the prompts went on from an answer; the longest unused first."""

    def arrived(self, lease: Lease) -> None:
        """A request has been looked up, and what it found is as it was."""
        self._num_arrivals += 1
        left_by = lease.match.last.left_by
        distance = self.distance(lease)
        if left_by is None or distance is None:
            return
        self._observe_closing(lease.match.last, distance)
        key = lease.request.namespace, left_by.went_on
        window = self._of.get(key)
        if window is None:
            window = self._of[key] = _Window()
            if len(self._of) > MAX_NAMESPACES:
                self._of.popitem(last=False)
        else:
            self._of.move_to_end(key)
        window.add(distance)
        self._all[left_by.went_on].add(distance)

    def is_end_on_probation(self, expected: bool, closing: int) -> bool:
        """True if few go on from an answer that closed so; as its prompt's `NextTurn` expects if too few were seen."""
        window = self._closings.get(closing)
        if closing == NO_CLOSING or window is None or len(window) < MIN_CLOSINGS:
            return expected
        return window.counts.get(_GONE_ON, 0) < _SHARE * len(window)

    def next_turn(self, lease: Lease, known_distance: int | None = None) -> NextTurn:
        """Where the prompt of `lease` will be gone on from; `known_distance` is what its template says."""
        went_on = self.distance(lease) == 0
        window = self._of.get((lease.request.namespace, went_on))
        if window is None or len(window) < MIN_OWN:
            window = self._all[went_on]
        turn = _next_turn(window.counts, _UNKNOWN if known_distance is None else {known_distance: 2.0})
        if self._num_arrivals > self._cold_requests:
            return turn
        num_new_tokens = lease.request.num_prompt_tokens - lease.match.checkpoint.depth
        furthest = max((*turn.kept, *turn.on_probation), default=0)
        further = [each for each in COLD_DISTANCES if furthest < each <= _COLD_SHARE * num_new_tokens]
        return turn._replace(on_probation=(*turn.on_probation, *further))

    def note(self, nodes: Sequence[Node], lease: Lease, closing: int = NO_CLOSING) -> None:
        """A request has left states at `nodes`: those near the end of its prompt, or beyond, are noted as its own."""
        num_prompt_tokens = lease.request.num_prompt_tokens
        left_by = LeftBy(num_prompt_tokens, self.distance(lease) == 0, closing)
        for node in nodes:
            if node.depth > num_prompt_tokens - MAX_DISTANCE - self._unit_tokens:
                node.left_by = left_by

    def distance(self, lease: Lease) -> int | None:
        """How far before an earlier prompt's end the request leaves it, in tokens; 0 if it goes on from the answer.

        None if no prompt ended near, or if the place has been left before: the first who leaves it goes on from that
        prompt, others may have no more than a beginning in common with it.
        """
        request, match = lease
        last = match.last
        if last.left_by is None:
            return None
        end = last.left_by.num_prompt_tokens
        seen = min(match.num_seen_tokens, request.num_prompt_tokens - 1)
        if not match.num_span_tokens_left:
            if end <= last.depth <= seen:
                return 0
            if len(last.children) > 1:
                return None
        distance = max(end - seen - self._unit_tokens + 1, 1)
        return distance if distance <= min(MAX_DISTANCE, end // 2) else None

    def _observe_closing(self, last: Node, distance: int) -> None:
        """Count how the answer closed that was gone on from, or the last one below where its prompt was left."""
        end, num_steps = last, 0
        while distance and len(end.children) == 1 and num_steps < _MAX_STEPS:
            (end,) = end.children.values()
            num_steps += 1
        if end.left_by is None or end.left_by.closing == NO_CLOSING or (distance and end.children):
            return
        window = self._closings.setdefault(end.left_by.closing, _Window())
        self._closings.move_to_end(end.left_by.closing)
        window.add(_LEFT if distance else _GONE_ON)
        if len(self._closings) > MAX_CLOSINGS:
            self._closings.popitem(last=False)


def closing_of(token_id: int, *, thought: bool = False) -> int:
    """The closing of an answer whose last token but one is `token_id`, with or without reasoning before it."""
    return 2 * token_id + thought


def _next_turn(counts: Mapping[int, int], prior: Mapping[int, float]) -> NextTurn:
    weights = {0: 0.0, **prior}
    for distance, count in counts.items():
        weights[distance] = weights.get(distance, 0.0) + count
    num = sum(weights.values())
    num_before_end = num - weights[0]
    likeliest = sorted((d for d in weights if d), key=lambda d: (-weights[d], d))
    kept = [d for d in likeliest if weights[d] >= max(_MIN_SEEN, _SHARE * num)][:MAX_POSITIONS]
    frequent = [d for d in likeliest if d not in kept and weights[d] >= _SHARE * num_before_end]
    on_probation = frequent[: MAX_POSITIONS - len(kept)]
    if not kept and not on_probation:
        on_probation = [1]
    return NextTurn(tuple(kept), tuple(on_probation), weights[0] < _SHARE * num)


class _Window:
    """The last distances, or what became of the last answers, and how often each is among them."""

    __slots__ = ("_last", "counts")

    def __init__(self) -> None:
        self._last: deque[int] = deque()
        self.counts: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._last)

    def add(self, distance: int) -> None:
        """One more; the oldest of a full window goes."""
        counts = self.counts
        self._last.append(distance)
        counts[distance] = counts.get(distance, 0) + 1
        if len(self._last) > WINDOW:
            oldest = self._last.popleft()
            counts[oldest] -= 1
            if not counts[oldest]:
                del counts[oldest]


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
