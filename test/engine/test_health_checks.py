"""SGLang's own health checks generate a token through the cache: they are counted apart, and leave nothing there."""

from array import array
from dataclasses import replace
from typing import Any

import pytest
from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX

from marconi.engine.launch.policies import CHUNK_END, JUDICIOUS, PolicyChoice
from marconi.engine.reports.status import Status
from rig.balance import check_balance
from rig.clock import TraceClock
from rig.pools import COSTS, Strategy, marconi
from rig.scheduler import HostScheduler, Outcome
from rig.soak import soak_pools
from rig.workload import Origin, Script

pytestmark = pytest.mark.usefixtures("sglang_configuration")

NUM_CHECKS = 5
CHECK = Script(Origin.NEW, array("q", [0]), array("q", [1]), 1, (None, None))
"""As `http_server.py:health_generate` asks: one token in, one out."""
LONG = Script(Origin.NEW, array("q", [0, 1, 2, 1] * 20), array("q", [1, 2]), 2, (None, None))


def scheduler(page_tokens: int = 1, admission: str = JUDICIOUS) -> HostScheduler:
    host = soak_pools(Strategy.EXTRA_BUFFER, page_tokens)
    return HostScheduler(marconi(host, PolicyChoice(admission=admission), COSTS, TraceClock()), host)


def serve(server: HostScheduler, prefix: str, script: Script = CHECK) -> None:
    """Five requests that wait together, named by `prefix`."""
    for number in range(NUM_CHECKS):
        server.submit(script, f"{prefix}_{number}")
    while server.step():
        check_balance(server.cache, server.in_flight())


def calls(server: HostScheduler, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the policies receive from now on."""
    told: list[str] = []

    def note(name: str) -> None:
        method = getattr(server.cache.tree_core.hybrid, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            told.append(name)
            return method(*args, **kwargs)

        monkeypatch.setattr(server.cache.tree_core.hybrid, name, call)

    for name in ("begin", "plan", "insert"):
        note(name)
    return told


@pytest.mark.parametrize(("page_tokens", "admission"), [(1, JUDICIOUS), (16, JUDICIOUS), (1, CHUNK_END)])
def test_a_health_check_counts_apart_and_leaves_nothing(
    page_tokens: int, admission: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = scheduler(page_tokens, admission)
    serve(server, "request", LONG)
    before: Status = server.cache.status()
    told = calls(server, monkeypatch)
    serve(server, HEALTH_CHECK_RID_PREFIX)
    assert server.outcomes[Outcome.FINISHED] == 2 * NUM_CHECKS
    assert server.cache.status() == replace(before, num_health_checks=NUM_CHECKS)
    assert not told


def test_the_same_prompts_under_another_name_are_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    server = scheduler()
    told = calls(server, monkeypatch)
    serve(server, "request")
    status = server.cache.status()
    assert (status.num_health_checks, status.num_requests, status.hits["none"]) == (0, NUM_CHECKS, NUM_CHECKS)
    assert status.num_states == 1
    assert set(told) == {"begin", "plan", "insert"}
