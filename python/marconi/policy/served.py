"""A ranked tree in a server, which takes memory while requests run and asks for victims when it is short.

    begin    match, touch and lock the state that the request starts from            (`ranked_tree.py`)
    plan     the positions whose states are kept, those that only speculate on probation  (`admission/prefill.py`)
    leave    as the prefill passes them, and at the request's end: states and KV join the tree
    evict    whenever the pool of KV or of states is short                           (`ranked_tree.py`)

A state on probation takes a free slot or that of an older one on probation (`evict_on_probation`), never a proven
state's, nor a slot for want of which the request itself would take a proven state's. The owner of the pools is the
caller: the engine, or the replay that stands for it.
"""

from collections.abc import Collection, Sequence

from marconi.policy.admission.base import Admission
from marconi.policy.admission.prefill import STEP_TOKENS, PrefillPlan, Wishes, prefill_plan
from marconi.policy.eviction.base import Need
from marconi.policy.eviction.tiers import TieredEviction
from marconi.policy.forecast.turns import NO_CLOSING, Turns
from marconi.policy.lease import Lease
from marconi.policy.ranked_tree import Beyond, RankedTree
from marconi.policy.request import Request
from marconi.policy.waiting import AwaitedStates
from marconi.tree import Freed, Node, RadixTree


class ServedTree(RankedTree):
    """What a server's cache decides; all times are passed in, in seconds."""

    def __init__(
        self,
        tree: RadixTree,
        admission: Admission,
        tiers: TieredEviction,
        step_tokens: int = STEP_TOKENS,
        turns: Turns | None = None,
    ) -> None:
        super().__init__(tree, tiers)
        self._step_tokens = step_tokens
        self.admission = admission
        self.tiers = tiers
        self.turns = turns or Turns(tree.unit_tokens)
        self.awaited = AwaitedStates(tree)

    def plan(
        self,
        lease: Lease,
        asked: Sequence[int] = (),
        shared: Sequence[int] = (),
        known_distance: int | None = None,
    ) -> PrefillPlan:
        """Where a request that has begun leaves states.

        `asked` are positions that the program named, `shared` those where requests that wait leave the prompt, the
        deepest first. `known_distance` is how far before the prompt's end its template's next turn leaves it. All are
        in tokens.
        """
        end = lease.request.num_prompt_tokens
        if end in asked and self._stands_at(end, lease.request):
            asked = [position for position in asked if position != end]
        wishes = Wishes(asked, shared, self.turns.next_turn(lease, known_distance))
        return prefill_plan(self.admission, lease, self.tree.unit_tokens, self._step_tokens, wishes)

    def on_probation(self, plan: PrefillPlan, end: int | None, closing: int = NO_CLOSING) -> Collection[int]:
        """Which states of a finished request are there on probation; its last one is at `end` tokens, if it has one."""
        if end is not None and self.turns.is_end_on_probation(plan.is_end_on_probation, closing):
            return {*plan.on_probation, end}
        return plan.on_probation

    def leave(
        self,
        lease: Lease,
        depths: Sequence[int],
        now_s: float,
        on_probation: Collection[int] = (),
        beyond: Beyond | None = None,
        closing: int = NO_CLOSING,
    ) -> list[Node]:
        """The states of `lease` at `depths`, rising, and the KV before them join the tree; returns their nodes.

        Those at `on_probation` are put on probation, unless the state was there before. `beyond` is as of `insert`,
        `closing` says how the answer closed, at the request's end.
        """
        tree = self.tree
        known = {
            depth
            for depth in depths
            if depth in on_probation and self._deepest_within(depth, lease.request, beyond) == depth
        }
        made = self.insert(lease, depths, now_s, beyond)
        self.turns.note(made, lease, closing)
        for node in made:
            if node.depth not in on_probation:
                if node.on_probation:
                    tree.put_on_probation(node, False)
            elif node.depth not in known:
                tree.put_on_probation(node)
        self.tell()
        return made

    def arrive(self, lease: Lease, now_s: float) -> Lease:
        """As of every ranked tree; what is hit has proved itself."""
        self.turns.arrived(lease)
        super().arrive(lease, now_s)
        source = lease.match.checkpoint
        if source.on_probation:
            self.tree.put_on_probation(source, False)
        return lease

    def evict_on_probation(self, need: Need, now_s: float) -> Freed | None:
        """Give up the oldest state on probation; None if there is none that may go."""
        victim = self.tiers.victim_on_probation(need)
        return None if victim is None else self.give_up(victim, need, now_s)

    def _stands_at(self, depth: int, request: Request) -> bool:
        """Whether there is a state after `depth` tokens of `request` that is not on probation.

        No match of the request finds the one at the end of its prompt: it could not start from there.
        """
        node = self.tree.match(self._path(request), depth, request.namespace).checkpoint
        return node.depth == depth and not node.on_probation

    def _deepest_within(self, max_tokens: int, request: Request, beyond: Beyond | None) -> int:
        """Depth of the deepest state of `request` within `max_tokens`, which are no less than `beyond`'s."""
        if beyond is None:
            match = self.tree.match(self._path(request), max_tokens, request.namespace)
        elif beyond.node.children:
            match = self.tree.match(beyond.path, max_tokens, request.namespace, beyond.node)
        else:
            return beyond.node.depth
        return match.checkpoint.depth
