"""The positions at which later prompts diverge from an earlier one, hence the state the next turn will start from.

A prompt ends in the template's invitation to answer. The template decides how much of it the next turn's prompt
repeats, and whether that repeats the answer unchanged. With a reasoning model, whose thinking is dropped:

    prompt   <user> Why? </user> <assistant> <think>
    answer                                           Because. </think> So it is. </assistant>
    next     <user> Why? </user> <assistant> So it is. </assistant> <user> And? </user> <assistant> <think>
                                            ^ diverges here: a distance of 1 token before the prompt's end

So the *distance* at which a path is left first, in tokens before the end of the prompt that made it, is counted: 0 for
a prompt that resumes at the end of the answer, 1 for a repeat of the prompt, and up to `MAX_DISTANCE` and half of the
prompt; a divergence further back concerns branch points and guards. The last `WINDOW` distances count, of each name
space, and apart for prompts that continued an answer themselves (the steps of an agent within a turn, whose thinking
stays) and for others; a name space with fewer than `MIN_OWN` uses the distances of all of them. Added to these, until
they are outnumbered:

    one at 0, a little less at 1, a part at each cold distance      if nothing is known of the template
    two at the distance                                             if the template is known
                                                                    (`engine/http/chat_template.py`)

With n(d) of n in all at distance d, of which m are beyond 0, a prompt leaves states at

    likely        d >= 1 with n(d) >= max(2, n / 4), the two commonest
    possible      other d >= 1 with n(d) >= m / 4, two of both kinds in all; d = 1 if that leaves none
    cold          for the first `COLD_REQUESTS`, before much can have been seen, also those of `COLD_DISTANCES` that lie
                  further back, where they give away no more than an eighth of the tokens to compute

A prompt is *open* until a request continues it. The next one that does starts from the state at distance d if it
leaves the path no further back than that, and before the next deeper state of the prompt, at distance e. So the share
of that state in the expected continuations of the prompt is

    share(d, e) = sum of n(x) / n over e < x <= d        of the deepest with what lies beyond it, e < 0

and an evicted state leaves its share to the state above it. Shares include the first of the assumptions above, whether
or not the template is known.

How an answer *closed* predicts whether the next turn continues it: a tool call, whose thinking stays until its result
is answered, ends in a token of its own, while an answer in text loses its thinking with the next turn. So for each
closing (`closing_of`) that was seen `MIN_CLOSINGS` times, the answers that were continued and those that were left are
counted apart, and the share of the end of an answer is that of its closing.

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
from typing import Final, TypeVar

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
"""The closing is unknown."""
MAX_NAMESPACES: Final = 4096
MAX_CLOSINGS: Final = 4096
_UNKNOWN: Final = {0: 1.0, 1: 0.9, **dict.fromkeys(COLD_DISTANCES, 0.4)}
"""One observation outweighs an assumption."""
_SHARE: Final = 1 / 4
_COLD_SHARE: Final = 1 / 8
_MIN_SEEN: Final = 2
_MAX_STEPS: Final = 64
_CONTINUED, _LEFT = 0, 1

_KeyT = TypeVar("_KeyT")


class Turns:
    """Counts where paths are left, and says where the next one will be."""

    def __init__(self, unit_tokens: int = 1) -> None:
        """`unit_tokens` are a page's: a path is known to be left within one of them, and the end of it counts."""
        self._unit_tokens = unit_tokens
        self._closings: OrderedDict[int, _Window] = OrderedDict()
        """Whether answers were continued or left, by how they closed; the longest unseen first."""
        self._num_arrivals = 0
        self._all = {False: _Window(), True: _Window()}
        self._of: OrderedDict[tuple[int, bool], _Window] = OrderedDict()
        """Distances by namespace, and by whether the prompts continued an answer; the longest unused first."""

    def arrived(self, lease: Lease) -> int | None:
        """A request has been looked up, and what it found is as it was; returns its distance, if it has one."""
        self._num_arrivals += 1
        left_by = lease.match.last.left_by
        distance = self.distance(lease)
        if left_by is None or distance is None:
            return None
        self._observe_closing(end_below(lease.match.last), distance)
        _counted(self._of, (lease.request.namespace, left_by.continued), MAX_NAMESPACES).add(distance)
        self._all[left_by.continued].add(distance)
        return distance

    def next_turn(self, lease: Lease, known_distance: int | None = None) -> list[int]:
        """Distances in tokens at which the next turn may diverge from the prompt of `lease`, by decreasing saving.

        `known_distance` is the distance that its template gives, if that is known.
        """
        window = self._window(lease.request.namespace, self.distance(lease) == 0)
        turn = _next_turn(window.counts, _UNKNOWN if known_distance is None else {known_distance: 2.0})
        if self._num_arrivals > COLD_REQUESTS:
            return _by_gain(turn, lease, window)
        num_new_tokens = lease.request.num_prompt_tokens - lease.match.checkpoint.depth
        furthest = max(turn)
        further = [each for each in COLD_DISTANCES if furthest < each <= _COLD_SHARE * num_new_tokens]
        return _by_gain([*turn, *further], lease, window)

    def share(self, left_by: LeftBy, depth: int, depth_below: int | None) -> float:
        """The share of its prompt's continuations that start from `depth`, with the next deeper state at `depth_below`.

        Depths in tokens; `depth_below` is None for the deepest.
        """
        # A request that leaves a prompt right behind a state has this distance.
        end, page = left_by.num_prompt_tokens, self._unit_tokens - 1
        furthest = max(end - depth - page, 1) if depth < end else 0
        nearest = -1
        if depth_below is not None:
            nearest = max(end - depth_below - page, 1) if depth_below < end else 0
        if not furthest and left_by.closing != NO_CLOSING:
            closings = self._closings.get(left_by.closing)
            if closings is not None and len(closings.last) >= MIN_CLOSINGS:
                return closings.counts.get(_CONTINUED, 0) / len(closings.last)
        # `_window`, without a call for each rank.
        window = self._of.get((left_by.namespace, left_by.continued))
        if window is None or len(window.last) < MIN_OWN:
            window = self._all[left_by.continued]
        share = window.shares.get((nearest, furthest))
        return window.share(nearest, furthest) if share is None else share

    def prompt_end(self, lease: Lease, closing: int = NO_CLOSING) -> LeftBy:
        """The note that a request puts on the states that it leaves."""
        request = lease.request
        return LeftBy(request.num_prompt_tokens, self.distance(lease) == 0, closing, request.namespace)

    def is_usual(self, lease: Lease) -> bool:
        """True if a request leaves a prompt where its template's next turn does: a conversation that continues."""
        distance, end = self.distance(lease), lease.match.last.left_by
        if distance is None or end is None:
            return False
        counts = self._window(end.namespace, end.continued).counts
        return counts.get(distance, 0) >= max(_MIN_SEEN, _SHARE * sum(counts.values()))

    def parts_at(self, lease: Lease, depth: int) -> bool:
        """True if a request parts from others at `depth`, and not as a conversation does that continues."""
        request, match = lease
        known = min(match.num_seen_tokens, request.num_prompt_tokens - 1)
        return known - self._unit_tokens < depth <= known and not self.is_usual(lease)

    def note(self, nodes: Sequence[Node], lease: Lease, closing: int = NO_CLOSING) -> list[Node]:
        """A request has left states at `nodes`, rising: those near the end of its prompt, or beyond, are its own now.

        So are the states that it found there, of the same prompt. Returns all of them.
        """
        left_by = self.prompt_end(lease, closing)
        end = left_by.num_prompt_tokens
        own = [
            node
            for node in (self._near_end(nodes[-1], end) if nodes else [])
            if node in nodes or (node.left_by is not None and node.left_by.num_prompt_tokens == end)
        ]
        for node in own:
            node.left_by = left_by
        return own

    def close(self, node: Node) -> list[Node]:
        """A request continues the prompt that left `node`, or a state near it.

        Returns that prompt's states and the next one above, whose share depends on whom the one below belongs to.
        """
        left_by = node.left_by
        if left_by is None or not left_by.is_open:
            return []
        own = self._near_end(end_below(node), left_by.num_prompt_tokens)
        for each in own:
            if each.left_by is not None:
                num_prompt_tokens, continued, closing, namespace, _ = each.left_by
                each.left_by = LeftBy(num_prompt_tokens, continued, closing, namespace, is_open=False)
        above = own[-1].parent if own else None
        while above is not None and not above.has_state:
            above = above.parent
        return own if above is None else [*own, above]

    def _near_end(self, node: Node, num_prompt_tokens: int) -> list[Node]:
        """The states of the path of `node` no further before the end of a prompt than is counted, `node` included."""
        found = []
        above: Node | None = node
        while above is not None and above.depth > num_prompt_tokens - MAX_DISTANCE - self._unit_tokens:
            if above.parent is None:
                break
            found.append(above)
            above = above.parent
        return found

    def _window(self, namespace: int, continued: bool) -> "_Window":
        window = self._of.get((namespace, continued))
        return self._all[continued] if window is None or len(window.last) < MIN_OWN else window

    def distance(self, lease: Lease) -> int | None:
        """How far before an earlier prompt's end the request diverges from it, in tokens; 0 if it continues the answer.

        None if no prompt ended near, or if another diverged there before: the first to diverge continues that prompt,
        others may share no more than a beginning with it.
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

    def _observe_closing(self, end: Node, distance: int) -> None:
        """Count the closing of the answer that was continued, or of the last one below where its prompt was left."""
        if end.left_by is None or end.left_by.closing == NO_CLOSING or (distance and end.children):
            return
        _counted(self._closings, end.left_by.closing, MAX_CLOSINGS).add(_LEFT if distance else _CONTINUED)


def end_below(last: Node) -> Node:
    """The end of the answer to the prompt that left `last`, as far as one path leads on to it."""
    end, num_steps = last, 0
    num_prompt_tokens = 0 if last.left_by is None else last.left_by.num_prompt_tokens
    while end.depth < num_prompt_tokens and len(end.children) == 1 and num_steps < _MAX_STEPS:
        (end,) = end.children.values()
        num_steps += 1
    return end


def closing_of(token_id: int, *, thought: bool = False) -> int:
    """The closing of an answer whose last token but one is `token_id`, with or without reasoning before it."""
    return 2 * token_id + thought


def _next_turn(counts: Mapping[int, int], prior: Mapping[int, float]) -> list[int]:
    """Likely distances, then possible ones; at least one."""
    weights = {0: 0.0, **prior}
    for distance, count in counts.items():
        weights[distance] = weights.get(distance, 0.0) + count
    num = sum(weights.values())
    num_before_end = num - weights.pop(0)
    likely: list[int] = []
    possible: list[int] = []
    for negated, distance in sorted([(-weight, distance) for distance, weight in weights.items()]):
        if -negated >= max(_MIN_SEEN, _SHARE * num):
            likely.append(distance)
        elif -negated >= _SHARE * num_before_end:
            possible.append(distance)
    return [*likely, *possible][:MAX_POSITIONS] or [1]


def _by_gain(distances: Sequence[int], lease: Lease, window: "_Window") -> list[int]:
    """`distances` of states of which each would be the only one before the end, what saves most first."""
    num_new_tokens = lease.request.num_prompt_tokens - lease.match.checkpoint.depth
    return sorted(distances, key=lambda distance: -window.share(0, distance) * (num_new_tokens - distance))


class _Window:
    """The last distances, or what became of the last answers, and how often each is among them."""

    __slots__ = ("counts", "last", "shares")

    def __init__(self) -> None:
        self.last: deque[int] = deque()
        self.counts: dict[int, int] = {}
        self.shares: dict[tuple[int, int], float] = {}
        """Shares by (nearest, furthest), cached until the next count."""

    def share(self, nearest: int, furthest: int) -> float:
        """The share of distances beyond `nearest` and up to `furthest`, with what is assumed."""
        share = self.shares.get((nearest, furthest))
        if share is None:
            num = num_all = 0.0
            for counts in (self.counts, _UNKNOWN):
                for distance, count in counts.items():
                    num_all += count
                    num += count * (nearest < distance <= furthest)
            share = self.shares[nearest, furthest] = num / num_all
        return share

    def add(self, distance: int) -> None:
        """One more; the oldest of a full window is dropped."""
        counts = self.counts
        self.shares.clear()
        self.last.append(distance)
        counts[distance] = counts.get(distance, 0) + 1
        if len(self.last) > WINDOW:
            oldest = self.last.popleft()
            counts[oldest] -= 1
            if not counts[oldest]:
                del counts[oldest]


def _counted(windows: OrderedDict[_KeyT, _Window], key: _KeyT, max_windows: int) -> _Window:
    """The window of `key`, from now on the latest used; for a new one the longest unused of too many is forgotten."""
    window = windows.get(key)
    if window is None:
        window = windows[key] = _Window()
        if len(windows) > max_windows:
            windows.popitem(last=False)
    else:
        windows.move_to_end(key)
    return window


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
