"""The one owner of a tree: it alone changes the tree, and ranks anew what a change touched before it returns.

    match    what is known of a request, and the state that it would start from
    queue    which states waiting requests would start from: they are evicted last
    lock     a state that a running request starts from, and with it the KV of its path
    begin    count a request, and touch the state that it starts from
    plan     the positions at which its prefill leaves states                                (`admission/plan.py`)
    insert   states and KV, as the prefill passes them and at the request's end
    evict    a victim, whenever KV or states are short                                       (`eviction/`)
    retain   a state for a while at the cost of others of its name space, or demote it       (`retention.py`)
    load     back to the device what a host tier has a copy of                               (`host_tier.py`)

Invariant: after every verb the eviction order holds exactly the unlocked states, each ranked by its present facts, so
a victim is always a state that may be evicted. Nobody else calls a method that changes the tree or writes a fact of a
node (`test/structure/test_owner.py`); reading `tree` is free.

Memory is the caller's: the server's cache, or the replay that stands for it (`replay/server.py`), takes it while
requests run and asks for victims when it is short. A speculative state takes a slot that is spare, or one for which
nothing is evicted that is worth more (`deserves`).

All times are passed in, in seconds.
"""

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence, Set
from itertools import chain, starmap
from types import MappingProxyType
from typing import Final, NamedTuple, TypeAlias

from marconi.policy.admission.base import LEAST_GAIN_TOKENS, Admission
from marconi.policy.admission.plan import STEP_TOKENS, PrefillPlan, Wishes, prefill_plan
from marconi.policy.admission.trials import Trials
from marconi.policy.base import Need, NodeView, PlannedState, Role
from marconi.policy.causes import Cause
from marconi.policy.counters import Counters
from marconi.policy.eviction.order import Order
from marconi.policy.forecast.turns import NO_CLOSING, Turns
from marconi.policy.host_tier import Tier
from marconi.policy.misses import EVICTED_FOR, Explanation, Misses, kept_instead
from marconi.policy.request import Lease, Request
from marconi.policy.residency import Watcher
from marconi.policy.retention import MAX_PASSED, Retention, held_below, is_ranked, may_pay, root_of
from marconi.policy.sessions import Sessions
from marconi.policy.waiting import AwaitedStates
from marconi.tree import Absence, Freed, Match, Node, RadixTree, check_invariants

_First: TypeAlias = Callable[[Need, float], NodeView | None]
_NONE_ABSENT: Final = MappingProxyType[int, Cause]({})


def _is_awaited(node: NodeView) -> bool:
    return node.first_waiting is not None


class Suffix(NamedTuple):
    """The part of a request's path after a node that the request has locked."""

    start: Node
    path: bytes
    """The path after `start`, in whole units."""


class HybridCache:
    """KV and states of one device: a tree, the order in which its states are evicted, and where requests leave them."""

    def __init__(
        self,
        tree: RadixTree,
        admission: Admission,
        order: Order,
        step_tokens: int = STEP_TOKENS,
        turns: Turns | None = None,
        host: Tier | None = None,
        explains: bool = True,
        fills_spare: bool = False,
    ) -> None:
        """Own `tree` from now on; `order` ranks no node yet.

        What is evicted is offered to `host`, if there is one. With `explains` false, misses have no causes. With
        `fills_spare`, slots that are spare may hold states between steps, unless there is `host`.
        """
        self.tree = tree
        self.admission = admission
        self.order = order
        self.turns = turns or Turns(tree.unit_tokens)
        self.host = host
        self._awaited = AwaitedStates()
        self.counters = Counters()
        self.trials = Trials()
        self._least_tokens = max(LEAST_GAIN_TOKENS, tree.unit_tokens)
        self.misses = Misses(tree) if explains else None
        self.watchers: tuple[Watcher, ...] = ()
        self.retention: Retention | None = None
        """None until the first wish."""
        self.sessions: Sessions | None = None
        """None where nobody closes any; what only a closed one left is demoted (`sessions.py`)."""
        self._step_tokens, self._fills_spare = step_tokens, fills_spare and host is None
        self._rerank()

    def succeed(self, flushed: "HybridCache", now_s: float) -> None:
        """Take the place of a cache that is flushed: counts run on, and nothing of what it knew is kept."""
        tree = flushed.tree
        tree.memory = tree.host_memory = None
        self.counters, self.watchers = flushed.counters, flushed.watchers
        self.sessions = flushed.sessions
        if self.sessions is not None:
            self.sessions.flushed()
        # A server makes its cache anew as it starts, too: where nothing was served, nothing was flushed.
        if self.misses is not None and self.counters.num_requests:
            self.misses = Misses(self.tree, now_s)

    # Requests that wait

    def match(self, request: Request) -> Match:
        """Match `request`, and find the state that it would start from: the last prompt token is always computed."""
        return self.tree.match(self._path(request), request.num_prompt_tokens - 1, request.namespace)

    def awaits(self, key: Hashable) -> bool:
        """True if the request of `key` waits."""
        return key in self._awaited

    @property
    def awaiting(self) -> Set[Hashable]:
        """The requests that wait, by key."""
        return self._awaited.keys()

    def queue(self, gone: Iterable[Hashable], came: Iterable[tuple[Hashable, Node]]) -> None:
        """Requests that no longer wait, by key, and those that wait and would start from a state, or from a root.

        A request that waits already keeps its place, and would start from the state that it comes with now.
        """
        awaited = self._awaited
        noted = []
        for state in [*map(awaited.remove, gone), *chain.from_iterable(starmap(awaited.put, came))]:
            first = awaited.first(state)
            if state.first_waiting != first:
                state.first_waiting = first
                noted.append(state)
        self._rerank(noted)

    @property
    def num_awaited(self) -> int:
        """States that waiting requests would start from, and that are evicted after all others."""
        return self.order.num_awaited

    # Requests that run

    def lock(self, node: Node) -> None:
        """Keep the state of `node`, and so the KV of its path."""
        self.tree.lock(node)
        self._rerank()

    def unlock(self, node: Node) -> None:
        """Give back one lock."""
        self.tree.unlock(node)
        self._rerank()

    def move_lock(self, old: Node | None, node: Node | None) -> None:
        """Lock `node` in place of `old`; None stands for none."""
        if node is old:
            return
        if node is not None:
            self.tree.lock(node)
        if old is not None:
            self.tree.unlock(old)
        self._rerank()

    def begin(self, lease: Lease, now_s: float, grid_tokens: int | None = None) -> Explanation | None:
        """Count a request that has been matched, touch the state that it resumes from, and return what it misses.

        States stand at multiples of `grid_tokens`; None if they stand where the admission says. Returns None if nothing
        is explained.
        """
        request, match = lease
        explanation = None
        if self.misses is not None:
            explanation = self.misses.explain(lease, grid_tokens or self.admission.grid_tokens)
            self.counters.missed(explanation)
        left = match.last if self.turns.arrived(lease) is not None else match.checkpoint
        self.order.arrived(lease, now_s)
        noted = self.turns.close(left)
        counters, node = self.counters, match.checkpoint
        counters.num_requests += 1
        counters.num_prompt_tokens += request.num_prompt_tokens
        if node.parent is not None:
            counters.num_hit_tokens += node.depth
            counters.num_states_hit += 1
            for watcher in self.watchers:
                watcher.resuming(node, now_s)
            node.num_hits += 1
            leaves_another = node.on_trial and match.num_seen_tokens - node.depth >= self._least_tokens
            if node.on_trial:
                self.trials.resumed()
            self._use(node, now_s)
            node.on_trial = leaves_another
            noted.append(node)
            if self.host is not None:
                self.host.resumed(request.num_prompt_tokens - node.depth)
        self._rerank(noted)
        return explanation

    def load(self, request: Request, depth: int, num_tokens: int) -> float:
        """Hold on the device what the host has of `request` up to `depth`; returns the seconds that it takes.

        `num_tokens` tokens of KV are not on the device yet.
        """
        assert self.host is not None
        (node,) = self.tree.insert(self._path(request), [depth], request.namespace)
        if node.held_since_s is None:
            node.held_since_s = request.arrival_s
        load_s = self.host.load_s(num_tokens)
        self.counters.num_loads += 1
        self.counters.num_loaded_tokens += num_tokens
        self.counters.load_s += load_s
        self._rerank()
        return load_s

    def plan(
        self,
        lease: Lease,
        asked: Sequence[int] = (),
        shared: Sequence[int] = (),
        known_distance: int | None = None,
        system_end: int = 0,
    ) -> PrefillPlan:
        """Where a request that has begun leaves states, by an admission that plans ahead.

        `asked` are positions that the program named, `shared` those where requests that wait leave the prompt, the
        deepest first. `known_distance` is how far before the prompt's end its template's next turn leaves it,
        `system_end` where its system prompt ends, 0 if that is not known. All are in tokens.
        """
        end = lease.request.num_prompt_tokens
        if end in asked and self._stands_at(end, lease.request):
            asked = [position for position in asked if position != end]
        turn = self.turns.next_turn(lease, known_distance)
        wishes = Wishes(
            asked, shared, turn, system_end, self.turns.is_usual(lease), self._fills_spare, self._num_trials(lease)
        )
        return prefill_plan(self.admission, lease, self.tree.unit_tokens, self._step_tokens, wishes)

    def _num_trials(self, lease: Lease) -> int:
        """Number of states that a request may leave on trial: none of one that continues a conversation."""
        is_busy = self.host is not None and not self.host.is_half_free
        return 0 if is_busy or self.turns.distance(lease) is not None else self.trials.num_allowed

    def deserves(self, lease: Lease, depth: int, role: Role, granted: Set[int], need: Need, now_s: float) -> bool:
        """True if a state that is planned at `depth` is worth more than what would be evicted for it next.

        Nothing is evicted for one that fills a spare slot. `granted` are the depths of the request's states that have
        one.
        """
        if role is Role.WAYPOINT:
            return False
        victim = self.order.victim(need, now_s)
        if victim is None or victim.first_waiting is not None:
            return False
        above = max([each for each in granted if each < depth], default=lease.match.checkpoint.depth)
        below = min([each for each in granted if each > depth], default=lease.request.num_prompt_tokens)
        share = self.turns.share(self.turns.prompt_end(lease), depth, below) if role is Role.END else 1.0
        planned = PlannedState(lease, depth, role, share, depth - above)
        return victim.leaving is not None or self.order.outranks(planned, victim, need, now_s)

    def insert(
        self,
        lease: Lease,
        depths: Sequence[int],
        now_s: float,
        suffix: Suffix | None = None,
        closing: int = NO_CLOSING,
        absent: Mapping[int, Cause] = _NONE_ABSENT,
        trials: Collection[int] = (),
    ) -> list[Node]:
        """Hold the path of `lease` up to the last of `depths`, rising, in tokens, and a state at each.

        `suffix` says where the request is already held to, so that only what comes after is looked at. `closing` says
        how the answer closed, at the request's end. `absent` are depths of planned states that the request lacks, as
        far as they lie on what is held now, and `trials` those of states that are left on trial. Returns the nodes of
        the states.
        """
        made = self._insert(lease, depths, now_s, suffix, trials)
        if absent and self.misses is not None:
            self._note_absent(made[-1], 0 if suffix is None else suffix.start.depth, absent, now_s)
        own = self.turns.note(made, lease, closing)
        if self.host is not None:
            self.host.left(lease.request, depths, now_s)
        self._rerank(made + own)
        return made

    # Memory that is short

    def evict(self, need: Need, now_s: float) -> Freed | None:
        """Evict the state of least worth for `need`; None if nothing may be evicted."""
        victim, is_named = self._victim(self.order.victim, need, now_s)
        return None if victim is None else self.evict_node(victim, need, now_s, is_named=is_named)

    def next_to_leave(self, need: Need, now_s: float) -> NodeView | None:
        """The victim behind those that are leaving already; None if only awaited or retained states are left."""
        return self._victim(self.order.next_to_leave, need, now_s)[0]

    def evict_node(self, victim: NodeView, need: Need, now_s: float, *, is_named: bool = True) -> Freed:
        """Evict `victim`, a ranked node of this tree, for `need`; worth has decided only if the order has named it."""
        assert isinstance(victim, Node)
        explains = self.misses is not None
        kept = kept_instead(self.order, victim, need) if explains and is_named else None
        if self.host is not None:
            self.host.offer(victim, now_s)
        self.order.evicting(victim, now_s)
        for watcher in self.watchers:
            watcher.evicting(victim, need, now_s, kept)
        if explains:
            victim.absent(Absence(victim.depth, EVICTED_FOR[need], now_s, kept))
        self.counters.num_evictions_unused += not victim.num_hits
        if victim.on_trial:
            self.trials.evicted()
        victim.leaving = None
        freed = self.tree.evict(victim)
        self.counters.num_evictions[need] += 1
        self.counters.num_evicted_tokens += freed.num_tokens
        self._rerank()
        return freed

    def evict_next(self, node: Node, place: int) -> None:
        """Evict `node` before all others, in rising order of `place`, unless a request starts from it first."""
        node.leaving = place
        self._rerank([node])

    # What a name space wishes for its own

    def retain(self, node: Node, until_s: float, now_s: float) -> bool:
        """Evict others of the name space of `node`, a state, in its place; False if too many are retained already."""
        self.retention = self.retention or Retention()
        if not self.retention.retain(node, until_s, now_s):
            return False
        node.leaving, node.on_trial = None, False
        self._rerank([node])
        return True

    def demote(self, node: Node) -> bool:
        """Evict `node`, a state, before others of its name space; False if too many are demoted already."""
        self.retention = self.retention or Retention()
        return self.retention.demote(node)

    def evict_own(self, root: Node, need: Need, now_s: float) -> Freed | None:
        """Evict the next victim of the name space of `root` that is not retained; None if it has none to evict.

        It is looked for among the next `MAX_PASSED` victims, and no waiting request would start from it.
        """
        own, _ = self._own_victim(root, self.order.victim, _is_awaited, need, now_s)
        return None if own is None else self.evict_node(own, need, now_s, is_named=False)

    def _victim(self, first: _First, need: Need, now_s: float) -> tuple[NodeView | None, bool]:
        """The victim that `first` names and True, or the state of its name space evicted in its place and False."""
        if not (wishes := self.retention):
            return first(need, now_s), True
        for node in wishes.take_back():
            self._set_aside(node, is_aside=False)
        victim = first(need, now_s)
        if victim is None or not is_ranked(victim):
            return victim, True
        assert isinstance(victim, Node)
        for node in wishes.demoted(root_of(victim)):
            if may_pay(node, need):
                return node, False
        if wishes.is_retained(victim, now_s):
            payer, num_passed = self._payer(victim, first, wishes, need, now_s)
            if payer is not None:
                if wishes.paid(victim, payer.freed_tokens, num_passed):
                    self._set_aside(victim, is_aside=True)
                return payer, False
        wishes.evicted()
        return victim, True

    def _payer(
        self, victim: Node, first: _First, wishes: Retention, need: Need, now_s: float
    ) -> tuple[Node | None, int]:
        """The next victim of the name space of `victim` that is not retained, and how many stand between them.

        None if there is none.
        """
        root = root_of(victim)
        # What is in use is no victim, and no rule takes it for evicted.
        self.lock(victim)
        payer, num_passed = self._own_victim(root, first, lambda node: not is_ranked(node), need, now_s)
        self.unlock(victim)
        if payer is None:
            payers = (node for node in held_below(root) if may_pay(node, need) and not wishes.is_retained(node, now_s))
            payer = min(payers, key=lambda node: (node.last_hit_s, node.serial), default=None)
        return payer, num_passed

    def _own_victim(
        self, root: Node, first: _First, ends: Callable[[NodeView], bool], need: Need, now_s: float
    ) -> tuple[Node | None, int]:
        """The first victim of the name space of `root` that is not retained, and how many of others it comes after.

        None if there is none among the next `MAX_PASSED` victims, or before the first that `ends`.
        """
        own, passed = None, list[Node]()
        while own is None and len(passed) < MAX_PASSED:
            node = first(need, now_s)
            if node is None or ends(node):
                break
            assert isinstance(node, Node)
            if root_of(node) is root and not (self.retention and self.retention.is_retained(node, now_s)):
                own = node
            else:
                passed.append(node)
                self.lock(node)
        for node in passed:
            self.tree.unlock(node)
        self._rerank()
        return own, len(passed)

    def _set_aside(self, node: Node, *, is_aside: bool) -> None:
        node.set_aside = is_aside
        self._rerank([node])

    def _use(self, node: Node, now_s: float) -> None:
        """A request has resumed from `node`, or left its state."""
        node.last_hit_s = node.last_pass_s = now_s
        node.leaving = None
        node.on_trial = False
        if self.retention:
            self.retention.used(node)

    def _insert(
        self, lease: Lease, depths: Sequence[int], now_s: float, suffix: Suffix | None, trials: Collection[int] = ()
    ) -> list[Node]:
        tree, request = self.tree, lease.request
        num_states = tree.num_states
        if suffix is None:
            made = tree.insert(self._path(request), depths, request.namespace)
        else:
            made = tree.insert(suffix.path, depths, request.namespace, suffix.start)
        num_written, num_trials = tree.num_states - num_states, 0
        self.counters.num_states_written += num_written
        for node in made:
            is_new = node.held_since_s is None
            on_trial = (is_new or node.on_trial) and node.depth in trials
            self._use(node, now_s)
            if is_new:
                node.held_since_s = now_s
                num_trials += on_trial
            node.on_trial = on_trial
        self.trials.left(num_trials, num_written - num_trials)
        self.order.admitted(made, lease, now_s)
        return made

    def _note_absent(self, end: Node, start: int, absent: Mapping[int, Cause], now_s: float) -> None:
        """Remember on the path to `end`, beyond `start` tokens, which planned states there are not."""
        for depth, cause in absent.items():
            if not start < depth <= end.depth:
                continue
            node = end
            while node.parent is not None and node.parent.depth >= depth:
                node = node.parent
            if node.depth > depth or not node.has_state:
                node.absent(Absence(depth, cause, now_s))

    def _rerank(self, noted: Sequence[Node] = ()) -> None:
        """Bring the order up to date with what has changed in the tree, and with `noted`, whose facts have."""
        order, host = self.order, self.host
        for node in dict.fromkeys([*self.tree.take_changed(), *noted]):
            if node.has_state and not node.num_locks:
                order.update(node)
            else:
                order.discard(node)
                if not node.has_state:
                    if self.retention:
                        node.set_aside = False
                        self.retention.gone(node)
                    if self.sessions is not None:
                        self.sessions.gone(node)
            if host is not None:
                host.touch(node)

    def check_invariants(self) -> None:
        """Raise `AssertionError` unless the tree is sound and the order holds exactly what may be evicted."""
        check_invariants(self.tree)
        held = {node for node in self.tree.nodes() if node.has_state}
        wrong = set(self.order) ^ {node for node in held if not node.num_locks}
        assert not wrong, f"{wrong}: ranked and in use, or neither"
        self._awaited.check_invariants()
        wrong = {node for node in held if node.first_waiting != self._awaited.first(node)}
        assert not wrong, f"{wrong}: awaited by others than those who wait"
        (self.retention or Retention()).check_invariants(held)
        (self.sessions or Sessions()).check_invariants(held)

    def _path(self, request: Request) -> bytes:
        tree = self.tree
        return request.path[: request.num_known_tokens // tree.unit_tokens * tree.unit_bytes]

    def _stands_at(self, depth: int, request: Request) -> bool:
        """True if there is a state after `depth` tokens of `request`.

        No match of the request finds the one at the end of its prompt: it could not start from there.
        """
        return self.tree.match(self._path(request), depth, request.namespace).checkpoint.depth == depth
