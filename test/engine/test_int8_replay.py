"""The replay of checkpoints in int8 hits what the real cache hits, one request after the other and in flight."""

from dataclasses import replace

import pytest

from marconi.engine.int8.pools import Int8DevicePools
from marconi.engine.launch.policies import PolicyChoice, hybrid_cache
from marconi.policy.base import Need
from marconi.policy.catalog import SERVED
from marconi.replay.int8 import Int8Pools
from marconi.replay.pools import TwoPools
from marconi.replay.server import ServerReplay
from rig.clock import TraceClock
from rig.driver import HostReplay
from rig.pools import Strategy, marconi

from .host_replays import COSTS, Setting, agents, forks, serve_beside_each_other

pytestmark = pytest.mark.usefixtures("sglang_configuration")

EXTRA, NO = Strategy.EXTRA_BUFFER, Strategy.NO_BUFFER
SETTINGS = {
    "many-checkpoints": (Setting(1, EXTRA, 4000, 9), 20),
    "few-checkpoints": (Setting(1, EXTRA, 4000, 9), 6),
    "few-live": (Setting(1, NO, 4000, 3), 12),
    "little-kv": (Setting(1, EXTRA, 1600, 9), 16),
    "page-16": (Setting(16, EXTRA, 1680, 9), 10),
}
IN_FLIGHT = {
    "extra-buffer": (Setting(1, EXTRA, 4500, 13, max_running=3), 14),
    "no-buffer": (Setting(1, NO, 4500, 8, max_running=3), 10),
    "page-16": (Setting(16, EXTRA, 4800, 16, max_running=3), 14),
}
TOGETHER = (*agents(seed=5, num_sessions=12), *forks(seed=6, num_requests=60))


def both(setting: Setting, num_checkpoints: int, policy: str) -> tuple[HostReplay, ServerReplay]:
    """The real cache, and the replay of it."""
    host, clock, page = replace(setting.host, num_checkpoints=num_checkpoints), TraceClock(), setting.page_tokens
    choice = PolicyChoice(policy, ttft_budget_s=1.0 if policy == "tail" else None)
    real = HostReplay(marconi(host, choice, COSTS, clock), host, 1, clock)
    assert isinstance(real.cache.pools, Int8DevicePools)
    pools = Int8Pools(setting.num_kv_tokens, setting.num_state_slots, num_checkpoints=num_checkpoints)
    hybrid = hybrid_cache(choice, COSTS, page, page, None, real.cache.latency)
    return real, ServerReplay(hybrid, pools, setting.scheduling)


@pytest.mark.one_in(7)
@pytest.mark.parametrize("policy", SERVED)
@pytest.mark.parametrize(("setting", "num_checkpoints"), SETTINGS.values(), ids=SETTINGS)
def test_one_after_the_other_it_hits_the_same(setting: Setting, num_checkpoints: int, policy: str) -> None:
    real, brain = both(setting, num_checkpoints, policy)
    for request in (*agents(seed=1), *forks(seed=2, num_requests=60)):
        assert real.serve(request) == brain.serve(request)
        real.check_invariants()
        brain.check_invariants()
    counters = brain.hybrid.counters
    assert real.cache.tree_core.hybrid.counters == counters
    assert counters.num_hit_tokens > 0
    assert sum(counters.num_evictions.values()) > 20


@pytest.mark.one_in(5)
@pytest.mark.parametrize("policy", SERVED)
@pytest.mark.parametrize(("setting", "num_checkpoints"), IN_FLIGHT.values(), ids=IN_FLIGHT)
def test_in_flight_it_hits_the_same(setting: Setting, num_checkpoints: int, policy: str) -> None:
    real, brain = both(setting, num_checkpoints, policy)
    hits = serve_beside_each_other(real, brain, TOGETHER, setting, seed=7)
    assert len(hits) > 100
    assert [hit for hit, _ in hits] == [hit for _, hit in hits]
    assert real.cache.tree_core.hybrid.counters == brain.hybrid.counters
    assert brain.hybrid.counters.num_evictions[Need.STATE] > 20


def test_control_slots_of_one_kind_hit_otherwise() -> None:
    """As many slots as both kinds together, lent to whoever asks."""
    setting, num_checkpoints = SETTINGS["few-checkpoints"]
    real, brain = both(setting, num_checkpoints, "best")
    plain = ServerReplay(
        hybrid_cache(PolicyChoice("best"), COSTS, 1, 1, None),
        TwoPools(setting.num_kv_tokens, setting.num_state_slots + num_checkpoints),
        brain.scheduling,
    )
    requests = agents(seed=1)
    assert [real.serve(request) for request in requests] != [plain.serve(request) for request in requests]
