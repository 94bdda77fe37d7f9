"""The live page: a server's tree as its cache has it, in slices, and in a browser without a violation."""

import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from browsing import Visit, visit  # noqa: F401 - a fixture
from marconi.engine.launch.policies import PolicyChoice
from marconi.engine.reports import picture
from marconi.engine.reports.picture import Picture
from marconi.view.frame import Frame
from marconi.view.snapshot import NodeKind, snapshot
from marconi.view.standing import Standing
from marconi_cpu.demo.server_process import ServerProcess
from rig.pools import Strategy

from .client import HTTP, NUM_TOKENS, generate, random_tokens
from .conftest import STANDARD
from .host_replays import Setting, agents, on_marconi
from .scenarios import EXTRA_BUFFER

LAUNCHES = (STANDARD["gdn", EXTRA_BUFFER],)


@pytest.mark.usefixtures("sglang_configuration")
def test_a_frame_is_the_tree_however_small_its_slices_are(monkeypatch: pytest.MonkeyPatch) -> None:
    replay = on_marconi(Setting(1, Strategy.EXTRA_BUFFER, 2600, 9), PolicyChoice("best"))
    cache = replay.cache
    made = Picture(cache.costs, cache.status)
    monkeypatch.setattr(picture, "SLICE_NODES", 5)
    hybrid, frames, num_asks = cache.tree_core.hybrid, list[Frame](), 0
    assert made.advance(hybrid, 0.0), "of an empty tree: from now on it is watched"
    for request in agents(1):
        replay.serve(request)
        now_s = cache.clock()
        while not (told := made.advance(hybrid, now_s)):
            num_asks += 1
        frames.append(msgspec.json.decode(told, type=Frame))
        assert frames[-1].nodes == snapshot(hybrid.tree, standing=Standing(hybrid.order, now_s))
        assert 0 in frames[-1].nodes.worth
    assert num_asks > len(frames)
    counters = hybrid.counters
    assert sum(frame.num_evicted for frame in frames) == sum(counters.num_evictions.values()) > 0
    assert sum(len(frame.evicted) for frame in frames) == sum(counters.num_evictions.values())
    missed = sum(sum(frame.missed_tokens.values()) for frame in frames)
    assert missed == counters.num_prompt_tokens - counters.num_hit_tokens
    for pool, use in zip(frames[-1].pools, (cache.status().kv_tokens, cache.status().state_slots), strict=True):
        assert (pool.size, pool.free, sum(pool.cached.values())) == (use.size, use.free, use.cached)


@pytest.mark.usefixtures("sglang_configuration")
def test_a_flush_in_the_middle_of_a_walk_begins_another(monkeypatch: pytest.MonkeyPatch) -> None:
    replay = on_marconi(Setting(1, Strategy.EXTRA_BUFFER, 2600, 9), PolicyChoice("best"))
    cache = replay.cache
    made = Picture(cache.costs, cache.status)
    for request in agents(1):
        replay.serve(request)
    monkeypatch.setattr(picture, "SLICE_NODES", 2)
    assert made.advance(cache.tree_core.hybrid, 0.0) == b""
    cache.reset()
    frame = msgspec.json.decode(made.advance(cache.tree_core.hybrid, 1.0), type=Frame)
    assert frame.nodes == snapshot(cache.tree_core.hybrid.tree)
    assert not frame.missed_tokens


@pytest.mark.usefixtures("sglang_configuration")
def test_once_nobody_looks_evictions_are_noted_no_longer_until_somebody_does(monkeypatch: pytest.MonkeyPatch) -> None:
    replay = on_marconi(Setting(1, Strategy.EXTRA_BUFFER, 2600, 9), PolicyChoice("best"))
    cache = replay.cache
    made, hybrid = Picture(cache.costs, cache.status), cache.tree_core.hybrid
    assert made.advance(hybrid, cache.clock())
    assert len(hybrid.watchers) == 1
    monkeypatch.setattr(made._recorder, "_patience_s", -1.0)
    for request in agents(1):
        replay.serve(request)
    assert hybrid.watchers == ()
    now_s = cache.clock()
    frame = msgspec.json.decode(made.advance(hybrid, now_s), type=Frame)
    assert len(hybrid.watchers) == 1
    assert (frame.num_evicted, frame.evicted) == (sum(hybrid.counters.num_evictions.values()), [])
    assert frame.num_evicted > 0
    assert frame.nodes == snapshot(hybrid.tree, standing=Standing(hybrid.order, now_s))


def frame_of(url: str) -> dict[str, Any]:
    response = HTTP.get(f"{url}/marconi/ui/frame", timeout=60.0)
    assert response.status_code == 200, response.text
    frame: dict[str, Any] = response.json()
    return frame


def test_a_server_draws_what_its_cache_holds(server: ServerProcess) -> None:
    page = HTTP.get(f"{server.url}/marconi/ui", timeout=60.0)
    assert page.headers["content-type"].startswith("text/html")
    assert 'data-source="ui/frame?dp_rank=0" data-requests="requests?dp_rank=0"' in page.text
    assert 'data-history="ui/history?dp_rank=0"' in page.text
    # Whatever else is there may be worth more than what this prompt leaves.
    assert HTTP.post(f"{server.url}/flush_cache?timeout=30", timeout=60.0).status_code == 200
    frame_of(server.url)
    prompt = random_tokens(600, 250)
    for _ in range(2):
        generate(server.url, prompt)
    frame = frame_of(server.url)
    assert frame["hit_tokens"] == 249
    assert sum(frame["missed_tokens"].values()) == 251
    (rank,) = HTTP.get(f"{server.url}/marconi/requests?dp_rank=0", timeout=60.0).json()["ranks"]
    at = frame["nodes"]["hash"].index(int(rank["requests"][0]["prefix"], 16))
    assert frame["nodes"]["depth"][at] == 250 + NUM_TOKENS - 1, "all that it computed"
    (status,) = HTTP.get(f"{server.url}/marconi", timeout=60.0).json()["ranks"]
    assert sum(1 for kind in frame["nodes"]["kind"] if kind & NodeKind.STATE) == status["num_states"]
    hour = HTTP.get(f"{server.url}/marconi/ui/history?dp_rank=0", timeout=60.0).json()
    assert (hour["num_prompt_tokens"][-1], hour["num_hit_tokens"][-1], hour["saved_s"]) == (
        status["num_prompt_tokens"],
        status["num_hit_tokens"],
        status["saved_s"],
    )
    assert hour["num_hit_tokens"][0] < hour["num_hit_tokens"][-1], "noted before anybody looked"
    assert abs(hour["at_s"][-1] - time.time()) < 60
    for path in ("ui/frame", "ui/history", "requests"):
        wrong = HTTP.get(f"{server.url}/marconi/{path}?dp_rank=3", timeout=60.0)
        assert (wrong.status_code, wrong.json()) == (404, {"error": "dp_rank must be one of 0, got 3"})


@pytest.mark.browser
def test_the_page_of_a_server_follows_its_requests(server: ServerProcess, visit: Callable[..., Visit]) -> None:  # noqa: F811
    from axe_playwright_python.sync_playwright import Axe

    page = visit(f"{server.url}/marconi/ui")
    page.page.wait_for_function("document.getElementById('summary').textContent.includes('requests so far')")
    generate(server.url, random_tokens(610, 80))
    page.page.wait_for_function("frames.length > 1 && frames.at(-1).missed_tokens['first seen'] === 79")
    assert [(each["id"]) for each in Axe().run(page.page).response["violations"]] == []
    assert page.complaints == []
    (rank,) = HTTP.get(f"{server.url}/marconi/requests?dp_rank=0", timeout=60.0).json()["ranks"]
    page.page.wait_for_function("(rid) => latest.latest[0]?.rid === rid", arg=rank["requests"][0]["rid"])
    page.page.locator("#requests a").first.click()
    assert page.text("request") == f"Request {rank['requests'][0]['rid']}: {rank['requests'][0]['line']}."
    assert page.page.evaluate("layout.nodes.depth[look.end]") == 80 + NUM_TOKENS - 1, "the path that it left"
    paths = ("ui", "ui/frame", "ui/history", "requests")
    assert {url.split("?")[0] for url in page.requests} == {f"{server.url}/marconi/{path}" for path in paths}
