"""What a server lends: two pools each count their own, one pool counts bytes, in whole pages and whole states."""

from collections.abc import Callable
from typing import Any

import pytest

from marconi.lifecycle.pools import Amount
from marconi.policy.admission.plan import Judicious
from marconi.policy.base import Need
from marconi.policy.eviction.lru import SeparateLru
from marconi.policy.eviction.order import Order
from marconi.policy.hybrid_cache import HybridCache
from marconi.policy.request import Request, pack
from marconi.replay.pools import JointPool, TwoPools
from marconi.replay.scheduling import Scheduling
from marconi.replay.server import ServerReplay
from marconi.tree import RadixTree


def request(prompt: list[int], arrival_s: float) -> Request:
    return Request(pack(prompt), len(prompt), 0, len(prompt), arrival_s)


def on_one_pool(num_bytes: int, num_working_slots: int = 1) -> ServerReplay:
    """KV of 1 byte a token, states of 50."""
    hybrid = HybridCache(RadixTree(), Judicious(), Order(SeparateLru(frozenset({Need.BYTES}))))
    return ServerReplay(hybrid, JointPool(num_bytes, 1, 50), Scheduling(num_working_slots=num_working_slots))


def test_one_pool_lends_whole_pages_or_whole_states_of_what_is_free() -> None:
    pool = JointPool(num_bytes=1000, kv_bytes_per_token=3, state_bytes=200, page_tokens=16)
    assert (pool.num_tokens, pool.num_slots) == (320, 5)
    pool.take(16, 1)
    assert (pool.num_free_bytes, pool.num_free_tokens, pool.num_free_slots) == (752, 240, 3)
    pool.give(16, 1)
    pool.check_balance(Amount(0, 0))
    assert pool.holds(160, 2)
    assert not pool.holds(160, 3)


def test_a_slot_is_spared_only_beside_what_is_reserved() -> None:
    pool, pools = JointPool(1000, 1, 100), TwoPools(500, 5)
    assert pool.spares_slot(Amount(0, 0), Amount(500, 4))
    assert not pool.spares_slot(Amount(0, 0), Amount(501, 4))
    assert pool.spares_slot(Amount(1, 0), Amount(501, 4)), "KV that may go makes room"
    assert pools.spares_slot(Amount(0, 0), Amount(501, 4)), "KV is in another pool"
    assert not pools.spares_slot(Amount(501, 0), Amount(0, 5))


def test_in_one_pool_kv_makes_room_for_states_and_states_for_kv() -> None:
    replay = on_one_pool(1000)
    for index in range(12):
        prompt = list(range(1000 * index, 1000 * index + (30 if index % 2 else 600)))
        assert replay.serve(request(prompt, index)) == 0
        replay.check_invariants()
    counters = replay.hybrid.counters
    assert counters.num_evictions[Need.BYTES] == sum(counters.num_evictions.values()) > 5
    assert counters.num_evicted_tokens > 1000


def test_a_planned_state_is_not_written_where_its_prompt_needs_the_bytes() -> None:
    """900 tokens and one that a server may ask for beyond, the working slot, and the state: 1,001 bytes."""
    for num_bytes, num_written in ((1000, 1), (1001, 2)):
        replay = on_one_pool(num_bytes)
        replay.serve(request(list(range(900)), 1.0))
        assert replay.hybrid.counters.num_states_written == num_written


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: JointPool(0, 1, 1), "num_bytes must be 1 or more, got 0"),
        (lambda: JointPool(1, 0, 1), "kv_bytes_per_token must be 1 or more, got 0"),
        (lambda: JointPool(1, 1, 0), "state_bytes must be 1 or more, got 0"),
        (lambda: JointPool(1, 1, 1, 0), "page_tokens must be 1 or more, got 0"),
    ],
)
def test_bad_input_is_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
