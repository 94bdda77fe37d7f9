"""Which planned states get a slot, and what is left to requests beside them."""

from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marconi.lifecycle.pools import Amount
from marconi.lifecycle.running import Missing, Rows, reserved
from marconi.policy.admission.plan import Judicious
from marconi.policy.base import Need
from marconi.policy.causes import Cause
from marconi.policy.eviction.lru import SeparateLru
from marconi.policy.eviction.order import Order
from marconi.policy.hybrid_cache import HybridCache
from marconi.policy.request import Request, pack
from marconi.replay.pools import TwoPools
from marconi.replay.scheduling import Scheduling
from marconi.replay.server import ServerReplay
from marconi.tree import RadixTree

NUM_SLOTS = 3
"""Slots of a request."""
PAGE_TOKENS = 4


class Row(NamedTuple):
    """A row of a server: free, or a request that has some of its slots, and may have locked a state."""

    is_free: bool
    is_in_batch: bool
    num_slots: int
    is_holding: bool
    num_tokens: int


ROWS = st.one_of(
    st.just(Row(True, False, 0, False, 0)),
    st.builds(Row, st.just(False), st.booleans(), st.integers(0, NUM_SLOTS), st.booleans(), st.integers(0, 50)),
)


@given(st.lists(ROWS, min_size=1, max_size=8), st.booleans())
def test_what_is_reserved_is_what_every_row_may_still_take(rows: list[Row], are_slots_shared: bool) -> None:
    """Row by row: the rest of a batch, all of whoever may come, and a state each to start from."""
    # Those that run beside the batch have all their slots.
    rows = [row if row.is_free or row.is_in_batch else row._replace(num_slots=NUM_SLOTS) for row in rows]
    num_tokens = sum(row.num_tokens + PAGE_TOKENS for row in rows if row.is_in_batch)
    num_slots = sum(NUM_SLOTS - row.num_slots for row in rows)
    if are_slots_shared:
        num_slots += sum(not row.is_holding for row in rows if not row.is_in_batch)
    batch = [Missing(row.num_tokens, NUM_SLOTS - row.num_slots, row.is_holding) for row in rows if row.is_in_batch]
    num_free, num_locked = sum(row.is_free for row in rows), sum(row.is_holding for row in rows)
    found = reserved(batch, Rows(len(rows), num_free, NUM_SLOTS, num_locked, PAGE_TOKENS), are_slots_shared)
    assert found == Amount(num_tokens, num_slots)


def serving(num_slots: int) -> ServerReplay:
    """An empty cache of LRU, with one slot for each request."""
    rule = SeparateLru(frozenset({Need.KV, Need.STATE}))
    hybrid = HybridCache(RadixTree(1, max_ghosts=20), Judicious(1), Order(rule))
    return ServerReplay(hybrid, TwoPools(1000, num_slots), Scheduling())


def request(prompt: range, answer: list[int], arrival_s: float) -> Request:
    return Request(pack([*prompt, *answer]), len(prompt), len(answer), len(prompt) + len(answer), arrival_s)


@pytest.mark.parametrize("is_awaited", [True, False])
def test_a_state_that_a_waiting_request_starts_from_is_evicted_for_no_planned_state(is_awaited: bool) -> None:
    """Three slots: two states of a prompt that comes again, and the working slot of one that asks for a third."""
    server = serving(num_slots=3)
    first = request(range(50), [1, 2], 1.0)
    server.serve(first)
    nodes = [node for node in server.hybrid.tree.nodes() if node.has_state]
    assert [node.depth for node in nodes] == [49, 51]
    if is_awaited:
        server.hybrid.queue((), [*enumerate(nodes)])
    run = server.run(request(range(100, 160), [], 2.0), 2.0)
    run.begin(asked=[30])
    run.prefill()
    assert all(node.has_state for node in nodes) is is_awaited
    assert (30 in run.granted) is not is_awaited
    assert run.absent.get(30) is (Cause.NO_SLOT if is_awaited else None)
