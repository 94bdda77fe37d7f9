"""Baselines in the driver: where their states stand, slots by hand, and nothing is lost."""

import random

import pytest

from marconi.policy.admission.base import Admission
from marconi.policy.base import Need
from marconi.policy.eviction.lru import SeparateLru
from marconi.policy.eviction.order import Order
from marconi.policy.hybrid_cache import HybridCache
from marconi.policy.request import Request, pack
from marconi.replay.admission.chunk_end import ExtraBuffer, NoBuffer
from marconi.replay.admission.every_block import EveryBlock
from marconi.replay.pools import TwoPools
from marconi.replay.scheduling import Scheduling
from marconi.replay.server import ServerReplay
from marconi.tree import RadixTree, check_invariants


def replay_of(admission: Admission, pools: TwoPools) -> ServerReplay:
    tiers = Order(SeparateLru(frozenset({Need.KV, Need.STATE})))
    return ServerReplay(HybridCache(RadixTree(), admission, tiers), pools, Scheduling.of(admission))


def request(prompt: list[int], answer: list[int], arrival_s: float) -> Request:
    return Request(pack(prompt + answer), len(prompt), len(answer), len(prompt) + len(answer), arrival_s)


def checkpoints(replay: ServerReplay) -> list[int]:
    return sorted(node.depth for node in replay.hybrid.tree.nodes() if node.has_state)


def test_a_chunk_leaves_a_state_on_the_grid_and_decoding_the_last_that_it_tracked() -> None:
    replay = replay_of(ExtraBuffer(chunk_tokens=512), TwoPools(10_000, 20))
    replay.serve(request(list(range(700)), list(range(1000, 1400)), 1.0))
    assert checkpoints(replay) == [512, 640, 1024]
    assert replay.pools.num_free_slots == 17
    assert replay.pools.num_free_tokens == 10_000 - 1024


def test_a_request_of_one_token_leaves_its_last_chunk_in_a_slot_of_its_own() -> None:
    replay = replay_of(ExtraBuffer(), TwoPools(10_000, 4))
    replay.serve(request(list(range(700)), [1], 1.0))
    assert checkpoints(replay) == [640]
    assert replay.pools.num_free_slots == 3


def test_without_tracking_states_stand_at_the_exact_ends() -> None:
    replay = replay_of(NoBuffer(chunk_tokens=512), TwoPools(10_000, 20))
    replay.serve(request(list(range(700)), list(range(1000, 1400)), 1.0))
    assert checkpoints(replay) == [512, 700, 1099]


def test_a_state_at_every_block_stands_in_the_answer_too() -> None:
    replay = replay_of(EveryBlock(300), TwoPools(10_000, 20))
    replay.serve(request(list(range(700)), list(range(1000, 1400)), 1.0))
    assert checkpoints(replay) == [300, 600, 900]
    assert replay.pools.num_free_slots == 17


def test_of_the_states_that_do_not_all_get_a_slot_the_deepest_are_left() -> None:
    replay = replay_of(EveryBlock(100), TwoPools(10_000, 4))
    replay.serve(request(list(range(700)), [], 1.0))
    assert checkpoints(replay) == [400, 500, 600, 700]


@pytest.mark.parametrize("admission", [ExtraBuffer(8, 16, 32), NoBuffer(1, 32), EveryBlock(8)])
def test_nothing_is_lost_under_pressure(admission: Admission) -> None:
    rng = random.Random(1)  # noqa: S311 - a workload, not a secret
    replay = replay_of(admission, TwoPools(120, 6))
    for step in range(1000):
        prompt = [*range(100, 124), *(rng.randrange(2) for _ in range(rng.randint(1, 40)))]
        answer = [rng.randrange(2) for _ in range(rng.randint(1, 40))]
        assert replay.serve(request(prompt, answer, float(step))) < len(prompt)
        replay.check_invariants()
        check_invariants(replay.hybrid.tree)
    counters = replay.hybrid.counters
    assert counters.num_evictions[Need.KV] > 100
    assert counters.num_evictions[Need.STATE] > 100
    assert counters.num_states_hit > 20
