"""Where copies lie in SGLang's host pools: of every hosted node rows of KV, of every copy a slot.

A copy is held before it is filled (`tree/host.py`): what it needs beyond what lies there for others is asked for then,
and its path is filled from the front. Dropped rows return to their pool at once.

Source of the pools: `srt/mem_cache/pool_host/group.py`. Owner: the scheduler's thread.
"""

from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import PoolName

from marconi.engine.cache.memory import Segments, num_tokens, path_up
from marconi.tree import Node


class HostRows:
    """A `marconi.tree.memory.Memory` on SGLang's host pools. Indices are int64, a slot is a tensor of one index."""

    def __init__(self, pools: Any) -> None:
        """`pools` is SGLang's `HostPoolGroup` with KV and states."""
        self._pools = pools
        self.num_copied = 0
        """States that were copied. A flush restarts neither count: the pools and this outlive it."""
        self.num_dropped = 0
        """Copies that gave way to others, not those that a flush forgot."""
        self.clear()

    def clear(self) -> None:
        """Forget everything: the pools are cleared as well."""
        self.states: dict[Node, torch.Tensor] = {}
        self.ends: set[Node] = set()
        """Copies of states at which a request ended."""
        self._segments = Segments()

    def num_filled_tokens(self, node: Node) -> int:
        """Tokens of the path of `node`, from its front, whose rows are there."""
        for above in path_up(node):
            if num_there := self._segments.num_tokens(above):
                assert above.parent is not None
                return above.parent.depth + num_there
        return 0

    def fill(self, node: Node, rows: torch.Tensor, slot: torch.Tensor) -> None:
        """The KV of the path of `node` that was not there yet lies at `rows`, its state in `slot`."""
        from_depth = self.num_filled_tokens(node)
        assert from_depth + len(rows) == node.depth, f"{len(rows)} rows after {from_depth} tokens for {node}"
        for above in path_up(node):
            if above.depth <= from_depth:
                break
            assert above.parent is not None
            start = max(above.parent.depth, from_depth)
            self._segments.add(above, rows[start - from_depth : above.depth - from_depth])
        assert node not in self.states, f"{node} has a slot"
        self.states[node] = slot

    def path_rows(self, node: Node, from_depth: int) -> torch.Tensor:
        """Rows of the KV of the path of `node` from `from_depth` tokens on, in order."""
        return self._segments.along(node)[from_depth:]

    def all_kv(self) -> torch.Tensor:
        """Rows of all KV."""
        return self._segments.all()

    def all_states(self) -> torch.Tensor:
        """Slots of all states."""
        return torch.cat([*self.states.values(), torch.empty(0, dtype=torch.int64)])

    # Changes of the tree

    def held(self, node: Node) -> None:
        """`node` is to be filled."""
        self._segments.open(node)

    def dropped(self, node: Node) -> None:
        """Give the span's rows back."""
        if rows := self._segments.pop(node):
            self._pools.free(torch.cat(rows))

    def dropped_state(self, node: Node) -> None:
        """Give the state's slot back, if it was filled."""
        self.ends.discard(node)
        slot = self.states.pop(node, None)
        if slot is not None:
            self._pools.free(slot, pool=PoolName.MAMBA)
            self.num_dropped += 1

    def split(self, upper: Node, lower: Node) -> None:
        """Cut the rows where `upper` ends."""
        self._segments.split(upper, lower)

    def joined(self, upper: Node, lower: Node) -> None:
        """Put the rows together."""
        self._segments.join(upper, lower)

    def check_invariants(self, nodes: list[Node]) -> None:
        """Raise `AssertionError` unless it agrees with the hosted `nodes` of the tree."""
        assert set(nodes) == self._segments.nodes(), "rows of other spans than the tree's"
        assert {node for node in nodes if node.has_copy} == set(self.states), "slots of other copies than the tree's"
        for node in nodes:
            assert self._segments.num_tokens(node) == num_tokens(node), f"{node}: rows of another length"
        assert self.ends <= set(self.states), "the end of a request without its copy"
        rows, slots = self.all_kv(), self.all_states()
        assert len(torch.unique(rows)) == len(rows), "a row is held twice"
        assert len(torch.unique(slots)) == len(slots), "a slot on the host is held twice"
