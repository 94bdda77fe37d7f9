"""A store behind the host: files, or a service, that hold what the host drops, for this server and others.

The copies that the host would drop next are chosen ahead, as the device's victims are (`write_behind.py`): they are
*leaving*, are dropped before all others, and are written while the server continues:

    free + leaving + being written  >=  MARGIN of the host's pools, of KV and of states, or what lately came at once

    write    what one use would save, if its pages that the store lacks are read faster than they are computed. A copy
             that is used meanwhile stays, and what is stored already is not written again
    read     what a waiting prompt would start from, if that saves time and room can be made. The copies that give way
             are leaving, so most of them are stored

A state is written with the KV of its path beyond the nearest shallower one that is stored, so a store holds nothing
that depends on anything but what lies before it. What it loses is a miss, and is not written again for that.

When a server ends, and on demand, what both tiers hold is written, `most_valuable_first`: what the device would evict
last, then the copies by the host's own order, at last what the device is about to evict without one. What a client or
the end of a session has demoted is not written: it would come back as valuable as the rest.

`bytes_per_s` is what reading was measured at; until it is, `FIRST_BYTES_PER_S`. What is written a day may be bounded,
for a disk's sake: evenly, an hour's worth at once. The states that are saved at the end, or on demand, are not counted.
"""

import math
from typing import Final

import numpy as np

from marconi.policy.base import Need, NodeView
from marconi.policy.eviction.order import Order
from marconi.policy.host_tier import HostTier
from marconi.policy.hybrid_cache import HybridCache
from marconi.policy.retention import Retention
from marconi.policy.write_behind import MARGIN
from marconi.tree import HostCopy, Match, Node

FIRST_BYTES_PER_S: Final = 500e6
_DAY_S: Final = 86_400.0
_ALLOWANCE_S: Final = 3_600.0
DEMAND_DECAY: Final = 0.99
"""Factor of what lately came at once, at each step."""


class WriteAllowance:
    """Bytes that may be written by now: evenly so many a day, at most an hour's worth at once, across flushes."""

    def __init__(self, bytes_per_day: float = math.inf) -> None:
        self._bytes_per_s = bytes_per_day / _DAY_S
        self._left_bytes = 0.0
        self._counted_at_s = -math.inf

    def is_left(self, now_s: float) -> bool:
        """True as long as no more was spent than may be written."""
        if math.isinf(self._bytes_per_s):
            return True
        elapsed_s = min(now_s - self._counted_at_s, _ALLOWANCE_S)
        left = self._left_bytes + elapsed_s * self._bytes_per_s
        self._left_bytes, self._counted_at_s = min(left, _ALLOWANCE_S * self._bytes_per_s), now_s
        return self._left_bytes > 0

    def spend(self, num_bytes: int) -> None:
        """Count what is written."""
        self._left_bytes -= num_bytes


class StoreBehind:
    """Which copies of a host tier are written, and what is read."""

    def __init__(
        self, tier: HostTier, allowance: WriteAllowance | None = None, bytes_per_s: float = FIRST_BYTES_PER_S
    ) -> None:
        self.bytes_per_s = bytes_per_s
        self._allowance = allowance or WriteAllowance()
        self.being_written: dict[HostCopy, None] = {}
        """They are locked."""
        self._tier = tier
        self._num_chosen = 0
        self._num_come = {Need.KV: 0, Need.STATE: 0}
        self._demand = {Need.KV: 0.0, Need.STATE: 0.0}

    def choose(self, now_s: float, num_steps: int = 1) -> list[HostCopy]:
        """Choose copies ahead until enough are leaving; returns those to be written, the first to be dropped first.

        The last choice was `num_steps` steps ago.
        """
        tier, chosen = self._tier, list[HostCopy]()
        order, copies = tier.eviction, tier.copies
        for need, size, num_free, num_come in (
            (Need.KV, tier.memory.num_tokens, tier.room[0], copies.num_tokens + tier.num_dropped_tokens),
            (Need.STATE, tier.memory.num_slots, tier.room[1], copies.num_states + tier.num_dropped),
        ):
            self._demand[need] = max(DEMAND_DECAY**num_steps * self._demand[need], num_come - self._num_come[need])
            self._num_come[need] = num_come
            num_wanted = max(MARGIN * size, min(self._demand[need], size / 2)) - num_free
            while self._num_leaving(need) < num_wanted:
                copy = order.next_to_leave(need, now_s)
                if copy is None:
                    break
                assert isinstance(copy, HostCopy)
                tier.drop_next(copy, self._num_chosen)
                self._num_chosen += 1
                if copy.stored_as is None and not copy.on_trial and self._pays(copy) and self._may_write(copy, now_s):
                    chosen.append(copy)
        return chosen

    def pays_to_read(self, match: Match, depth: int, num_prompt_tokens: int, num_read_tokens: int) -> bool:
        """True if a prompt saves time by a start from a stored state at `depth` tokens.

        `match` is what either tier has of it; KV of `num_read_tokens` is read, and then loaded as from the host.
        """
        hosted = 0 if match.hosted is None else match.hosted.depth
        best = max(match.checkpoint.depth, hosted)
        if depth <= best:
            return False
        num_loaded_tokens = depth - min(match.num_live_tokens, depth)
        saved_s = self._tier.times.saved_s(best, depth, num_prompt_tokens, num_loaded_tokens)
        return saved_s > self._read_s(num_read_tokens)

    def _pays(self, copy: HostCopy) -> bool:
        """True if one use of `copy`, once it is stored, saves more than reading what is written with it."""
        above = stored_above(copy)
        from_depth = 0 if above is None else above.depth
        saved_s = self._tier.times.worth_between(min(copy.checkpoint_depth_above, from_depth), copy.depth)
        return saved_s > self._read_s(copy.depth - from_depth)

    def _may_write(self, copy: HostCopy, now_s: float) -> bool:
        """True as long as no more was written than may be; then what is written with `copy` counts."""
        if not self._allowance.is_left(now_s):
            return False
        above = stored_above(copy)
        self._allowance.spend(self._bytes_of(copy.depth - (0 if above is None else above.depth)))
        return True

    def _read_s(self, num_tokens: int) -> float:
        return self._bytes_of(num_tokens) / self.bytes_per_s

    def _bytes_of(self, num_tokens: int) -> int:
        costs = self._tier.times.costs
        return num_tokens * costs.kv_bytes_per_token + costs.state_bytes

    def _num_leaving(self, need: Need) -> int:
        order = self._tier.eviction
        if need is Need.STATE:
            return order.num_leaving + len(self.being_written)
        return order.num_leaving_tokens + sum(copy.freed_tokens for copy in self.being_written)


def stored_above(copy: HostCopy) -> HostCopy | None:
    """The nearest shallower state on the path that was written to the store; None if there is none."""
    node = copy.node.parent
    while node is not None and (node.host_copy is None or node.host_copy.stored_as is None):
        node = node.parent
    return None if node is None else node.host_copy


def most_valuable_first(cache: HybridCache, host: Order, now_s: float) -> list[Node]:
    """The states of both tiers that nobody has demoted; those in use come first. `host` ranks the copies."""
    wishes = cache.retention or Retention()
    device, copies, rest = list[NodeView](), list[NodeView](), list[NodeView]()
    for root in cache.tree.roots.values():
        for node in root.walk():
            if wishes.is_demoted(node):
                continue
            if node.has_state and node.leaving is None:
                device.append(node)
            elif node.has_copy and node.host_copy is not None:
                copies.append(node.host_copy)
            elif node.has_state:
                rest.append(node)
    parts = ((device, cache.order), (copies, host), (rest, cache.order))
    ranked = (view for views, order in parts for view in _falling(views, order, now_s))
    nodes = (each.node if isinstance(each, HostCopy) else each for each in ranked)
    return [node for node in nodes if isinstance(node, Node)]


def _falling(views: list[NodeView], order: Order, now_s: float) -> list[NodeView]:
    """`views` by decreasing worth; those in use have no place, and come first."""
    if not views:
        return []
    keys = order.worths(views, now_s)
    keys = np.where(np.isnan(keys[:, :1]), np.inf, keys)
    serials = np.array([view.serial for view in views], np.float64)
    rising = np.lexsort((serials, *keys.T[::-1]))
    return [views[at] for at in rising[::-1].tolist()]
