"""Servers with our cache and a host tier: answers are those without a cache, also from what had to come back.

Their copies run late, and what is freed on either tier is overwritten at once (`late_copies_server.py`). The negative
controls break the tier in three ways, each of which has to turn answers wrong.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from .client import random_tokens
from .conftest import CONSENSUS, NEGATIVE_CONTROL, STRATEGY_ARGS, TWO_RANKS, EntryPoint, Launch
from .reference import Reference
from .scenarios import CHUNKED_PREFILL_SIZE, EXTRA_BUFFER, NO_BUFFER, SCENARIOS, Exchange, one

LATE_COPIES = (str(Path(__file__).with_name("late_copies_server.py")),)
KV_TOKENS = 4_000
ARGS = (
    "--radix-cache-backend",
    "marconi",
    "--max-total-tokens",
    str(KV_TOKENS),
    "--max-mamba-cache-size",
    "32",
    "--max-running-requests",
    "6",
    "--chunked-prefill-size",
    str(CHUNKED_PREFILL_SIZE),
    "--enable-hierarchical-cache",
    "--hicache-ratio",
    "6",
)
CHECKED = ("--marconi-check-invariants", "idle")
KINDS = [(family, strategy) for family in ("gdn", "mamba2") for strategy in (EXTRA_BUFFER, NO_BUFFER)]
LAUNCHES = (
    *(
        Launch(
            f"{family}-{strategy}-host",
            family,
            (*ARGS, *STRATEGY_ARGS[strategy], *CHECKED),
            strategy,
            entry_point=LATE_COPIES,
        )
        for family, strategy in KINDS
    ),
    Launch(
        "gdn-extra_buffer-host-tensor",
        "gdn",
        (*ARGS, *STRATEGY_ARGS[EXTRA_BUFFER], *CHECKED, *TWO_RANKS),
        env=CONSENSUS,
        entry_point=LATE_COPIES,
    ),
)
NUM_CONVERSATIONS = 3 * KV_TOKENS // 1_000
LEFT_OUT = ("evicted", "aborted")
"""What is asserted there holds without a host tier."""


def conversations(url: str, seed: int = 40_000) -> list[Exchange]:
    """Conversations that take three times the device's memory, the second turns after all of the first."""
    first = [one(url, random_tokens(seed + index, 1_000)) for index in range(NUM_CONVERSATIONS)]
    told = [[*exchange.prompt, *exchange.completion.token_ids] for exchange in first]
    return [*first, *(one(url, history + random_tokens(seed + 100 + index, 40)) for index, history in enumerate(told))]


def host_of(url: str) -> dict[str, Any]:
    """What the server says of its host tier."""
    (rank,) = httpx.get(f"{url}/marconi").json()["ranks"]
    host: dict[str, Any] = rank["host"]
    return host


@pytest.mark.slow
def test_conversations_of_three_times_the_devices_memory_are_gone_on_with(
    launch: Launch, server: Any, references: Callable[[str], Reference]
) -> None:
    num_loads = host_of(server.url)["num_loads"]
    exchanges = conversations(server.url)
    assert references(launch.family).divergences(exchanges) == []
    hits = [exchange.completion.num_cached_tokens for exchange in exchanges[NUM_CONVERSATIONS:]]
    assert sum(hit > 1_000 for hit in hits) >= 0.8 * NUM_CONVERSATIONS, hits
    assert host_of(server.url)["num_loads"] - num_loads >= 0.5 * NUM_CONVERSATIONS


@pytest.mark.slow
@pytest.mark.parametrize(
    "scenario", [each for each in SCENARIOS if each.name not in LEFT_OUT], ids=lambda scenario: scenario.name
)
def test_what_was_evicted_to_the_host_gives_the_same_answer(
    scenario: Any, launch: Launch, server: Any, references: Callable[[str], Reference]
) -> None:
    """Each scenario twice, and between them as much as the device holds."""
    exchanges = scenario.ask(server.url)
    for index in range(KV_TOKENS // 1_000):
        exchanges.append(one(server.url, random_tokens(60_000 + index, 1_000)))
    exchanges += scenario.ask(server.url)
    assert references(launch.family).divergences(exchanges) == []


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["reused", "unlocked", "unwaited"])
def test_negative_control_a_broken_tier_turns_answers_red(
    fault: str,
    preload: EntryPoint,
    models: dict[str, Path],
    references: Callable[[str], Reference],
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    args = (*ARGS, *STRATEGY_ARGS[EXTRA_BUFFER])
    broken = Launch(f"gdn-host-{fault}", "gdn", args, env=(("MARCONI_TEST_FAULT", fault),))
    with broken.process(models, tmp_path / "log", entry_point=preload(LATE_COPIES)) as server:
        red = references("gdn").divergences(conversations(server.url))
        num_loads = host_of(server.url)["num_loads"]
    record_property(NEGATIVE_CONTROL, f"host tier, {fault}: {len(red)} answers RED of {num_loads} loads")
    assert red
