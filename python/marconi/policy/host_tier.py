"""A host tier by worth: states that the device evicts are copied to the host if loading them is worth the memory.

    offer    a victim of the device is copied with the KV of its path, unless it loads no faster than
             it is computed; then the least valuable copy is dropped until all fit, the new one if it is the least
    load     a request starts from a copy beyond the state that the device has for it, if that saves time; the copy
             stays, and the device holds its state and KV as if a request had left them

A copy stands for its whole path (`tree/host.py`), so neither tier holds anything dead, and loading never depends on
entries that the other tier has evicted. Copies are ranked by a rule for the device, with seconds in place of tokens:

    worth(n) = rate of uses at its age * max(seconds to compute - seconds to load, 0) / bytes that dropping n frees

What a copy saves are the tokens beyond the nearest shallower state on either tier and, where KV is short, all whose KV
the host keeps for it alone. The device evicts a path from its end: when the last state is copied with the whole path,
the device still holds the shallower ones, and evicts them next. If they counted, the copy would save little for so many
bytes and be dropped before they follow. Where slots are short they count, since each needs a slot of its own when it
follows.

Its seconds to compute are what it adds to a prefill of as many new tokens as prompts here usually compute. A prefill of
one token also reads all the weights, so that beside it every short span would appear to save that. Where its tokens
take more FLOPs than the mean of the whole path, the worth is lowered by as much: the last tokens of a long path take
most, but the others have to be kept for them. Times are not compared: a prefill that waits for memory takes as long
whether a short prompt's first tokens are in it or not.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Protocol

from marconi.policy.admission.base import LEAST_GAIN_TOKENS
from marconi.policy.base import Costs, Need, NodeView
from marconi.policy.causes import Cause
from marconi.policy.eviction.order import Order
from marconi.policy.misses import kept_instead
from marconi.policy.request import Request
from marconi.tree import Absence, HostCopy, Match, Node, RadixTree
from marconi.tree.host import HostCopies
from marconi.tree.memory import Memory

NEEDS: Final = frozenset({Need.KV, Need.STATE})
"""SGLang keeps KV and states on the host in a pool each."""


class WritePolicy(StrEnum):
    """When stock SGLang copies to the host (`--hicache-write-policy`)."""

    THROUGH = "write-through"
    BACK = "write-back"


@dataclass(frozen=True, slots=True)
class HostMemory:
    """The host's memory for KV, in tokens, and for states, in slots."""

    num_tokens: int
    num_slots: int


_NUM_LATEST: Final = 50
"""Number of prompts in the mean of the tokens that they compute."""


@dataclass(slots=True)
class LoadTimes:
    """Seconds that a load takes, and that it saves."""

    costs: Costs
    prefill_s: Callable[[int, int], float]
    """Seconds of a prefill, by cached tokens and prompt tokens."""
    bytes_per_s: float
    """Bandwidth from the host to the device."""
    least_tokens: int = LEAST_GAIN_TOKENS
    """Tokens that a copy must save to be made."""
    num_new_tokens: float = 1.0
    """Mean of what prompts that start from a state compute."""
    copy_bytes_per_s: float | None = None
    """Bandwidth from the device to the host; None if it is the same."""

    def resumed(self, num_new_tokens: int) -> None:
        """A prompt has started from a state, and computes `num_new_tokens`."""
        self.num_new_tokens += (num_new_tokens - self.num_new_tokens) / _NUM_LATEST

    def load_s(self, num_tokens: int) -> float:
        """Seconds to load one state and the KV of `num_tokens`."""
        return self._bytes_of(num_tokens) / self.bytes_per_s

    def copy_s(self, num_tokens: int) -> float:
        """Seconds to copy as much to the host."""
        return self._bytes_of(num_tokens) / (self.copy_bytes_per_s or self.bytes_per_s)

    def saved_s(self, num_cached_tokens: int, depth: int, num_prompt_tokens: int, num_tokens: int) -> float:
        """Seconds that a prompt saves by loading `num_tokens` to start from `depth` and not from fewer cached ones."""
        computed_s = self.prefill_s(num_cached_tokens, num_prompt_tokens) - self.prefill_s(depth, num_prompt_tokens)
        return computed_s - self.load_s(num_tokens)

    def worth_of(self, node: NodeView, need: Need) -> float:
        """Seconds that a copy of `node` saves a prompt that resumes from it, 0 if it saves none or too few tokens.

        Where slots are short (`need`), only the tokens beyond the nearest shallower state count.
        """
        above = node.checkpoint_depth_above
        if need is not Need.STATE:
            above = min(above, node.depth - node.freed_tokens)
        return self.worth_between(above, node.depth)

    def worth_between(self, above: int, depth: int) -> float:
        """Seconds that a copy at `depth` saves such a prompt over a start from `above`; 0 below `least_tokens`."""
        num_tokens = depth - above
        if num_tokens < self.least_tokens:
            return 0.0
        num_prompt_tokens = depth + math.ceil(self.num_new_tokens)
        saved_s = self.saved_s(above, depth, num_prompt_tokens, num_tokens)
        if saved_s <= 0:
            return 0.0
        flops = self.costs.flops(depth)
        return saved_s * min(flops * num_tokens / (depth * (flops - self.costs.flops(above))), 1.0)

    def _bytes_of(self, num_tokens: int) -> int:
        return num_tokens * self.costs.kv_bytes_per_token + self.costs.state_bytes


class Tier(Protocol):
    """Memory below the device's, as the driver of a tree sees it (`hybrid_cache.py`)."""

    @property
    def is_half_free(self) -> bool:
        """True if copies take at most half of the memory."""
        ...

    def resumed(self, num_new_tokens: int) -> None:
        """A request has started from a state, and computes `num_new_tokens` of its prompt."""
        ...

    def left(self, request: Request, depths: Sequence[int], now_s: float) -> None:
        """A request has left states at `depths` of its path on the device, rising, and the KV up to the last."""
        ...

    def offer(self, node: Node, now_s: float) -> None:
        """The device is about to evict the state of `node`, and the KV that only it needs."""
        ...

    def touch(self, node: Node) -> None:
        """`node` was used on the device, or the device has taken or evicted its state."""
        ...

    def to_load(self, request: Request, match: Match) -> int:
        """The depth, in tokens, that a request with this match is to start from; 0 if the device has as much."""
        ...

    def loading(self, request: Request, match: Match, now_s: float) -> AbstractContextManager[None]:
        """Keep what is loaded for a request with this match while memory is made for it on the device."""
        ...

    def load_s(self, num_tokens: int) -> float:
        """Seconds to load one state and the KV of `num_tokens`."""
        ...


class HostTier:
    """Copies on the host, their order, and what they may take."""

    def __init__(
        self,
        tree: RadixTree,
        eviction: Order,
        memory: HostMemory,
        times: LoadTimes,
        rows: Memory | None = None,
    ) -> None:
        """`eviction` knows no copy yet and answers `NEEDS`; `rows` is where copies lie, if they are real."""
        self.copies = HostCopies(tree, rows)
        self.eviction = eviction
        self.explains = True
        """Whether it notes why it has no copy any more."""
        self.num_dropped = 0
        """Copies that gave way,"""
        self.num_dropped_tokens = 0
        """and tokens whose KV was freed with them."""
        self.memory = memory
        self.times = times
        self._expected: list[int] = []
        """Tokens of each state that is being read from a store, and has its place here already."""

    def resumed(self, num_new_tokens: int) -> None:
        """Learn what prompts compute."""
        self.times.resumed(num_new_tokens)

    def left(self, request: Request, depths: Sequence[int], now_s: float) -> None:
        """Nothing: what the device holds needs no copy yet."""

    def offer(self, node: Node, now_s: float) -> None:
        """Copy `node`, which the device holds and is about to evict, if that is worth while."""
        self.take(node, now_s)

    def take(self, node: Node, now_s: float) -> bool:
        """Copy `node`, which the device holds, if that is worth while; returns whether there is a new copy."""
        had_copy = node.has_copy
        above = min(node.lasting_depth_above, node.depth - node.freed_tokens)
        if not node.has_copy and self.times.worth_between(above, node.depth) > 0 and self._has_room_if_on_trial(node):
            self.copies.hold(node)
            self._rerank()
            self._make_fit(now_s)
        return node.has_copy and not had_copy

    def _has_room_if_on_trial(self, node: Node) -> bool:
        """True unless `node` is on trial, and something would be dropped for its copy."""
        return not node.on_trial or self.has_room(node.depth - hosted_depth(node))

    @property
    def is_half_free(self) -> bool:
        """True if copies, and what is expected, take at most half of the memory."""
        num_tokens, num_states = self.room
        return 2 * num_tokens >= self.memory.num_tokens and 2 * num_states >= self.memory.num_slots

    @property
    def room(self) -> tuple[int, int]:
        """Tokens, and states, that fit beside the copies and what is expected; below 0 if those do not fit."""
        return (
            self.memory.num_tokens - self.copies.num_tokens - sum(self._expected),
            self.memory.num_slots - self.copies.num_states - len(self._expected),
        )

    def has_room(self, num_tokens: int) -> bool:
        """True if one more state fits, with the KV of `num_tokens` more."""
        tokens, states = self.room
        return num_tokens <= tokens and states > 0

    def expect(self, num_tokens: int, now_s: float) -> bool:
        """Keep room for one more state, with the KV of `num_tokens` more, in at most half the memory.

        False, and nothing is dropped, if too much is locked. `unexpect` ends it, before the state is adopted or where
        it does not come.
        """
        num_expected, locked = num_tokens + sum(self._expected), self.copies.locked
        if num_expected > min(self.memory.num_tokens / 2, self.memory.num_tokens - locked.num_tokens):
            return False
        if len(self._expected) >= self.memory.num_slots - locked.num_states:
            return False
        self._expected.append(num_tokens)
        self._make_fit(now_s)
        return True

    def unexpect(self, num_tokens: int) -> None:
        """Keep no room any more for a state that was expected with `num_tokens`."""
        self._expected.remove(num_tokens)

    def adopt(self, path: bytes, namespace: int, depth: int, now_s: float) -> Node:
        """Hold a copy that a store had, for which there is room; returns its node.

        One that this server has never held is as if it were used now.
        """
        node = self.copies.adopt(path, depth, namespace, now_s).node
        self._rerank()
        return node

    def touch(self, node: Node) -> None:
        """`node` was used on either tier, or the device has taken or evicted its state."""
        if node.has_copy:
            assert node.host_copy is not None
            self.copies.use(node.host_copy)
            self._rerank()

    def to_load(self, request: Request, match: Match) -> int:
        """The depth of the copy that `request` is to start from; 0 if what the device has is as good."""
        node, num_cached_tokens = match.hosted, match.checkpoint.depth
        if node is None or node.depth <= num_cached_tokens:
            return 0
        num_tokens = node.depth - match.num_live_tokens
        saved_s = self.times.saved_s(num_cached_tokens, node.depth, request.num_prompt_tokens, num_tokens)
        return node.depth if saved_s > 0 else 0

    @contextmanager
    def loading(self, request: Request, match: Match, now_s: float) -> Iterator[None]:
        """Keep the copy that was matched."""
        assert match.hosted is not None
        copy = match.hosted.host_copy
        assert copy is not None
        self.lock(copy)
        try:
            yield
        finally:
            self.unlock(copy)

    def drop_next(self, copy: HostCopy, place: int) -> None:
        """Drop `copy` before all others, in rising order of `place`, unless it is used first."""
        self.copies.leave(copy, place)
        self._rerank()

    def lock(self, copy: HostCopy) -> None:
        """Drop `copy` for nothing until it is unlocked."""
        self.copies.lock(copy)
        self._rerank()

    def unlock(self, copy: HostCopy) -> None:
        """Give back one lock."""
        self.copies.unlock(copy)
        self._rerank()

    def load_s(self, num_tokens: int) -> float:
        """Seconds to load one state and the KV of `num_tokens`."""
        return self.times.load_s(num_tokens)

    def _shortage(self) -> Need | None:
        """The resource that copies exceed; None if they fit."""
        num_tokens, num_states = self.room
        if num_states < 0:
            return Need.STATE
        return Need.KV if num_tokens < 0 else None

    def _make_fit(self, now_s: float) -> None:
        while (need := self._shortage()) is not None:
            copy = self.eviction.victim(need, now_s)
            if copy is None:
                raise AssertionError("everything on the host is being loaded")
            assert isinstance(copy, HostCopy)
            kept = kept_instead(self.eviction, copy, need) if self.explains else None
            self.eviction.evicting(copy, now_s)
            if self.explains and not copy.node.has_state:
                copy.node.absent(Absence(copy.depth, Cause.EVICTED_FROM_HOST, now_s, kept))
            self.num_dropped_tokens += self.copies.drop(copy).num_tokens
            self.num_dropped += 1
            self._rerank()

    def _rerank(self) -> None:
        """Bring the order up to date with what has changed on the host."""
        eviction = self.eviction
        for copy in dict.fromkeys(self.copies.take_changed()):
            if copy.is_held and not copy.num_locks:
                eviction.update(copy)
            else:
                eviction.discard(copy)


def hosted_depth(node: Node) -> int:
    """Tokens of the path of `node` whose KV the host holds."""
    hosted: Node | None = node
    while hosted is not None and not hosted.is_hosted:
        hosted = hosted.parent
    return 0 if hosted is None else hosted.depth
