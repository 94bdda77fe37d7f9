"""ET-LRU (after arXiv 2510.15152): least expected tail excess latency, under Poisson turns and belief decay.

Each conversation is alive or over. While alive it brings turns at rate `turn_per_s` (r) and ends at rate `end_per_s`
(m), both exponential. After d seconds of silence the belief that it is alive is, by Bayes,

    belief(d) = e^(-(r+m)d) / (e^(-(r+m)d) + m/(r+m) (1 - e^(-(r+m)d)))

1 at a turn and falling ever after, for all conversations alike; its next turn is due at the rate r belief(d).

Tail excess latency is what a prompt has uncached beyond the budget xi, in tokens. Evicting a state drops the cached
tokens of its conversation, of length L, from its depth c to that of the state above, c'. With a next prompt that adds
Q tokens the expected excess grows by

    loss = E[(L + Q - c' - xi)+] - E[(L + Q - c - xi)+]

and the worth of a state is belief(d) * loss / bytes that its eviction frees. For a block of one token the loss is
P(L + Q - c' > xi); dividing by bytes carries it over to spans and states of a size. The state of least worth is evicted
first. At xi = 0 and equal blocks this is LRU; for a known Q and a belief that never falls it is T-LRU's two sides. The
turns, the ends and the criterion are the paper's; the law of Q and the division by bytes are ours.

Q is taken as exponential with mean `added_tokens` (q), so E[(Q - x)+] is q e^(-x/q) for x >= 0 and q - x below.

Beliefs fall between updates, but their order stays: of equal losses per byte the longest silent is the least. So losses
per byte are cut to classes of half an octave, and a victim is the least among the classes' longest silent:
O(number of classes + log n). Silence is the time since a request last ran through or ended at the leaf.
"""

import math
from collections.abc import Sequence

import numpy as np

from marconi.policy.base import Costs, Eviction, Need, NodeView, Scope
from marconi.policy.eviction.conversation import Conversation, Conversations
from marconi.policy.eviction.order import VictimQueue
from marconi.policy.forecast.hazard import Floats
from marconi.policy.request import Lease
from marconi_lab.eviction.tlru import at_least_zero

_CLASSES_PER_OCTAVE = 2
_LOG_STEP = math.log(2) / _CLASSES_PER_OCTAVE
_ROUNDING = 1e-9
"""Part of a class by which rounding may miss; keeps equal losses in one class."""


class TurnModel:
    """How conversations continue: turns, ends and what a prompt adds."""

    __slots__ = ("added_tokens", "end_per_s", "turn_per_s")

    def __init__(self, turn_per_s: float, end_per_s: float, added_tokens: float) -> None:
        """Rates a second and a mean in tokens; `ValueError` unless each is finite and above 0."""
        for name, value in (("turn_per_s", turn_per_s), ("end_per_s", end_per_s), ("added_tokens", added_tokens)):
            if not 0 < value < math.inf:
                raise ValueError(f"{name} must be finite and > 0, got {value}")
        self.turn_per_s = turn_per_s
        self.end_per_s = end_per_s
        self.added_tokens = added_tokens

    def log_belief(self, silence_s: float) -> float:
        """Natural logarithm of the belief that a conversation silent for `silence_s` is alive."""
        rate = self.turn_per_s + self.end_per_s
        exponent = rate * silence_s
        share = self.end_per_s / rate
        if exponent > 500:  # e^exponent alone decides, and does not fit a float much further
            return -exponent - math.log(share)
        return -math.log1p(share * math.expm1(exponent))

    def log_loss(self, slack_tokens: float, cached_tokens: int) -> float:
        """Natural logarithm of the expected excess tokens that the loss of `cached_tokens` adds.

        `slack_tokens` is what the next prompt may then add and still meet the budget; negative if nothing would.
        """
        mean = self.added_tokens
        if slack_tokens >= 0:  # by logarithms throughout, since the tail of an exponential underflows
            return math.log(-math.expm1(-cached_tokens / mean) * mean) - slack_tokens / mean
        with_them = slack_tokens + cached_tokens
        if with_them <= 0:
            return math.log(cached_tokens)
        return math.log(mean - slack_tokens - mean * math.exp(-with_them / mean))


class ExpectedTailLru(Eviction):
    """Evicts the least expected tail excess latency per byte."""

    scope = Scope.LEAVES

    def __init__(
        self, costs: Costs, turns: TurnModel, budget_tokens: int, needs: frozenset[Need] = frozenset({Need.BYTES})
    ) -> None:
        """A budget of `budget_tokens` uncached tokens (xi); `ValueError` if it is negative."""
        self._costs = costs
        self._turns = turns
        self._budget_tokens = at_least_zero("budget_tokens", budget_tokens)
        self._conversations = Conversations()
        self._needs = needs
        self._queues: dict[int, VictimQueue] = {}
        self._class_of: dict[NodeView, int] = {}

    def admitted(self, nodes: Sequence[NodeView], lease: Lease, now_s: float) -> None:
        """Make the conversations of `nodes` longer: their earlier states are no leaves and not ranked."""
        for node in nodes:
            self._conversations.admitted(node)

    def evicting(self, node: NodeView, now_s: float) -> None:
        """Take `node` out of its conversation."""
        self._conversations.drop(node)

    def loss_class(self, node: NodeView, conversation: Conversation) -> int:
        """The class of the expected excess tokens of the next prompt per byte freed."""
        above = node.checkpoint_depth_above
        slack_tokens = self._budget_tokens - conversation.num_tokens + above
        log_loss = self._turns.log_loss(slack_tokens, node.depth - above)
        return math.floor((log_loss - math.log(self._costs.freed_bytes(node))) / _LOG_STEP + _ROUNDING)

    def update(self, node: NodeView) -> None:
        """Rank `node` anew."""
        conversation = self._conversations.of(node)
        assert conversation is not None, f"{node} was never admitted"
        index = self.loss_class(node, conversation)
        if self._class_of.get(node, index) != index:
            self._unrank(node)
        self._class_of[node] = index
        self._put(node, index)

    def discard(self, node: NodeView) -> None:
        """Forget its rank."""
        self._unrank(node)

    def worths(self, nodes: Sequence[NodeView], now_s: float) -> Floats:
        """The logarithm of the worth, the last pass, and the depth, negated."""
        rows = np.full((len(nodes), 3), np.nan)
        for at, node in enumerate(nodes):
            index = self._class_of.get(node)
            if index is not None:
                worth = self._turns.log_belief(now_s - node.last_pass_s) + index * _LOG_STEP
                rows[at] = worth, node.last_pass_s, -node.depth
        return rows

    def victim(self, need: Need, now_s: float) -> NodeView | None:
        """The leaf of least worth; `KeyError` for a need that the rule was not made for."""
        if need not in self._needs:
            raise KeyError(need)
        least: tuple[float, float, int, int] | None = None
        chosen: NodeView | None = None
        for index, queue in self._queues.items():
            head = queue.first()
            assert head is not None, "a class without nodes is dropped"
            worth = self._turns.log_belief(now_s - head.last_pass_s) + index * _LOG_STEP
            order = (worth, head.last_pass_s, -head.depth, head.serial)
            if least is None or order < least:
                least, chosen = order, head
        return chosen

    def _put(self, node: NodeView, index: int) -> None:
        self._queues.setdefault(index, VictimQueue()).put(node, (node.last_pass_s, -node.depth))

    def _unrank(self, node: NodeView) -> None:
        index = self._class_of.pop(node, None)
        if index is not None:
            queue = self._queues[index]
            queue.discard(node)
            if not len(queue):
                del self._queues[index]
