"""Real servers whose ranks share a model: the answers of one rank without a prefix cache, and ranks that never part.

SGLang's own checker compares what ranks decide (`SGLANG_ENABLE_RANK_CONSENSUS_CHECKER`) and ends the server where they
part. The negative controls break the state that a hit copies, on all ranks, and put a wall clock back.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from marconi.demo.server_process import ServerProcess

from .breaking import require_broken
from .conftest import BROKEN_STATE_SERVER, CONSENSUS, STANDARD, TWO_RANKS, EntryPoint, Launch
from .reference import Reference
from .scenarios import EXTRA_BUFFER, NO_BUFFER, SCENARIOS, Scenario

pytestmark = pytest.mark.slow

SHAPES = {
    "tensor": TWO_RANKS,
    "data-parallel-attention": (*TWO_RANKS, "--dp-size", "2", "--enable-dp-attention"),
}


def launch_of(family: str, strategy: str, shape: str) -> Launch:
    alone = STANDARD[family, strategy]
    # Ranks of their own share the slots and the rows of the server.
    more = ("--max-mamba-cache-size", "96", "--max-running-requests", "16") if "data" in shape else ()
    return Launch(f"{alone.name}-{shape}", family, (*alone.args, *SHAPES[shape], *more), strategy, CONSENSUS)


LAUNCHES = (
    launch_of("gdn", EXTRA_BUFFER, "tensor"),
    launch_of("mamba2", NO_BUFFER, "tensor"),
    # Of the gated delta rule alone: stock's Nemotron-H ends in a rank that has nothing to do.
    launch_of("gdn", EXTRA_BUFFER, "data-parallel-attention"),
)


def is_asked(launch: Launch, scenario: Scenario) -> bool:
    return launch is LAUNCHES[0] or not scenario.is_long


@pytest.fixture(autouse=True)
def _one_cache(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of ranks with caches of their own one is asked, the last: the scenarios count on what they left."""
    launch = getattr(request.node, "callspec", None) and request.node.callspec.params.get("server")
    if launch is None or "--dp-size" not in launch.args:
        return
    server: ServerProcess = request.getfixturevalue("server")
    post = httpx.post

    def to_the_last(url: str, **options: Any) -> httpx.Response:
        if url == f"{server.url}/generate":
            options["json"] = {**options["json"], "routed_dp_rank": 1}
        return post(url, **options)

    monkeypatch.setattr(httpx, "post", to_the_last)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_a_reused_state_gives_the_answer_of_one_rank(
    scenario: Scenario, launch: Launch, server: ServerProcess, references: Callable[[str], Reference]
) -> None:
    references(launch.family).require_same(scenario, server.url, launch.strategy)


def test_every_cache_says_once_what_it_holds(launch: Launch, server: ServerProcess) -> None:
    ranks = httpx.get(f"{server.url}/marconi").json()["ranks"]
    num_caches = 2 if "--dp-size" in launch.args else 1
    assert len(ranks) == num_caches
    assert ranks[-1]["num_requests"] > 0
    log = server.log_path.read_text(encoding="utf-8", errors="replace")
    assert log.count("invariants checked: idle") == num_caches, "a line at the start for each cache"


@pytest.mark.parametrize(("family", "strategy"), [("gdn", EXTRA_BUFFER), ("mamba2", NO_BUFFER)])
def test_control_a_broken_state_is_seen(
    family: str,
    strategy: str,
    preload: EntryPoint,
    models: dict[str, Path],
    tmp_path: Path,
    references: Callable[[str], Reference],
) -> None:
    broken = launch_of(family, strategy, "tensor")
    with broken.process(models, tmp_path / "log", entry_point=preload(BROKEN_STATE_SERVER)) as server:
        found = [
            each for scenario in SCENARIOS[:4] for each in references(family).divergences(scenario.ask(server.url))
        ]
        require_broken(server.log_path)
    assert found, "a server that breaks states answered rightly"
