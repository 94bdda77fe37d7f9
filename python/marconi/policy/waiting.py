"""The queue as an oracle: what requests that wait share is known before the first of them is computed.

    index     the prompts that wait, as a radix tree of their own, kept as requests come and go: a node with several
              children, or at which a prompt ends, is where waiting prompts part
    shared    where a request that is about to be computed will be left by others that wait: a state there serves all
              of them, so it is planned at once and not at the third occurrence       (`admission/plan.py`)
    pending   the states that requests in prefill will leave
    waits     a request whose prompt runs through a pending state waits for it, if that saves `MIN_SAVED_TOKENS` and
              `MIN_SAVED_SHARE` of what it would have to compute

    one group of a queue      S S S S a a          computed first, a state is kept after S S S S
                              S S S S b b          waits for one prefill, and computes b b
                              S S S S c c          as well, in the same batch

What a plan pays is the nodes above its prompt's end, however many wait; what a request pays when it comes is its own
prompt. At most `MAX_TOKENS` of prompts are in the index: those who come first, and who comes beyond is indexed when
others have gone.

`AwaitedStates` counts which states waiting requests would start from, for the cache (`hybrid_cache.py`): they are
evicted last. It knows no tree, and the cache writes `Node.first_waiting` from it.

One whose prompt has no whole unit has no node in the index, and is known all the same. `lifecycle/queue.py` keeps both.

Requests are known by any hashable key. Owner: whoever owns the queue, a scheduler or a replay.
"""

from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Set
from typing import Final, NamedTuple

from marconi.policy.request import Request
from marconi.tree import Match, Node, RadixTree, check_invariants

MIN_SAVED_TOKENS: Final = 32
"""Stock SGLang's threshold for prompts that wait together (`IN_BATCH_PREFIX_CACHING_CHECK_THRESHOLD`)."""
MIN_SAVED_SHARE: Final = 1 / 8
MAX_TOKENS: Final = 8_000_000
"""A server's tokens take eight bytes each: 64 MB."""
_PROBE_BYTES: Final = 256


class _Pending(NamedTuple):
    request: Request
    depths: frozenset[int]
    shares: dict[tuple[bytes, int], bool]
    """By prompt and depth, whether the prompt runs through the state there: every pass asks for all that wait."""


class WaitingPrompts:
    """The prompts that wait, and the states that are under way to them."""

    def __init__(self, unit_tokens: int = 1, ids_per_unit: int = 1, max_tokens: int = MAX_TOKENS) -> None:
        """`unit_tokens` and `ids_per_unit` are those of the tree whose states are waited for."""
        self._index = RadixTree(unit_tokens, ids_per_unit=ids_per_unit)
        self._max_tokens = max_tokens
        self._nodes: dict[Hashable, Node | None] = {}
        """None of a prompt without a whole unit."""
        self._pending: dict[Hashable, _Pending] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._nodes

    def keys(self) -> Set[Hashable]:
        """Those that wait."""
        return self._nodes.keys()

    @property
    def pending(self) -> Set[Hashable]:
        """Those that will leave states."""
        return self._pending.keys()

    @property
    def is_full(self) -> bool:
        """True if nobody else is taken into the index."""
        return self._index.num_tokens >= self._max_tokens

    # The queue

    def add(self, key: Hashable, request: Request) -> None:
        """A request waits."""
        index = self._index
        num_tokens = min(request.num_prompt_tokens, request.num_known_tokens) // index.unit_tokens * index.unit_tokens
        self._nodes[key] = None
        if num_tokens:
            (node,) = index.insert(request.path[: index.offset(num_tokens)], [num_tokens], request.namespace)
            index.lock(node)
            index.take_changed()
            self._nodes[key] = node

    def remove(self, key: Hashable) -> None:
        """A request waits no longer."""
        index, node = self._index, self._nodes.pop(key)
        if node is None:
            return
        index.unlock(node)
        if not node.num_locks:
            index.evict(node)
        index.take_changed()

    def shared(self, key: Hashable, num_cached_tokens: int) -> list[int]:
        """Depths beyond `num_cached_tokens` at which others that wait leave the prompt of one, the deepest first."""
        node = self._nodes.get(key)
        if node is None:
            return []
        is_shared = node.depth > num_cached_tokens and (node.num_locks > 1 or node.live_children)
        return [*([node.depth] if is_shared else []), *self._depths_above(node, num_cached_tokens)]

    def is_shared(self, key: Hashable, num_cached_tokens: int) -> bool:
        """True if others that wait may have more than `num_cached_tokens` in common with the prompt of one."""
        if self.is_full:
            return True
        node = self._nodes.get(key)
        if node is None or node.depth <= num_cached_tokens:
            return False
        above = node.parent
        is_left_above = above is not None and above.depth > num_cached_tokens
        return is_left_above or node.num_locks > 1 or bool(node.live_children)

    # States to come

    def expect(self, key: Hashable, request: Request, depths: Collection[int]) -> None:
        """A request in prefill will leave states at `depths`, in place of what was expected of it."""
        self._expect(key, _Pending(request, frozenset(depths), {}))

    def arrived(self, key: Hashable, depth: int) -> None:
        """The state at `depth` of a request in prefill was written, or will not be."""
        pending = self._pending.get(key)
        if pending is not None:
            self._expect(key, pending._replace(depths=pending.depths - {depth}))

    def expect_nothing(self, key: Hashable) -> None:
        """A request leaves nothing more."""
        self._pending.pop(key, None)

    def waits(self, request: Request, match: Match) -> bool:
        """True if a state on the path of `request`, of which the tree has `match`, is worth waiting for."""
        num_cached = match.checkpoint.depth
        num_to_compute = request.num_prompt_tokens - num_cached
        worth = num_cached + max(MIN_SAVED_TOKENS, int(MIN_SAVED_SHARE * num_to_compute))
        return any(
            worth <= depth < request.num_prompt_tokens and self._runs_through(request, pending, depth)
            for pending in self._pending.values()
            for depth in pending.depths
        )

    def check_invariants(self) -> None:
        """Raise `AssertionError` unless the index holds the prompts of those that wait, and no others."""
        check_invariants(self._index)
        num_locks = Counter(node for node in self._nodes.values() if node is not None)
        held = {node: node.num_locks for node in self._index.nodes() if node.has_state}
        assert held == num_locks, f"{held}: the index has other prompts than {num_locks}"

    def _expect(self, key: Hashable, pending: _Pending) -> None:
        if pending.depths:
            self._pending[key] = pending
        else:
            self._pending.pop(key, None)

    def _runs_through(self, request: Request, pending: _Pending, depth: int) -> bool:
        if request.namespace != pending.request.namespace:
            return False
        # The hash of bytes is computed once, and bytes are first compared by identity.
        asked = request.path, depth
        if asked not in pending.shares:
            pending.shares[asked] = self._share(request, pending.request, depth)
        return pending.shares[asked]

    def _share(self, request: Request, other: Request, num_tokens: int) -> bool:
        """True if two prompts begin with the same `num_tokens` tokens; no token is copied but those looked at first."""
        left, right, size = request.path, other.path, self._index.offset(num_tokens)
        near = min(size, _PROBE_BYTES)
        return (
            len(left) >= size
            and left[:near] == right[:near]
            and left[size - near : size] == right[size - near : size]
            and left.startswith(memoryview(right)[:size])
        )

    def _depths_above(self, node: Node, num_tokens: int) -> Iterator[int]:
        above = node.parent
        while above is not None and above.depth > num_tokens:
            yield above.depth
            above = above.parent


class AwaitedStates:
    """Requests that wait, by key, each with its place in the queue and the state that it would start from."""

    __slots__ = ("_num_added", "_of_state", "_waiting")

    def __init__(self) -> None:
        self._waiting: dict[Hashable, tuple[int, Node]] = {}
        """Place in the queue of each request, and its state or the root."""
        self._of_state: dict[Node, dict[Hashable, int]] = {}
        """Places of each state's requests, in the order in which they came to it."""
        self._num_added = 0

    def __contains__(self, key: Hashable) -> bool:
        return key in self._waiting

    def keys(self) -> Set[Hashable]:
        """Those that wait."""
        return self._waiting.keys()

    def put(self, key: Hashable, state: Node) -> tuple[Node, ...]:
        """Note that the request of `key` would start from `state`; a request that waits already keeps its place.

        Returns the states whose requests have changed.
        """
        place, old = self._waiting.get(key, (self._num_added, None))
        if old is state:
            return ()
        self._num_added += old is None
        self._waiting[key] = place, state
        if state.parent is not None:
            self._of_state.setdefault(state, {})[key] = place
        return (state,) if old is None else (self._drop(key, old), state)

    def remove(self, key: Hashable) -> Node:
        """Remove a request that waits no longer; returns its state."""
        _, state = self._waiting.pop(key)
        return self._drop(key, state)

    def first(self, state: Node) -> int | None:
        """Place of the first request that would start from `state`; None if there is none, or for a root."""
        return next(iter(self._of_state.get(state, {}).values()), None)

    def check_invariants(self) -> None:
        """Raise `AssertionError` unless every state has the requests that would start from it, and no others."""
        of_state: dict[Node, dict[Hashable, int]] = {}
        for key, (place, state) in self._waiting.items():
            # One that was evicted, and forgotten since, has no parent either.
            if state.depth:
                of_state.setdefault(state, {})[key] = place
        wrong = {
            state for state in of_state.keys() | self._of_state if of_state.get(state) != self._of_state.get(state)
        }
        assert not wrong, f"{wrong}: others would start from them than those who wait"

    def _drop(self, key: Hashable, state: Node) -> Node:
        if (requests := self._of_state.get(state)) is not None:
            del requests[key]
            if not requests:
                del self._of_state[state]
        return state
