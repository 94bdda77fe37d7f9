"""The replay of stock that takes memory as a server does: slots by hand, and nothing is lost."""

import random

import pytest
from marconi.replay.stock_server import StockReplay

from marconi.policy.admission.chunk_end import ExtraBuffer, NoBuffer
from marconi.policy.eviction.base import Need
from marconi.policy.request import Request, pack
from marconi.replay.pools import Pools
from marconi.tree import check_invariants


def request(prompt: list[int], answer: list[int], arrival_s: float) -> Request:
    return Request(pack(prompt + answer), len(prompt), len(answer), len(prompt) + len(answer), arrival_s)


def checkpoints(replay: StockReplay) -> list[int]:
    return sorted(node.depth for node in replay.served.tree.nodes() if node.has_state)


def test_a_chunk_leaves_a_state_on_the_grid_and_decoding_the_last_that_it_tracked() -> None:
    replay = StockReplay(ExtraBuffer(chunk_tokens=512), Pools(10_000, 20))
    replay.serve(request(list(range(700)), list(range(1000, 1400)), 1.0))
    assert checkpoints(replay) == [512, 640, 1024]
    assert replay.pools.num_free_slots == 17
    assert replay.pools.num_free_tokens == 10_000 - 1024


def test_a_request_of_one_token_leaves_its_last_chunk_in_a_slot_of_its_own() -> None:
    replay = StockReplay(ExtraBuffer(), Pools(10_000, 4))
    replay.serve(request(list(range(700)), [1], 1.0))
    assert checkpoints(replay) == [640]
    assert replay.pools.num_free_slots == 3


def test_without_tracking_states_stand_at_the_exact_ends() -> None:
    replay = StockReplay(NoBuffer(chunk_tokens=512), Pools(10_000, 20))
    replay.serve(request(list(range(700)), list(range(1000, 1400)), 1.0))
    assert checkpoints(replay) == [512, 700, 1099]


@pytest.mark.parametrize("admission", [ExtraBuffer(8, 16, 32), NoBuffer(1, 32)])
def test_nothing_is_lost_under_pressure(admission: ExtraBuffer | NoBuffer) -> None:
    rng = random.Random(1)  # noqa: S311 - a workload, not a secret
    replay = StockReplay(admission, Pools(120, 6))
    for step in range(1000):
        prompt = [*range(100, 124), *(rng.randrange(2) for _ in range(rng.randint(1, 40)))]
        answer = [rng.randrange(2) for _ in range(rng.randint(1, 40))]
        assert replay.serve(request(prompt, answer, float(step))) < len(prompt)
        replay.check_invariants()
        check_invariants(replay.served.tree)
    counters = replay.served.counters
    assert counters.num_evictions[Need.KV] > 100
    assert counters.num_evictions[Need.STATE] > 100
    assert counters.num_states_hit > 20
