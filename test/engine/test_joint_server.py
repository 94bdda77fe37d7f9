"""A server whose KV and states share one pool answers as the model without a prefix cache, while entries move."""

from collections.abc import Callable
from pathlib import Path

import pytest

from marconi.process import LAUNCH
from marconi_cpu.demo.server_process import ServerFailed, ServerProcess

from .breaking import broken_states
from .client import HTTP, generate, random_tokens
from .conftest import BY_REQUESTS, CONSENSUS, MARCONI, NEGATIVE_CONTROL, TWO_RANKS, EntryPoint, Launch
from .matrix import SERVER
from .reference import Reference
from .scenarios import Exchange
from .scrapes import OF_ONE_POOL, all_unanswered, scraped

pytestmark = pytest.mark.slow

POOL = (
    *("--enable-unified-memory", "--max-total-tokens", "1200", "--max-mamba-cache-size", "16"),
    *("--max-running-requests", "3", "--chunked-prefill-size", "256"),
)
LAUNCHES = (Launch("joint", "gdn", (*MARCONI, *POOL, "--enable-metrics"), env=BY_REQUESTS, entry_point=SERVER),)


def ask(url: str) -> list[Exchange]:
    """Repeats, extensions and branches of prompts of which the pool holds a few at a time."""
    prompts: list[list[int]] = []
    for seed in range(6):
        first = random_tokens(500 + seed, 420)
        prompts += [first, [*first, *random_tokens(600 + seed, 60)], [*first[:200], *random_tokens(700 + seed, 90)]]
        prompts += [[*first[:200], *random_tokens(800 + seed, 90)], first]
    return [Exchange(tuple(prompt), generate(url, prompt)) for prompt in prompts]


def test_answers_are_those_without_a_cache_while_victims_go_for_bytes(
    server: ServerProcess, references: Callable[[str], Reference]
) -> None:
    exchanges = ask(server.url)
    assert references("gdn").divergences(exchanges) == []
    hits = [exchange.completion.num_cached_tokens for exchange in exchanges]
    assert sum(hit > 0 for hit in hits) > 10
    (status,) = HTTP.get(f"{server.url}/marconi", timeout=60.0).json()["ranks"]
    pool = status["joint_bytes"]
    assert pool["free"] + pool["cached"] == pool["size"], "idle: nothing is in use"
    assert status["evictions"]["bytes"] > 10
    assert status["evictions"]["kv"] == status["evictions"]["states"] == 0
    assert not all_unanswered(scraped(server.url), OF_ONE_POOL.__contains__)


def test_negative_control_a_broken_state_is_seen(
    launch: Launch,
    server: ServerProcess,
    references: Callable[[str], Reference],
    record_property: Callable[[str, object], None],
) -> None:
    with broken_states(server):
        exchanges = ask(server.url)
    found = references("gdn").divergences(exchanges)
    said = f"{len(found)} of {len(exchanges)} answers RED; first, {found[:1]}"
    record_property(NEGATIVE_CONTROL, f"{launch.name}, one pool: {said}")
    assert found, "a server that breaks states answered rightly"


def test_the_line_at_the_start_tells_of_one_pool(server: ServerProcess) -> None:
    costs = "KV tokens of 1024 bytes and states of 143360 bytes together, page 1,"
    assert f"bytes for {costs}" in server.log_path.read_text(encoding="utf-8")


def test_a_server_whose_memory_no_flag_divides_chooses_one_pool_and_says_so(
    preload: EntryPoint,
    models: dict[str, Path],
    references: Callable[[str], Reference],
    tmp_path: Path,
) -> None:
    args = (*MARCONI, "--max-total-tokens", "2000", "--max-running-requests", "3", "--chunked-prefill-size", "256")
    launch = Launch("undivided", "gdn", (*args, *TWO_RANKS), env=CONSENSUS)
    with launch.process(models, tmp_path / "log", entry_point=preload(LAUNCH)) as server:
        prompt = random_tokens(900, 420)
        prompts = [prompt, prompt, [*prompt[:200], *random_tokens(901, 90)], [*prompt, *random_tokens(902, 60)]]
        exchanges = [Exchange(tuple(each), generate(server.url, each)) for each in prompts]
        (status,) = HTTP.get(f"{server.url}/marconi", timeout=60.0).json()["ranks"]
    assert references("gdn").divergences(exchanges) == []
    assert [exchange.completion.num_cached_tokens > 0 for exchange in exchanges] == [False, True, True, True]
    assert status["joint_bytes"] is not None
    assert status["split"].startswith("KV and states share one pool")
    assert f"marconi: {status['split']}" in (tmp_path / "log").read_text(encoding="utf-8")


def test_one_pool_without_planned_states_is_refused_in_one_line(
    preload: EntryPoint, models: dict[str, Path], tmp_path: Path
) -> None:
    args = [*MARCONI, *POOL, "--marconi-admission", "chunk-end"]
    with (
        pytest.raises(
            ServerFailed, match="--enable-unified-memory is only supported with --marconi-admission judicious"
        ),
        ServerProcess(models["gdn"], args, log_path=tmp_path / "log", entry_point=preload(LAUNCH)),
    ):
        pass
    assert (tmp_path / "log").read_text().count("marconi: error: --enable-unified-memory is only supported with") == 1
