"""How much is copied ahead of evictions, how fast the link is, and how evictions that wait are counted."""

import math
import random
from array import array
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import prometheus_client
import pytest

from marconi.engine.host import cache as module
from marconi.engine.host.cache import DEMAND_DECAY, _Ahead, require_copies
from marconi.engine.host.link import LinkSpeed, link_speed
from marconi.engine.launch.policies import PolicyChoice
from marconi.engine.reports.metrics import CacheMetrics
from marconi.engine.reports.stats import CacheStats
from marconi.engine.version import Refusal
from rig.clock import TraceClock
from rig.driver import HostReplay
from rig.pools import COSTS, LINK, HostPools, marconi
from rig.scheduler import HostScheduler
from rig.workload import Origin, Script

from .host_replays import agents

pytestmark = pytest.mark.usefixtures("sglang_configuration")


def test_what_is_copied_ahead_follows_what_a_step_evicts_and_forgets_it() -> None:
    ahead = _Ahead(least=10, most=100)
    assert ahead.next_step() == 10
    ahead.num_evicted = 60
    assert ahead.next_step() == 60
    assert ahead.next_step() == math.ceil(60 * DEMAND_DECAY)
    ahead.num_evicted = 1_000
    assert ahead.next_step() == 100, "the pools are to be used as well"
    for _ in range(1_000):
        last = ahead.next_step()
    assert last == 10


def test_the_link_of_a_cpu_is_as_fast_as_its_memory() -> None:
    assert all(1e8 < bytes_per_s < 1e12 for bytes_per_s in link_speed("cpu"))


def replay_of(host_ratio: float = 2.0) -> HostReplay:
    host, clock = HostPools(1_600, 16, 4_096, host_ratio=host_ratio), TraceClock()
    return HostReplay(marconi(host, PolicyChoice("best"), COSTS, clock), host, 1, clock)


def test_a_server_measures_its_link_and_the_rig_names_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert replay_of().cache._below.link == LINK
    monkeypatch.setattr("rig.pools.LINK", None)
    monkeypatch.setattr(module, "link_speed", lambda device: LinkSpeed(7e9, 5e9))
    cache = replay_of().cache
    assert cache._below.link == (7e9, 5e9)
    times = cache.tree_core.tier.times
    assert times.load_s(10) * 7 == pytest.approx(times.copy_s(10) * 5), "each way has its own price"


def test_an_eviction_that_runs_past_what_was_copied_ahead_waits_and_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is chosen ahead at first, for no step of a scheduler comes between requests."""
    registry = prometheus_client.CollectorRegistry()
    for kind in ("Counter", "Gauge", "Histogram"):
        monkeypatch.setattr(prometheus_client, kind, partial(getattr(prometheus_client, kind), registry=registry))
    replay, labels = replay_of(), {"server": "a"}
    replay.cache.stats = CacheStats(replay.cache, CacheMetrics(labels))
    for number, request in enumerate(agents(3)[:18]):
        if number >= 12:
            replay.cache.check_hicache_events()
            replay.cache.settle()
        replay.serve(request)
    use = replay.cache.status().host
    assert 0 < use.num_waits < use.num_evictions
    assert use.waited_s > 0
    assert use.num_copied >= use.num_waits
    name = "marconi_eviction_wait_seconds"
    shown = {each: registry.get_sample_value(f"{name}_{each}", labels) for each in ("count", "sum")}
    assert shown == {"count": use.num_evictions, "sum": pytest.approx(use.waited_s, abs=1e-5)}
    did_not_wait = registry.get_sample_value(f"{name}_bucket", {**labels, "le": "0.0"})
    assert did_not_wait == use.num_evictions - use.num_waits, "those that waited are above 0"


def test_a_pool_too_small_for_anything_to_be_chosen_ahead_uses_the_tier_all_the_same() -> None:
    """Room for one prompt at a time: all that was there is evicted for the next one, at once."""
    host, clock = HostPools(1_000, 16, 4_096, host_ratio=4.0, chunk_tokens=512), TraceClock()
    cache = marconi(host, PolicyChoice("best"), COSTS, clock)
    scheduler = HostScheduler(cache, host)
    rng, hits = random.Random(1), []  # noqa: S311 - a workload, not a secret
    prompts = [[rng.randrange(10, 30_000) for _ in range(700)] for _ in range(3)]
    for prompt in prompts * 2:
        req = scheduler.submit(Script(Origin.NEW, array("q", prompt), array("q", [5, 6]), 2, (None, None)))
        while not scheduler.is_idle:
            scheduler.step()
            clock.now_s += 0.02 + 2e-4 * 700
        hits.append(req.cached_tokens)
    assert hits[:3] == [0, 0, 0]
    assert min(hits[3:]) >= 700 - 64
    assert cache.status().host.num_loads == 3


@pytest.mark.parametrize(
    ("io_backend", "is_packed", "has_kernel", "is_served"),
    [
        ("kernel", False, False, False),
        ("kernel", False, True, True),
        ("kernel", True, False, True),
        ("direct", False, False, True),
    ],
)
def test_rows_that_no_kernel_copies_are_refused_at_the_start(
    io_backend: str, is_packed: bool, has_kernel: bool, is_served: bool
) -> None:
    """SGLang raises at the first copy, when requests are there."""
    pool = SimpleNamespace(device_rows_packed=is_packed, can_use_jit=has_kernel, size_per_token=6_000)
    with nullcontext() if is_served else pytest.raises(Refusal, match="6,000 bytes a token; give --mamba-full"):
        require_copies(pool, io_backend)
