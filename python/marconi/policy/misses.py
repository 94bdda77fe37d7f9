"""Why prompt tokens are missed: every token that a request computes has one cause, and the sums are exact.

A request resumes from one state, so its path divides at depths; each part is missed for a reason that lies at its end:

    0 ---- hit ---- load_declined ---- evicted_for_kv ---- no_slot ---- seen ------ prompt_end - 1 -- prompt_end
      cached     the host has a copy      a state stood here             |  no_state      first_seen     last_token
                 that is not loaded       until it was evicted           |  or least_gain
                                                                         where the prompt diverges from all known

    evicted_*, no_slot, not_written, hint_over_limit    the tree remembers why no state stands at a depth, and when it
                                                        was evicted or dropped (`Absence`); it forgets with its ghosts
    no_state, least_gain                                known, but beyond the last depth at which a state stood or was
                                                        planned
    chunk_rounding                                      the last part of what is known, less than a chunk, where an
                                                        admission keeps states at ends of chunks alone
    page_rounding                                       all whole pages are known; the rest of a page is never kept
    other_namespace, first_seen                         not known to this name space of the tree
    last_token                                          always computed: its logits are the answer

KV is never missed by itself: a live node's ancestors are live, and no ghost has a state (`tree/invariants.py`), so the
KV of a state's whole path is held as long as the state. KV is evicted with the states that need it, whose absence is
the cause; so there is none for evicted KV.

What the tree has forgotten is `first_seen`, and so is a prefix that another request is computing at the same moment. A
page that a prompt shares in part is not known. For `other_namespace` the `_MAX_NAMESPACES` newest others are looked at.
A flush forgets everything; what is not known since then says when that was.

An explanation costs a look at the nodes of the path beyond the hit, and no comparison of tokens but these: the path is
matched again if memory that was made for the request has changed its nodes, and where it is not known to its end it is
compared with each other name space that is looked at and begins alike. It notes a tuple for each miss, and makes
`Miss`es only for whoever reads them.

Owner: `hybrid_cache.py`, which explains each request as it begins, in the server as in the replay.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import Final, NamedTuple, TypeAlias

from marconi.policy.admission.base import LEAST_GAIN_TOKENS
from marconi.policy.base import Need
from marconi.policy.causes import Cause
from marconi.policy.eviction.order import Order
from marconi.policy.request import Lease, Request
from marconi.policy.residency import Place, place_of
from marconi.tree import HostCopy, Kept, Match, Node, RadixTree

EVICTED_FOR: Final = {
    Need.KV: Cause.EVICTED_FOR_KV,
    Need.STATE: Cause.EVICTED_FOR_STATES,
    Need.BYTES: Cause.EVICTED_FOR_BYTES,
}
_PLACES: Final = {
    Place.BRANCH: "a branch point",
    Place.PROMPT_END: "a prompt's end",
    Place.ANSWER_END: "an answer's end",
    Place.WAY: "a state on the way",
}
_MAX_NAMESPACES: Final = 8
# To look up an enumeration's member takes a call.
_LOAD_DECLINED: Final = Cause.LOAD_DECLINED
_NO_STATE: Final = Cause.NO_STATE
_LEAST_GAIN: Final = Cause.LEAST_GAIN
_CHUNK_ROUNDING: Final = Cause.CHUNK_ROUNDING
_PAGE_ROUNDING: Final = Cause.PAGE_ROUNDING
_OTHER_NAMESPACE: Final = Cause.OTHER_NAMESPACE
_FIRST_SEEN: Final = Cause.FIRST_SEEN
_LAST_TOKEN: Final = Cause.LAST_TOKEN


class Miss(NamedTuple):
    """Consecutive prompt tokens that were missed for one cause."""

    cause: Cause
    start: int
    """Tokens before it."""
    end: int
    """Tokens up to and including its last."""
    at_s: float | None = None
    """When the state at `end` was evicted or not written, or the cache that does not know these tokens was last
    flushed, in seconds; None for other causes and if it never was."""
    kept: Kept | None = None
    """The state kept instead of the one at `end`; None unless that was evicted by the worth of its rule."""

    @property
    def num_tokens(self) -> int:
        """Tokens missed."""
        return self.end - self.start


Part: TypeAlias = tuple[int, StrEnum, float | None, Kept | None]
"""A miss as the thread that serves notes it: its end, cause, `at_s` and `kept`. An `Absence` is one as it is."""


class Explanation(NamedTuple):
    """A request's prompt, token by token: `num_hit_tokens`, then `misses`, which follow each other to its end."""

    num_prompt_tokens: int
    num_hit_tokens: int
    num_seen_tokens: int
    """Where the prompt diverges from what is known, or its end."""
    parts: Sequence[Part]
    """The misses; each begins where the one before it ends."""

    @property
    def misses(self) -> tuple[Miss, ...]:
        """The misses in the order of the path; made for whoever reads them."""
        misses, start = [], self.num_hit_tokens
        for end, cause, at_s, kept in self.parts:
            assert isinstance(cause, Cause)
            misses.append(Miss(cause, start, end, at_s, kept))
            start = end
        return tuple(misses)

    def num_missed_tokens(self) -> dict[Cause, int]:
        """Tokens by cause, in the order of the path."""
        tokens: dict[Cause, int] = {}
        for miss in self.misses:
            tokens[miss.cause] = tokens.get(miss.cause, 0) + miss.num_tokens
        return tokens

    def for_its_client(self) -> "Explanation":
        """The same, but silent on what is others': a client that learned of it could test guesses of prompts."""
        parts: list[Part] = []
        for end, cause, at_s, _ in self.parts:
            theirs = Cause.FIRST_SEEN if cause is Cause.OTHER_NAMESPACE else cause
            if parts and parts[-1][1] is theirs is Cause.FIRST_SEEN:
                parts.pop()
            parts.append((end, theirs, at_s, None))
        return self._replace(parts=parts)

    def describe(self, now_s: float) -> str:
        """One line for people; `now_s` is the time of the cache's clock, in seconds."""
        last = {miss.cause: miss for miss in self.misses}
        is_whole = self.num_seen_tokens >= self.num_prompt_tokens - 1
        diverged = "known to its end" if is_whole else f"diverged at token {self.num_seen_tokens:,}"
        parts = [f"hit {self.num_hit_tokens:,} of {self.num_prompt_tokens:,}"]
        for cause, num_tokens in self.num_missed_tokens().items():
            *_, since_s, kept = last[cause]
            ago = "" if since_s is None else f" {_duration(now_s - since_s)} ago"
            instead = "" if kept is None else f", to keep {describe_kept(kept)}"
            since = f" since the flush{ago}" if ago else ""
            said = cause.said.format(ago=ago, diverged=diverged, kept=instead, since=since)
            parts.append(f"{num_tokens:,}: {said}")
        return "; ".join(parts)


class Misses:
    """Explains the requests of one tree."""

    def __init__(self, tree: RadixTree, flushed_s: float | None = None) -> None:
        """`flushed_s` is when the cache was last flushed; None if it never was."""
        self._tree = tree
        self._flushed_s = flushed_s

    def explain(self, lease: Lease, grid_tokens: int = 1) -> Explanation:
        """Why the request of `lease` misses what it misses now, as it resumes from the state that was matched.

        States stand at multiples of `grid_tokens`.
        """
        request, match = lease
        tree, prompt_end, hit = self._tree, request.num_prompt_tokens, match.checkpoint.depth
        last, unit = prompt_end - 1, tree.unit_tokens
        usable = max(min(last, request.num_known_tokens) // unit * unit, hit)
        seen = max(min(match.num_seen_tokens, usable), hit)
        parts = _remembered(match, hit, seen)
        if parts is None:
            match = tree.match(request.path, usable, request.namespace)
            seen = max(min(match.num_seen_tokens, usable), hit)
            parts = _remembered(match, hit, seen)
            assert parts is not None, "nothing changes the nodes of a path while it is explained"
        start = parts[-1][0] if parts else hit
        on_grid = max(seen // grid_tokens * grid_tokens, start)
        if on_grid > start:
            parts.append((on_grid, _LEAST_GAIN if on_grid - start < LEAST_GAIN_TOKENS else _NO_STATE, None, None))
        if seen > on_grid:
            parts.append((seen, _CHUNK_ROUNDING, None, None))
        if last > seen:
            if seen == usable:
                parts.append((last, _PAGE_ROUNDING, None, None))
            else:
                self._add_unknown(parts, request, seen, usable)
        parts.append((prompt_end, _LAST_TOKEN, None, None))
        return Explanation(prompt_end, hit, seen if seen < usable else last, parts)

    def _add_unknown(self, parts: list[Part], request: Request, seen: int, usable: int) -> None:
        """Add the misses beyond `seen`, which is all that this name space knows; `usable` is in whole units."""
        start, roots, namespace = seen, self._tree.roots, request.namespace
        if len(roots) > (namespace in roots):
            known = min(self._known_elsewhere(request.path, namespace), usable)
            if known > start:
                parts.append((known, _OTHER_NAMESPACE, self._flushed_s, None))
                start = known
        last = request.num_prompt_tokens - 1
        if last > start:
            parts.append((last, _FIRST_SEEN, self._flushed_s, None))

    def _known_elsewhere(self, path: bytes, namespace: int) -> int:
        """Tokens of `path` that the newest of the other name spaces know."""
        tree, known, num_left = self._tree, 0, _MAX_NAMESPACES
        for each in reversed(tree.roots):
            if each != namespace:
                known = max(known, tree.num_known_tokens(path, each))
                num_left -= 1
                if not num_left:
                    break
        return known


def kept_instead(order: Order, victim: Node | HostCopy, need: Need) -> Kept | None:
    """Describe the state that `order` keeps while it evicts `victim`; None if its rule names none."""
    found = order.kept_instead(victim, need)
    if found is None:
        return None
    view, num_times = found
    node = view.node if isinstance(view, HostCopy) else view
    assert isinstance(node, Node)
    return Kept(node.depth, place_of(node), num_times)


def describe_kept(kept: Kept) -> str:
    """A state that was kept instead of an evicted one, for people."""
    depth, place, num_times = kept
    assert isinstance(place, Place)
    return f"{_PLACES[place]} at {depth:,} tokens, worth {num_times:.3g} times as much"


def _remembered(match: Match, hit: int, seen: int) -> list[Part] | None:
    """The misses beyond `hit` tokens up to the last depth, at most `seen`, with a state on the host or an absence.

    None if memory that was made since has changed the nodes of the path, so that it has to be matched again.
    """
    start, hosted = hit, match.hosted
    if hosted is not None:
        if not hosted.has_copy:
            return None
        start = max(hosted.depth, hit)
    node, source = match.last, match.checkpoint
    found: list[Part] = []
    cause: StrEnum | None = None
    while node.depth > start and node.parent is not None:
        absences = node.absences
        if absences:
            # The last of each run of one cause, falling.
            for each in reversed(absences):
                if each[1] is not cause and start < each[0] <= seen:
                    found.append(each)
                    cause = each[1]
        node = node.parent
    while node is not source and node.parent is not None:
        node = node.parent
    if node is not source and node.depth:
        return None
    if start > hit:
        found.append((start, _LOAD_DECLINED, None, None))
    found.reverse()
    return found


def _duration(seconds: float) -> str:
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(seconds, 0.0):.0f} s" if seconds >= 1 else f"{1000 * max(seconds, 0.0):.0f} ms"
