"""Requests in flight together: for every policy that a server offers, the real cache hits what its replay hits."""

from dataclasses import replace

import pytest

from marconi.engine.launch.policies import ONE_POOL, PolicyChoice, hybrid_cache
from marconi.model.learned_latency import LearnedLatency
from marconi.policy.base import Costs
from marconi.policy.catalog import SERVED
from marconi.replay.pools import JointPool, TwoPools
from marconi.replay.server import ServerReplay
from rig.clock import TraceClock
from rig.driver import HostReplay
from rig.joint_pools import KV_BYTES_PER_TOKEN, STATE_BYTES
from rig.pools import Division, Strategy, marconi

from .host_replays import Setting, agents, forks, serve_beside_each_other

pytestmark = pytest.mark.usefixtures("sglang_configuration")

COSTS = Costs(KV_BYTES_PER_TOKEN, STATE_BYTES, flops=lambda num_tokens: num_tokens * (num_tokens + 1000.0))
EXTRA, NO = Strategy.EXTRA_BUFFER, Strategy.NO_BUFFER
SETTINGS = {
    "extra-buffer": Setting(1, EXTRA, 4500, 22, max_running=3),
    "no-buffer": Setting(1, NO, 4500, 14, max_running=3),
    "page-16": Setting(16, EXTRA, 4800, 22, max_running=3),
}
REQUESTS = (*agents(seed=5, num_sessions=12), *forks(seed=6, num_requests=60))


def both(setting: Setting, policy: str, division: Division) -> tuple[HostReplay, ServerReplay]:
    """The real cache, and the replay of it."""
    host, clock = replace(setting.host, memory=division), TraceClock()
    # A budget that some contexts miss from nothing: `tail` has something to tell apart.
    choice = PolicyChoice(policy, ttft_budget_s=1.0 if policy == "tail" else None)
    real = HostReplay(marconi(host, choice, COSTS, clock), host, 1, clock)
    latency = LearnedLatency(COSTS.flops)
    page = setting.page_tokens
    if division is Division.TWO_POOLS:
        pools, needs = TwoPools(setting.num_kv_tokens, setting.num_state_slots), None
    else:
        num_bytes = real.cache.pools.memory.num_bytes
        pools, needs = JointPool(num_bytes, KV_BYTES_PER_TOKEN, STATE_BYTES, page), ONE_POOL
    hybrid = hybrid_cache(choice, COSTS, page, page, None, latency, *([needs] if needs else []))
    return real, ServerReplay(hybrid, pools, setting.scheduling)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("division", Division)
@pytest.mark.parametrize("policy", SERVED)
@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_our_cache_hits_what_its_replay_hits(setting: Setting, policy: str, division: Division) -> None:
    """Request for request, and with the same states written and evicted."""
    real, brain = both(setting, policy, division)
    hits = serve_beside_each_other(real, brain, REQUESTS, setting, seed=7)
    assert len(hits) > 100
    assert [hit for hit, _ in hits] == [hit for _, hit in hits]
    assert real.cache.tree_core.hybrid.counters == brain.hybrid.counters
    assert brain.hybrid.counters.num_hit_tokens > 0
    assert sum(brain.hybrid.counters.num_evictions.values()) > 20


def test_a_replay_that_leaves_no_slots_for_others_hits_otherwise() -> None:
    """The control: what is compared above depends on the requests that run beside each other."""
    setting = SETTINGS["extra-buffer"]
    real, brain = both(setting, "best", Division.TWO_POOLS)
    brain.scheduling = replace(brain.scheduling, max_running=1)
    hits = serve_beside_each_other(real, brain, REQUESTS, setting, seed=7)
    assert [hit for hit, _ in hits] != [hit for _, hit in hits]
