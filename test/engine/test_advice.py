"""The feeder of a shadow: never waits, closes cleanly, notices once that its child has died; and a server with one."""

import json
import logging
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import psutil
import pytest

pytest.importorskip("sglang", reason="the server extra is not installed: pip install '.[server]'")

from marconi.demo.server_process import ServerProcess
from marconi.engine.advice import Advisor
from marconi.engine.alternatives import Alternatives
from marconi.engine.policies import CHUNK_END, PolicyChoice
from marconi.model.learned_latency import LearnedLatency
from marconi.policy.record import ServerMemory
from marconi.policy.request import Request
from marconi.replay.shadow import NUM_NEW, Shadow

from .client import generate_together, random_tokens
from .conftest import MARCONI, POOLS
from .host_replays import agents, on_marconi
from .processes import is_gone, processes_of
from .test_host_replay import SETTINGS

pytestmark = pytest.mark.usefixtures("sglang_configuration")

BEST = PolicyChoice("best")
MEMORY = ServerMemory("best", 100, 1000, 1280, 8, 0, 0, True, True, 1.0, 0.0)
NEVER_READS = (sys.executable, "-c", "import time; time.sleep(600)")
DIES = (sys.executable, "-c", "raise SystemExit(3)")
ANSWERS = (
    sys.executable,
    "-c",
    'import sys; sys.stdin.buffer.read(4); print(\'{"advice": "keep"}\', flush=True); sys.stdin.buffer.read()',
)
WITHIN_S = 300.0
"""A shadow has the lowest priority, so other work on the machine may leave it nothing for a minute."""


def served(advisor: Advisor, num_tokens: int = 1000) -> None:
    """A request of so many prompt tokens and one output token has finished."""
    req: Any = SimpleNamespace(
        origin_input_ids=array("q", range(num_tokens)), output_ids=array("q", [1]), cached_tokens=0
    )
    advisor.served(req, Request(b"", num_tokens, 0, num_tokens, 0.0), LearnedLatency(float))


def until(holds: Callable[[], bool]) -> None:
    """Wait for what other threads do."""
    deadline_s = time.monotonic() + WITHIN_S
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("marconi-advice")]


def test_a_child_that_does_not_read_fills_the_queue_and_the_rest_is_counted() -> None:
    advisor = Advisor(lambda: MEMORY, NEVER_READS, max_waiting_bytes=10 * 8008)
    for _ in range(100):
        # The first may be within the pipe by now; none of the others is.
        served(advisor)
    assert 80 <= advisor.num_dropped <= 90
    assert advisor.status() is None
    advisor.close()
    advisor.close()
    assert not threads()


def test_a_child_that_dies_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    advisor = Advisor(lambda: MEMORY, DIES)
    with caplog.at_level(logging.ERROR):
        served(advisor)
        until(lambda: bool(caplog.records))
        for _ in range(10):
            served(advisor)
        advisor.close()
    assert [record.getMessage() for record in caplog.records] == [
        "marconi: the shadow of --marconi-advice has ended with status 3: no more advice"
    ]
    assert not threads()


def test_a_child_that_cannot_be_started_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    advisor = Advisor(lambda: MEMORY, ("/no/such/program",))
    served(advisor)
    until(lambda: bool(caplog.records))
    assert "cannot be started" in caplog.text
    advisor.close()


def test_an_answer_is_kept_and_nothing_starts_before_the_first_request(caplog: pytest.LogCaptureFixture) -> None:
    advisor = Advisor(lambda: MEMORY, ANSWERS)
    assert not threads()
    served(advisor)
    until(lambda: advisor.status() is not None)
    assert advisor.status() == {"advice": "keep", "num_dropped": 0}
    advisor.close()
    assert not threads()
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.slow
def test_a_shadow_ends_when_its_server_is_killed() -> None:
    script = (
        "import os, time\n"
        "from engine.test_advice import *\n"
        "advisor = Advisor(lambda: MEMORY)\n"
        "served(advisor)\n"
        "until(lambda: advisor._child is not None)\n"
        "print(advisor._child.pid, flush=True)\n"
        "time.sleep(600)"
    )
    folder = str(Path(__file__).parents[1])
    with subprocess.Popen([sys.executable, "-c", script], cwd=folder, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        shadow = psutil.Process(int(server.stdout.readline()))
        server.kill()
    until(lambda: not shadow.is_running() or shadow.status() == psutil.STATUS_ZOMBIE)


def test_a_request_that_cannot_be_read_ends_the_advice_and_not_the_server(caplog: pytest.LogCaptureFixture) -> None:
    advisor = Advisor(lambda: MEMORY, ANSWERS)
    req: Any = SimpleNamespace(origin_input_ids=["no", "ids"], output_ids=None, cached_tokens=0)
    for _ in range(2):
        advisor.served(req, Request(b"", 2, 0, 2, 0.0), LearnedLatency(float))
    assert caplog.text.count("--marconi-advice failed on a request: no more advice") == 1
    assert not threads()
    advisor.close()


def test_an_advisor_without_requests_closes() -> None:
    advisor = Advisor(lambda: MEMORY, NEVER_READS)
    advisor.close()
    served(advisor)
    assert not threads()


def test_a_cache_hands_over_what_it_served_and_shows_the_answer() -> None:
    replay = on_marconi(SETTINGS["little-kv"], BEST)
    cache, requests = replay.cache, [*agents(seed=3)]
    cache.advisor = Advisor(lambda: cache.stats.memory(Alternatives(one_pool=True, host_tier=True)))
    try:
        num_passes = -(-NUM_NEW // len(requests)) + 1
        for _ in range(num_passes):
            for request in requests:
                replay.serve(request)
        until(lambda: cache.status().advice is not None)
        told = cache.status().as_dict()["advice"]
        assert told["num_requests"] >= NUM_NEW
        assert len(told["options"]) == 24
        assert "requests, " in told["advice"]
    finally:
        cache.release_host_resources()
    assert not threads()


def test_a_shadow_has_the_sizes_of_the_servers_pools() -> None:
    cache = on_marconi(SETTINGS["little-kv"], BEST).cache
    memory = cache.stats.memory(Alternatives(one_pool=True, host_tier=True))
    assert ServerMemory.from_bytes(memory.to_bytes()) == memory
    assert (memory.num_tokens, memory.num_slots) == (
        cache.token_to_kv_pool_allocator.size,
        cache.req_to_token_pool.mamba_allocator.size,
    )
    for num_tokens in (4096, 8192):
        flops = (memory.flops_per_token + memory.flops_per_squared_token * num_tokens) * num_tokens
        assert flops == pytest.approx(cache.costs.flops(num_tokens))
    assert Shadow(memory).options[0].num_bytes == (
        memory.num_tokens * memory.kv_bytes_per_token + memory.num_slots * memory.state_bytes
    )


@pytest.mark.parametrize(
    ("choice", "spec"),
    [
        (PolicyChoice(), "best"),
        (PolicyChoice(admission=CHUNK_END), "best@chunk-end"),
        (PolicyChoice("marconi", 2.0), "marconi:2"),
        (PolicyChoice("lru"), "lru@judicious"),
        (PolicyChoice("lru", admission=CHUNK_END), "lru"),
    ],
)
def test_a_choice_of_policies_has_the_name_of_its_replay(choice: PolicyChoice, spec: str) -> None:
    assert str(choice.spec) == spec


@pytest.mark.slow
def test_a_server_advises_and_leaves_no_process(models: dict[str, Path], tmp_path: Path) -> None:
    args = [*MARCONI, *POOLS, "--marconi-advice"]
    with ServerProcess(models["gdn"], args, log_path=tmp_path / "log") as running:
        contexts = [random_tokens(seed, 200) for seed in range(5)]
        prompts = [contexts[number % 5] + random_tokens(100 + number, 30) for number in range(NUM_NEW)]
        for start in range(0, NUM_NEW, 8):
            generate_together(running.url, prompts[start : start + 8], max_new_tokens=2)

        def advice() -> Any:
            (rank,) = httpx.get(f"{running.url}/marconi", timeout=60.0).json()["ranks"]
            return rank["advice"]

        until(lambda: advice() is not None)
        told = advice()
        assert told["num_requests"] >= NUM_NEW
        assert told["measured_hit_rate"] > 0.3
        assert told["present_hit_rate"] > 0.3
        assert json.dumps(told["advice"]) in json.dumps(told)
        group = running.pid
        assert any("marconi.replay.shadow" in each.cmdline() for each in processes_of(group))
    assert is_gone(group, within_s=30)
