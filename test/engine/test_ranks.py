"""Ranks that share a cache decide alike, whatever their clocks and their memory's addresses do.

Each negative control puts one thing back that a rank alone knows, and must see ranks part.
"""

import inspect
import random
import time
from dataclasses import replace
from itertools import cycle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed
from sglang.srt.mem_cache.allocator.unified_sub_pool import MultiEndedAllocator

from marconi.engine.launch.agreement import RankSettings, first_difference, require_alike
from marconi.engine.launch.policies import PolicyChoice
from marconi.engine.version import Refusal
from marconi.tree import RadixTree
from rig.late_passes import LatePasses
from rig.pools import COSTS, Division, Strategy
from rig.ranks import Ranks, RanksParted
from rig.soak import SoakPlan, soak_pools

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_REQUESTS = 120
CHOICES = {
    "best": PolicyChoice("best"),
    "marconi": PolicyChoice("marconi"),
    "tail": PolicyChoice("tail", ttft_budget_s=0.5),
}


def ranks(
    num_ranks: int = 2,
    choice: PolicyChoice = CHOICES["best"],
    memory: Division = Division.TWO_POOLS,
    strategy: Strategy = Strategy.EXTRA_BUFFER,
    host_ratio: float = 0.0,
) -> Ranks:
    host = soak_pools(strategy, 1, memory=memory, host_ratio=host_ratio)
    return Ranks(num_ranks, host, choice, host.costs, SoakPlan(NUM_REQUESTS, seed=1, drain_every_requests=50))


@pytest.mark.parametrize("memory", Division, ids=str)
@pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES)
@pytest.mark.one_in(8)
def test_two_ranks_decide_alike_under_pressure(choice: PolicyChoice, memory: Division) -> None:
    soak = ranks(2, choice, memory)
    soak.run()
    first, other = (cache.status() for cache in soak.caches)
    assert sum(first.evictions.values()) > 25, "nothing was decided"
    assert first.evictions == other.evictions
    assert soak.num_ticks > 100
    assert soak.ranks[0].soak.num_flushes > 0


def late_ranks(num_ranks: int, *, has_transfers: bool = False, host_ratio: float = 0.0) -> Ranks:
    """Ranks of one pool, each of which finds at its own time that a forward pass has ended; of a prefill server."""
    soak = ranks(num_ranks, memory=Division.ONE_POOL, host_ratio=host_ratio)
    for index, rank in enumerate(soak.ranks):
        kv, together = rank.soak.scheduler.cache.token_to_kv_pool_allocator, None
        if has_transfers or host_ratio:
            together = random.Random(7)  # noqa: S311 - a workload
        rank.soak.scheduler.passes = LatePasses(kv, index, together, has_transfers=has_transfers)
    return soak


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_of_one_pool_decide_alike_whenever_they_find_that_a_pass_has_ended(num_ranks: int) -> None:
    soak = late_ranks(num_ranks)
    soak.run()
    for rank in soak.ranks:
        assert rank.soak.scheduler.passes is not None
        assert rank.soak.scheduler.passes.num_pending > 100
        assert rank.soak.scheduler.passes.num_waits > 10
    assert soak.caches[0].status().evictions["bytes"] > 25


@pytest.mark.slow
def test_ranks_of_one_pool_above_a_host_tier_decide_alike_although_copies_forbid_moves() -> None:
    soak = late_ranks(2, host_ratio=2.0)
    soak.run()
    first, other = (cache.status() for cache in soak.caches)
    assert first.host is not None
    assert min(first.host.num_copied, first.host.num_loads, first.evictions["bytes"]) > 10
    assert other.host == replace(first.host, waited_s=other.host.waited_s)
    assert first.evictions == other.evictions


@pytest.mark.slow
def test_ranks_of_a_prefill_server_decide_alike_although_moves_are_forbidden_at_times() -> None:
    soak = late_ranks(2, has_transfers=True)
    soak.run()
    for rank in soak.ranks:
        assert rank.soak.scheduler.passes is not None
        assert rank.soak.scheduler.passes.num_waits > 10
    assert soak.caches[0].status().evictions["bytes"] > 25


@pytest.mark.slow
@pytest.mark.parametrize(("choice", "strategy"), [*zip(CHOICES.values(), cycle(Strategy), strict=False)], ids=str)
def test_four_ranks_decide_alike(choice: PolicyChoice, strategy: Strategy) -> None:
    ranks(4, choice, strategy=strategy).run()


def test_only_the_first_rank_times_prefills_and_reports() -> None:
    soak = ranks(2, CHOICES["marconi"])
    soak.run()
    first, other = soak.caches
    assert first.first_rank.latency.is_known
    assert other.first_rank is None
    assert (other.latency.overhead_s, other.latency.s_per_flop) == (other.tick.overhead_s, other.tick.s_per_flop)
    assert other.latency.is_known


# Negative controls


def test_control_a_wall_clock_parts_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    soak = ranks()
    for cache in soak.caches:
        monkeypatch.setattr(cache.tree_core, "_clock", lambda: time.monotonic())
    with pytest.raises(RanksParted):
        soak.run()


def test_control_ticks_of_their_own_part_ranks() -> None:
    soak = ranks()
    for rank in soak.ranks[1:]:
        rank.soak.scheduler.cache.first_rank = type(soak.caches[0].first_rank)(rank.clock, COSTS.flops)
        rank.channel.recv_requests = lambda local_reqs: local_reqs or []
    with pytest.raises(RanksParted):
        soak.run()


def test_control_an_order_of_addresses_parts_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes that change are passed on to the rule in the order of a set, which is that of their addresses."""
    take_changed = RadixTree.take_changed
    monkeypatch.setattr(RadixTree, "take_changed", lambda tree: sorted(set(take_changed(tree)), key=id))
    with pytest.raises(RanksParted):
        ranks(4).run()


def test_control_sglangs_own_count_of_one_pool_parts_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts a place once it finds that no pass reads it any more."""
    soak = late_ranks(2)
    own = inspect.unwrap(MultiEndedAllocator.schedulable_available_size)
    monkeypatch.setattr(MultiEndedAllocator, "schedulable_available_size", own)
    with pytest.raises(RanksParted):
        soak.run()


def test_control_without_a_wait_for_passes_there_is_less_than_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    soak = late_ranks(2)
    monkeypatch.setattr(
        MultiEndedAllocator, "flush_for_allocation", inspect.unwrap(MultiEndedAllocator.flush_for_allocation)
    )
    with pytest.raises(RanksParted):
        soak.run()


def test_control_gaps_that_each_rank_closes_as_it_can_part_ranks_of_a_prefill_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    soak = late_ranks(2, has_transfers=True)
    monkeypatch.setattr(MultiEndedAllocator, "_flush", inspect.unwrap(MultiEndedAllocator._flush))
    with pytest.raises(RanksParted):
        soak.run()


# Agreement at the start


def settings(rank: int, **more: str) -> Any:
    given = {"--marconi-eviction": "best", "the number of KV tokens": "4096", **more}
    return RankSettings(rank, f"node-{rank // 2}", given)


def test_ranks_that_are_alike_start() -> None:
    assert first_difference([settings(rank) for rank in range(4)]) is None


@pytest.mark.parametrize(
    ("more", "line"),
    [
        (
            {"--marconi-eviction": "lru"},
            "--marconi-eviction must be the same on all ranks, got best on node-0 (rank 0) and lru on node-1 (rank 2)",
        ),
        (
            {"--marconi-explain": "off"},
            "--marconi-explain must be the same on all ranks, got not set on node-0 (rank 0) "
            "and off on node-1 (rank 2)",
        ),
        (
            {"the number of KV tokens": "4000"},
            "the number of KV tokens must be the same on all ranks, got 4096 on node-0 (rank 0) "
            "and 4000 on node-1 (rank 2)",
        ),
    ],
)
def test_a_difference_is_one_line_with_name_nodes_and_values(more: dict[str, str], line: str) -> None:
    assert first_difference([settings(0), settings(1), settings(2, **more), settings(3)]) == line


def test_every_rank_of_a_group_refuses_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    def gather(into: list[Any], own: Any, group: Any) -> None:
        into[:] = [own, own._replace(rank=1, settings={**own.settings, "--marconi-eviction": "lru"})]

    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    group = SimpleNamespace(world_size=2, rank_in_group=0, cpu_group=None)
    with pytest.raises(Refusal, match=r"--marconi-eviction must be the same on all ranks, got best on .* and lru on"):
        require_alike({"--marconi-eviction": "best"}, group)
    require_alike({"--marconi-eviction": "best"}, SimpleNamespace(world_size=1))
