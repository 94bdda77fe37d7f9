import math

from marconi.policy.admission.plan import Judicious
from marconi.policy.base import Costs, Need
from marconi.policy.request import Request, pack
from marconi.tree import Node, RadixTree
from marconi_lab.eviction.gdsf import GreedyDualSizeFrequency
from policy.random_runs import Choose, Extent, NaiveConversations, compare, depth_above, extents
from rig.budget_cache import BudgetCache, JointBudget


def greedy_dual(costs: Costs) -> Choose:
    inflation = 0.0
    inflation_at_use: dict[Node, float] = {}
    num_seen = 0

    def choose(candidates: list[Node], need: Need, now_s: float, conversations: NaiveConversations) -> Node:
        nonlocal inflation, num_seen
        for node in conversations.uses[num_seen:]:
            inflation_at_use[node] = inflation
        num_seen = len(conversations.uses)

        def priority(node: Node) -> float:
            saved_flops = costs.flops(node.depth) - costs.flops(depth_above(node))
            freed_bytes = node.freed_tokens * costs.kv_bytes_per_token + costs.state_bytes
            return inflation_at_use[node] + (node.num_hits + 1) * saved_flops / freed_bytes if freed_bytes else math.inf

        victim = min(candidates, key=lambda node: (priority(node), node.serial))
        if priority(victim) < math.inf:
            inflation = max(inflation, priority(victim))
        return victim

    return choose


@extents
def test_every_victim_is_that_of_the_definition(extent: Extent) -> None:
    """Each of them in both extents: the definition's inflation is that of all victims so far."""
    compare(
        extent._replace(every=1), lambda costs, needs, _: (GreedyDualSizeFrequency(costs, needs), greedy_dual(costs))
    )


def serve(cache: BudgetCache, first_id: int, num_tokens: int, arrival_s: float) -> None:
    path = pack(range(first_id, first_id + num_tokens + 1))
    cache.serve(Request(path, num_tokens, 1, num_tokens + 1, arrival_s))


def test_inflation_rises_to_each_victim_and_overtakes_what_is_not_used_again() -> None:
    costs = Costs(kv_bytes_per_token=0, state_bytes=1, flops=float)  # a state of n tokens has priority n, once used
    tree = RadixTree()
    rule = GreedyDualSizeFrequency(costs)
    cache = BudgetCache(tree, Judicious(least_tokens=1), rule, costs, JointBudget(2))

    def depths() -> list[int]:
        return sorted(node.depth for node in tree.nodes())

    serve(cache, 1000, 50, arrival_s=1)  # priority 50
    serve(cache, 2000, 20, arrival_s=2)  # priority 20
    assert (depths(), rule.inflation) == ([20, 50], 0)
    serve(cache, 3000, 25, arrival_s=3)  # priority 25; 20 goes
    assert (depths(), rule.inflation) == ([25, 50], 20)
    serve(cache, 4000, 26, arrival_s=4)  # priority 20 + 26; 25 goes
    assert (depths(), rule.inflation) == ([26, 50], 25)
    serve(cache, 5000, 30, arrival_s=5)  # priority 25 + 30; 20 + 26 goes
    assert (depths(), rule.inflation) == ([30, 50], 46)
    serve(cache, 6000, 10, arrival_s=6)  # priority 46 + 10; 50, long unused, goes though it saves the most
    assert (depths(), rule.inflation) == ([10, 30], 50)


def test_a_state_used_twice_counts_twice() -> None:
    costs = Costs(kv_bytes_per_token=0, state_bytes=1, flops=float)
    tree = RadixTree()
    cache = BudgetCache(tree, Judicious(least_tokens=1), GreedyDualSizeFrequency(costs), costs, JointBudget(2))
    serve(cache, 1000, 30, arrival_s=1)
    path = pack(range(1000, 1032))
    cache.serve(Request(path[: 31 * 4], 31, 0, 31, arrival_s=2))  # starts from 30 tokens, leaves 31
    assert sorted(node.depth for node in tree.nodes()) == [30, 31]
    serve(cache, 2000, 40, arrival_s=3)
    assert sorted(node.depth for node in tree.nodes()) == [30, 40], "2 * 30 and 1 * 1"
