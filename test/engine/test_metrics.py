"""The metrics say what the status says, of one rank, also of a server that has nothing to do."""

import asyncio
import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang", reason="the server extra is not installed: pip install '.[server]'")

import prometheus_client
from sglang.srt.entrypoints import http_server

from marconi.engine import ranks
from marconi.engine.cache.radix_cache import MarconiRadixCache
from marconi.engine.http import endpoint, hints
from marconi.engine.launch.policies import PolicyChoice
from marconi.engine.reports import metrics as module
from marconi.engine.reports.explain import OFF
from marconi.engine.reports.idle import after_idle_metrics
from marconi.engine.reports.metrics import CacheMetrics, labels
from marconi.engine.reports.stats import CacheStats
from rig.clock import TraceClock
from rig.driver import HostReplay
from rig.pools import COSTS, Strategy, marconi

from .host_replays import Setting, agents

pytestmark = pytest.mark.usefixtures("sglang_configuration")

LABELS = {"dp_rank": "1"}
NUM_HEALTH_CHECKS = 5
OF_THE_ROUTER = "marconi_router_"
"""What the router's metrics begin with; `router/gateway/test_reference.py` holds them."""
SETTING = Setting(1, Strategy.EXTRA_BUFFER, 1600, 16)


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> prometheus_client.CollectorRegistry:
    """A place for one test's metrics."""
    made = prometheus_client.CollectorRegistry()
    for kind in ("Gauge", "Counter", "Histogram"):
        monkeypatch.setattr(prometheus_client, kind, partial(getattr(prometheus_client, kind), registry=made))
    return made


@pytest.fixture
def replay() -> HostReplay:
    clock = TraceClock()
    return HostReplay(marconi(SETTING.host, PolicyChoice("marconi", 2.0), COSTS, clock), SETTING.host, 1, clock)


def idle(cache: MarconiRadixCache) -> None:
    """As SGLang's scheduler does when nothing runs and nothing waits."""
    after_idle_metrics(None, SimpleNamespace(scheduler=SimpleNamespace(tree_cache=cache)))


def test_an_idle_server_shows_its_last_request(
    replay: HostReplay, registry: prometheus_client.CollectorRegistry
) -> None:
    cache = replay.cache
    cache.stats = CacheStats(cache, CacheMetrics(LABELS))
    for request in agents(1, 2):
        replay.serve(request)
    cache.stats.num_health_checks += NUM_HEALTH_CHECKS
    cache.faults.catch("a hook", ValueError())
    assert registry.get_sample_value("marconi_prompt_tokens_total", LABELS) != cache.status().num_prompt_tokens
    replay.clock.now_s += 1.0
    idle(cache)
    status = cache.status()
    assert status.num_health_checks == NUM_HEALTH_CHECKS
    plain = {
        "nodes": status.num_nodes,
        "ghosts": status.num_ghosts,
        "health_checks_total": status.num_health_checks,
        "prompt_tokens_total": status.num_prompt_tokens,
        "hit_tokens_total": status.num_hit_tokens,
        "states_written_total": status.num_states_written,
        "alpha": status.alpha,
        "hook_faults_total": 1,
        "planning_alive": 0,
    }
    assert {name: registry.get_sample_value(f"marconi_{name}", LABELS) for name in plain} == plain
    for kind, count in status.hits.items():
        assert registry.get_sample_value("marconi_requests_total", {**LABELS, "hit": kind}) == count
    for name, use in (("kv_tokens", status.kv_tokens), ("state_slots", status.state_slots)):
        shown = [
            registry.get_sample_value(f"marconi_{name}", {**LABELS, "use": each})
            for each in ("free", "cached", "in_use")
        ]
        assert shown == [use.free, use.cached, use.in_use]


def test_reasons_of_evictions_add_up_to_the_victims(
    replay: HostReplay, registry: prometheus_client.CollectorRegistry
) -> None:
    cache = replay.cache
    for request in agents(1):
        replay.serve(request)
    status = cache.status()
    assert 0 < status.evictions["unused"] < status.evictions["kv"] + status.evictions["states"]
    CacheMetrics(LABELS).update(status, 1.0)
    (family,) = (family for family in registry.collect() if family.name == "marconi_evictions")
    victims = sum(sample.value for sample in family.samples if sample.name.endswith("_total"))
    assert victims == status.evictions["kv"] + status.evictions["states"]
    assert registry.get_sample_value("marconi_evictions_unused_total", LABELS) == status.evictions["unused"]


def test_the_page_on_metrics_names_every_field_of_a_status(replay: HostReplay) -> None:
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")
    table = page.partition("| field | what |")[2].partition("\n\n")[0]
    named = {name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert named == {"dp_rank", *replay.cache.status().as_dict()}


def test_the_page_on_metrics_names_every_metric(registry: prometheus_client.CollectorRegistry) -> None:
    CacheMetrics(LABELS)
    page = Path(__file__).parents[2] / "docs" / "metrics.md"
    names = re.findall(r"`(marconi_\w+)`", page.read_text(encoding="utf-8"))
    named = {name for name in names if not name.startswith(OF_THE_ROUTER)} - {hints.KEY}
    families = registry.collect()
    assert {f"{each.name}_total" if each.type == "counter" else each.name for each in families} == named


def test_a_count_is_a_counter_that_is_what_was_counted_however_often_it_is_read(
    replay: HostReplay, registry: prometheus_client.CollectorRegistry
) -> None:
    cache, metrics = replay.cache, CacheMetrics(LABELS)
    metrics.update(cache.status(), 0.0)
    for request in agents(1, 2):
        replay.serve(request)
        status = cache.status()
        for _ in range(2):
            metrics.update(status, 1.0)
        shown = registry.get_sample_value("marconi_prompt_tokens_total", LABELS)
        assert shown == status.num_prompt_tokens
    assert {family.type for family in registry.collect()} == {"counter", "gauge", "histogram"}


def test_a_count_that_begins_anew_is_added_to_what_was_counted() -> None:
    counter = prometheus_client.Counter("some", "of them", ["of"], registry=prometheus_client.CollectorRegistry())
    growing = module._Growing(counter)
    for count in (3, 3, 5, 1, 2):
        growing.follow({"of": "a"}, count)
    growing.follow({"of": "b"}, 4)
    assert [counter.labels(of=each)._value.get() for each in "ab"] == [7, 4]


def test_a_cache_of_sglangs_own_is_left_alone_when_idle() -> None:
    after_idle_metrics(None, SimpleNamespace(scheduler=SimpleNamespace(tree_cache=object())))


@pytest.mark.parametrize(
    ("dp_rank", "num_groups", "group", "shown"),
    [(None, 1, 0, 0), (0, 1, 0, 0), (3, 1, 0, 3), (3, 4, 3, 3), (None, 4, 3, 3)],
)
def test_caches_are_told_apart(
    monkeypatch: pytest.MonkeyPatch, dp_rank: int | None, num_groups: int, group: int, shown: int
) -> None:
    """Each has a scheduler of its own; with one label for all, the last to write would hide the others."""
    parallel = SimpleNamespace(
        **{"tp_rank": 2 * group, "pp_rank": 0, "dp_rank": dp_rank, "attn_tp_rank": 0},
        **{"attn_dp_size": num_groups, "attn_dp_rank": group, "attn_dp_enabled": num_groups > 1},
    )
    for place in (module, ranks):
        monkeypatch.setattr(place, "get_parallel", lambda: parallel)
    monkeypatch.setattr(module, "get_observability", lambda: SimpleNamespace(extra_metric_labels={"zone": "a"}))
    assert labels() == {"cache_type": "marconi", "tp_rank": 0, "pp_rank": 0, "dp_rank": shown, "zone": "a"}


def test_the_answer_lists_caches_by_rank_however_they_come_in(monkeypatch: pytest.MonkeyPatch) -> None:
    async def came_in(_request: Any) -> list[Any]:
        return [SimpleNamespace(internal_state={"marconi": {"dp_rank": rank}}) for rank in (2, 0, 1)]

    manager = SimpleNamespace(get_internal_state_communicator=came_in, auto_create_handle_loop=lambda: None)
    monkeypatch.setattr(http_server, "_global_state", SimpleNamespace(tokenizer_manager=manager))
    answer = asyncio.run(endpoint._status())
    assert [each["dp_rank"] for each in json.loads(answer.body)["ranks"]] == [0, 1, 2]


def test_stays_of_one_state_in_so_many_are_in_the_histograms(
    replay: HostReplay, registry: prometheus_client.CollectorRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SAMPLED", 1)
    cache, metrics = replay.cache, CacheMetrics(LABELS)
    cache.tree_core.hybrid.watchers += (metrics,)
    for request in agents(1):
        replay.serve(request)

    def count(name: str) -> float:
        (family,) = (each for each in registry.collect() if each.name == f"marconi_state_{name}_seconds")
        return sum(sample.value for sample in family.samples if sample.name.endswith("_count"))

    counters = cache.tree_core.hybrid.counters
    num_evictions = sum(counters.num_evictions.values())
    assert (count("gap"), count("lifetime"), count("idle")) == (counters.num_states_hit, num_evictions, num_evictions)


def test_what_means_nothing_on_a_server_is_not_exported(
    replay: HostReplay, registry: prometheus_client.CollectorRegistry
) -> None:
    CacheMetrics(LABELS).update(replay.cache.status(), 1.0)
    exported = {sample.name for family in registry.collect() for sample in family.samples}
    assert "marconi_kv_tokens" in exported
    assert "marconi_missed_tokens_total" in exported
    absent = (
        "joint_bytes",
        "host_kv_tokens",
        "host_loads_total",
        "store_ready",
        "store_writes_total",
        "events_waiting",
    )
    for name in (*absent, "events_published_total"):
        assert f"marconi_{name}" not in exported


def test_without_explanations_the_status_says_so_and_no_cause_is_exported(
    registry: prometheus_client.CollectorRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = TraceClock()
    host = replace(SETTING.host, explains=False)
    cache = marconi(host, PolicyChoice(), COSTS, clock)
    replay = HostReplay(cache, host, 1, clock)
    *requests, last = agents(1, 3)
    for request in requests:
        replay.serve(request)
    status = cache.status()
    assert (status.explain, status.num_missed_tokens, status.missed_s, status.saved_s) == ("off", None, None, None)
    assert status.num_requests == len(requests)
    CacheMetrics(LABELS).update(status, 1.0)
    exported = {sample.name for family in registry.collect() for sample in family.samples}
    assert "marconi_prompt_tokens_total" in exported
    assert not any("missed" in name for name in exported)
    assert cache.explanations.latest(0.0) == []
    frame = b""
    while not frame:
        frame = cache.picture.advance(cache.tree_core.hybrid, 1.0)
    replay.serve(last)
    frame = b""
    while not frame:
        frame = cache.picture.advance(cache.tree_core.hybrid, 2.0)
    assert set(json.loads(frame)["missed_tokens"]) == {"not explained (--marconi-explain off)"}
    monkeypatch.setenv("MARCONI_EXPLAIN", "off")
    answer = asyncio.run(endpoint._requests())
    assert answer.status_code == 404
    assert json.loads(answer.body) == {"error": OFF}
