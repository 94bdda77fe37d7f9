"""LRU as in stock SGLang 0.5.23 (`srt/mem_cache/unified_cache`): KV and states age apart.

KV is evicted leaf by leaf, the leaf first through which no request has run for longest; states have a list of their
own, on which only the state that a request started from is refreshed, interior ones included.
"""

from marconi.policy.base import NodeView, Scope
from marconi.policy.eviction.ranked import RankedEviction


class SeparateLru(RankedEviction):
    """Two orders: KV by last pass, states by last hit."""

    scope = Scope.ANY

    def worth(self, node: NodeView) -> float:
        """When a request last started from it."""
        return node.last_hit_s

    def worth_of_kv(self, node: NodeView) -> float:
        """When a request last ran through it."""
        return node.last_pass_s
