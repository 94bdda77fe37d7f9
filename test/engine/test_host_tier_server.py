"""Servers with our cache and a host tier: answers are those without a cache, and what was evicted comes back."""

from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from .client import random_tokens
from .conftest import STANDARD, EntryPoint, Launch
from .reference import Reference
from .scenarios import EXTRA_BUFFER, MAX_KV_TOKENS, NO_BUFFER, Exchange, one

HOST_TIER = ("--enable-hierarchical-cache", "--hicache-ratio", "5")


def with_host_tier(family: str, strategy: str) -> Launch:
    """The standard server, with a host tier."""
    plain = STANDARD[family, strategy]
    return Launch(f"{plain.name}-host", family, (*plain.args, *HOST_TIER), strategy)


NUM_CONVERSATIONS = 3 * MAX_KV_TOKENS // 1_000


def two_turns(url: str) -> list[Exchange]:
    """Conversations that take three times the device's memory, the second turns after all of the first."""
    first = [one(url, random_tokens(40_000 + index, 1_000)) for index in range(NUM_CONVERSATIONS)]
    told = [[*exchange.prompt, *exchange.completion.token_ids] for exchange in first]
    return [*first, *(one(url, history + random_tokens(50_000 + index, 40)) for index, history in enumerate(told))]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [EXTRA_BUFFER, NO_BUFFER])
@pytest.mark.parametrize("family", ["gdn", "mamba2"])
def test_conversations_of_three_times_the_devices_memory_are_gone_on_with(
    family: str,
    strategy: str,
    preload: EntryPoint,
    models: dict[str, Path],
    references: Callable[[str], Reference],
    tmp_path: Path,
) -> None:
    launch = with_host_tier(family, strategy)
    with launch.process(models, tmp_path / "log", entry_point=preload(launch.entry_point)) as server:
        exchanges = two_turns(server.url)
        (status,) = httpx.get(f"{server.url}/marconi").json()["ranks"]
        print(status)
    assert references(family).divergences(exchanges) == []
    hits = [exchange.completion.num_cached_tokens for exchange in exchanges[NUM_CONVERSATIONS:]]
    print(hits)
    assert sum(hit > 1_000 for hit in hits) >= 0.9 * NUM_CONVERSATIONS
    assert status["host"]["num_loads"] >= 0.6 * NUM_CONVERSATIONS
