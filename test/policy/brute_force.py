"""The brute-force twin of `BudgetCache` with `Judicious` admission: its specification, without a tree.

What is held is a plain list of *words*. A word is a string: its first letter is the namespace, every other letter a
unit. A state stands at a word; KV is held for every prefix of a word that has a state; a ghost is a word that is
remembered. Whatever the cache derives step by step is recomputed here from that list, by its definition:

    children of a state      different letters that go on from it among the words held
    freed tokens             letters that no other state needs, or none below a child
    checkpoint depth above   the longest other state that is a prefix
    last pass                the latest time that a request ran through or ended at the word

A *place* is where a word ends or two words part: there the tree has a node, whose age breaks ties. A rule is tested
by giving its `Order` beside it.
"""

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from os.path import commonprefix  # of strings, letter by letter
from typing import NamedTuple

from marconi.policy.base import Costs, Need
from marconi.policy.request import Request, unpack
from rig.budget_cache import Budget, JointBudget

from .brute_order import Order


class View(NamedTuple):
    """A state as a rule sees it: a `NodeView` with its word."""

    word: str
    serial: int
    depth: int
    checkpoint_depth_above: int
    freed_tokens: int
    last_hit_s: float
    last_pass_s: float
    num_hits: int
    num_children: int
    num_locks: int


@dataclass(slots=True)
class State:
    """What is kept of a state beside its word."""

    last_hit_s: float = 0.0
    num_locks: int = 0


@dataclass(slots=True)
class Place:
    """What outlives a state, as long as the place is known."""

    serial: int
    num_hits: int = 0


class Lease(NamedTuple):
    """A running request, and what was known of it when it came; lengths in letters, the namespace's among them."""

    request: Request
    word: str
    checkpoint: str
    num_seen: int
    diverges: bool


@dataclass(frozen=True, slots=True)
class TwinTree:
    """What the twin shares with the tree and the admission rule."""

    unit_tokens: int
    max_ghosts: int
    grid_tokens: int


@dataclass(frozen=True, slots=True)
class TwinRule:
    """A rule by its definition, with the scope that the rule states."""

    order: Order
    max_children: int


class BruteForceCache:
    """The verbs of `BudgetCache`, by definition."""

    def __init__(self, tree: TwinTree, rule: TwinRule, costs: Costs, budget: Budget) -> None:
        self.unit_tokens = tree.unit_tokens
        self.max_ghosts = tree.max_ghosts
        self.grid_tokens = tree.grid_tokens
        self.rule = rule
        self.order = rule.order
        self.costs = costs
        self.budget = budget
        self.states: dict[str, State] = {}
        self.ghosts: dict[str, None] = {}
        """Oldest first."""
        self.places: dict[str, Place] = {}
        self.passed_s: dict[str, float] = {}
        """When a request last ran through or ended at a prefix."""
        self.victims: list[tuple[str, int]] = []
        """Every victim so far, with the tokens that it freed."""
        self.num_made = 0

    # What is held

    def depth(self, word: str) -> int:
        """In tokens."""
        return (len(word) - 1) * self.unit_tokens

    def users(self) -> Counter[str]:
        """Every prefix whose KV is held, with the number of states that need it."""
        return Counter(word[:end] for word in self.states for end in range(2, len(word) + 1))

    @property
    def num_tokens(self) -> int:
        return len(self.users()) * self.unit_tokens

    def views(self) -> list[View]:
        """Every state, as a rule sees it."""
        users = self.users()
        children = Counter(prefix[:-1] for prefix in users)
        return [self._view(word, users, children[word]) for word in self.states]

    def _view(self, word: str, users: Counter[str], num_children: int) -> View:
        state, place = self.states[word], self.places[word]
        prefixes = [word[:end] for end in range(2, len(word) + 1)]
        freed = [] if num_children else [prefix for prefix in prefixes if users[prefix] == 1]
        above = max((self.depth(prefix) for prefix in prefixes[:-1] if prefix in self.states), default=0)
        return View(
            word,
            place.serial,
            self.depth(word),
            above,
            len(freed) * self.unit_tokens,
            state.last_hit_s,
            self.passed_s[word],
            place.num_hits,
            num_children,
            state.num_locks,
        )

    # Requests

    def begin(self, request: Request, now_s: float) -> Lease:
        """Match and lock."""
        letters = unpack(request.path)[: request.num_known_tokens // self.unit_tokens]
        word = "".join(map(chr, [request.namespace, *letters]))
        known = [*self.states, *self.ghosts]
        num_seen = max((len(commonprefix([word, other])) for other in known), default=0) or 1  # noqa: RUF071
        diverges = any(len(other) > num_seen and other.startswith(word[:num_seen]) for other in known)
        usable = (state for state in self.states if word.startswith(state))
        fitting = (state for state in usable if self.depth(state) < request.num_prompt_tokens)
        checkpoint = max(fitting, key=len, default=word[0])
        if checkpoint in self.states:
            self.states[checkpoint].num_locks += 1
            self.places[checkpoint].num_hits += 1
            self._run_through(checkpoint, now_s)
        return Lease(request, word, checkpoint, num_seen, diverges)

    def finish(self, lease: Lease, now_s: float) -> None:
        """Leave states and evict until the budget is kept."""
        source = lease.checkpoint if lease.checkpoint in self.states else None
        if source is not None:
            self.states[source].num_locks -= 1
        left = self.admitted(lease)
        while left and self._exceeds(self.depth(left[-1]), len(left)) is not None:
            del left[0]
        if not left:
            return
        for word in left:
            self.states.setdefault(word, State())
        last = left[-1]
        self.ghosts = {ghost: None for ghost in self.ghosts if not last.startswith(ghost)}
        self._note_places()
        for word in left:
            self._run_through(word, now_s)
        self.states[last].num_locks += 1
        fits = self._shrink(now_s)
        self.states[last].num_locks -= 1
        if not fits:
            self._shrink(now_s)

    def admitted(self, lease: Lease) -> list[str]:
        """The words that get a state: where the prompt parts from what was known, and the last decoded token."""
        request, word, hit = lease.request, lease.word, self.depth(lease.checkpoint)
        num_processed = request.num_prompt_tokens + max(request.num_output_tokens, 1) - 1
        end = min(num_processed, request.num_known_tokens)
        num_seen_tokens = (lease.num_seen - 1) * self.unit_tokens
        branch = min(num_seen_tokens, request.num_prompt_tokens - 1)
        parts = lease.diverges or branch < num_seen_tokens
        depths = {depth // self.grid_tokens * self.grid_tokens for depth in ((branch, end) if parts else (end,))}
        return [word[: 1 + depth // self.unit_tokens] for depth in sorted(depths) if depth > hit]

    def _run_through(self, word: str, now_s: float) -> None:
        self.states[word].last_hit_s = now_s
        for end in range(1, len(word) + 1):
            self.passed_s[word[:end]] = now_s

    # Memory

    def _exceeds(self, num_tokens: int, num_states: int) -> Need | None:
        kv_bytes = num_tokens * self.costs.kv_bytes_per_token
        state_bytes = num_states * self.costs.state_bytes
        if isinstance(self.budget, JointBudget):
            return Need.BYTES if kv_bytes + state_bytes > self.budget.num_bytes else None
        if kv_bytes > self.budget.kv_bytes:
            return Need.KV
        return Need.STATE if state_bytes > self.budget.state_bytes else None

    def _shrink(self, now_s: float) -> bool:
        while (need := self._exceeds(self.num_tokens, len(self.states))) is not None:
            most = 0 if need is Need.KV else self.rule.max_children
            candidates = [view for view in self.views() if not view.num_locks and view.num_children <= most]
            if not candidates:
                return False
            victim = self.order.least(need, now_s, candidates)
            assert isinstance(victim, View)
            self.evict(victim.word)
        return True

    def evict(self, word: str) -> None:
        """Drop a state; of what no state needs any more, the places become ghosts, deepest first."""
        num_tokens = self.num_tokens
        del self.states[word]
        held = self.users()
        dead = [place for place in self.places if word.startswith(place) and len(place) > 1 and place not in held]
        for place in sorted(dead, key=len, reverse=True):
            self.ghosts[place] = None
        num_forgotten = max(0, len(self.ghosts) - self.max_ghosts)
        self.ghosts = dict.fromkeys(list(self.ghosts)[num_forgotten:])
        self._note_places()
        self.victims.append((word, num_tokens - self.num_tokens))

    def _note_places(self) -> None:
        """Number new places, shallowest first, and forget those that are gone."""
        words = sorted([*self.states, *self.ghosts])
        partings = map(commonprefix, pairwise(words))
        places = {*words, *(parting for parting in partings if len(parting) > 1)}
        self.places = {word: place for word, place in self.places.items() if word in places}
        for word in sorted(places - self.places.keys(), key=len):
            self.num_made += 1
            self.places[word] = Place(self.num_made)
