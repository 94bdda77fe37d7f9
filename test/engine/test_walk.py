"""From SGLang's call to the victim and back, in one pool, the default way enters 28 of our files: `docs/tour.md`.

Eighteen decide, and the tour stops at each. Eight decide nothing: they count, explain misses and, on the
first of several ranks, time prefills. One is entered by a fit alone.
"""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import marconi
from marconi.engine.launch.policies import PolicyChoice
from rig.pools import Division, Strategy

from .host_replays import Setting, agents, on_marconi

pytestmark = pytest.mark.usefixtures("sglang_configuration")

PACKAGE = str(Path(marconi.__file__).parent)
TESTS = str(Path(__file__).parents[1])
TOUR = Path(__file__).parents[2] / "docs" / "tour.md"
WALK = {
    "engine/cache/radix_cache.py",
    "engine/cache/memory.py",
    "engine/cache/tree_core.py",
    "engine/cache/pools.py",
    "engine/joint/admission.py",
    "engine/joint/pools.py",
    "engine/cache/scheduler.py",
    "lifecycle/running.py",
    "policy/admission/trials.py",
    "policy/admission/plan.py",
    "policy/eviction/best.py",
    "policy/eviction/order.py",
    "policy/forecast/forecast.py",
    "policy/forecast/turns.py",
    "policy/hybrid_cache.py",
    "policy/waiting.py",
    "tree/node.py",
    "tree/radix.py",
}

OBSERVERS = {
    *("engine/reports/stats.py", "engine/reports/explain.py", "engine/reports/trail.py", "engine/reports/history.py"),
    *("policy/counters.py", "policy/misses.py", "policy/residency.py"),
    *("engine/cache/tick.py", "model/learned_latency.py"),
}
"""They count, explain misses and, on the first of several ranks, time prefills."""

MAX_CALLS = 450
"""Of a request with a hit and one eviction, in functions of ours."""
LEARNERS = {"policy/forecast/hazard.py"}
"""Entered by a fit, once in 128 requests."""


@contextmanager
def entered() -> Iterator[list[str]]:
    """The file of each of our functions that is called meanwhile, by anything but a test."""
    files: list[str] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        by_test = frame.f_back is not None and frame.f_back.f_code.co_filename.startswith(TESTS)
        if event == "call" and file.startswith(PACKAGE) and not by_test:
            files.append(str(Path(file).relative_to(PACKAGE)))

    sys.setprofile(note)
    try:
        yield files
    finally:
        sys.setprofile(None)


def files_on_the_way() -> tuple[set[str], int]:
    """Those of all requests that start from a state and evict another, and the calls of the shortest way."""
    replay = on_marconi(Setting(1, Strategy.EXTRA_BUFFER, 2600, 9, memory=Division.ONE_POOL), PolicyChoice("best"))
    counters, found, num_calls = replay.cache.tree_core.hybrid.counters, set[str](), list[int]()
    for request in agents(seed=3):
        before = counters.num_states_hit, sum(counters.num_evictions.values())
        with entered() as files:
            replay.serve(request)
        if before[0] < counters.num_states_hit and before[1] < sum(counters.num_evictions.values()):
            found |= {*files}
            num_calls.append(len(files))
    assert len(num_calls) > 10
    return found, min(num_calls)


def test_the_way_to_the_victim_and_back_is_in_28_files_and_the_tour_stops_where_something_is_decided() -> None:
    files, num_calls = files_on_the_way()
    assert files == WALK | OBSERVERS | LEARNERS
    assert len(files) == 28
    assert num_calls <= MAX_CALLS
    listed = re.findall(
        r"^\d+\. .*?\]\(\.\./python/marconi/([\w/]+\.py)\)", TOUR.read_text(encoding="utf-8"), re.MULTILINE
    )
    assert sorted(listed) == sorted(WALK)
