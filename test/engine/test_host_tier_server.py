"""Servers with our cache and a host tier: answers are those without a cache, also from what had to come back.

Their copies run late, and what is freed on either tier is overwritten at once (`late_copies_server.py`). The negative
controls break the tier in three ways, each of which has to turn answers wrong.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from .breaking import require_broken
from .client import random_tokens
from .conftest import CONSENSUS, MTP, NEGATIVE_CONTROL, STRATEGY_ARGS, TWO_RANKS, EntryPoint, Launch
from .disaggregated import disaggregated
from .reference import Reference
from .scenarios import CHUNKED_PREFILL_SIZE, EXTRA_BUFFER, NO_BUFFER, SCENARIOS, Exchange, Scenario, one
from .scrapes import ON_THE_HOST, all_unanswered, scraped
from .test_speculation import NEXTN, NGRAM, OVERLAPPED

LATE_COPIES = (str(Path(__file__).with_name("late_copies_server.py")),)
KV_TOKENS = 4_000
HOST = ("--enable-hierarchical-cache", "--hicache-ratio", "6")
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
    *HOST,
)
CHECKED = ("--marconi-check-invariants", "idle")
KINDS = [("gdn", EXTRA_BUFFER), ("mamba2", NO_BUFFER)]
DRAFTS = {"NGRAM": NGRAM, "NEXTN": NEXTN}
OVERLAP = (("MARCONI_TEST_BESIDE", "overlapping_server.py"),)


def drafting(family: str, algorithm: str, schedule: str, *more: str) -> Launch:
    """A server that decodes over drafts; with `OVERLAPPED` the next step has begun before one's result is seen."""
    strategy = NO_BUFFER if schedule == NO_BUFFER else EXTRA_BUFFER
    return Launch(
        f"{family}-{algorithm}-{schedule}-host{'-tensor' if more else ''}",
        family + MTP,
        (*ARGS, *STRATEGY_ARGS[strategy], *CHECKED, *DRAFTS[algorithm], *more),
        strategy,
        OVERLAP if schedule == OVERLAPPED else CONSENSUS if more else (),
        LATE_COPIES,
    )


DRAFTING = (
    drafting("gdn", "NEXTN", OVERLAPPED),
    drafting("gdn", "NGRAM", NO_BUFFER),
    drafting("mamba2", "NEXTN", NO_BUFFER),
    drafting("mamba2", "NGRAM", OVERLAPPED),
    drafting("mamba2", "NGRAM", NO_BUFFER, *TWO_RANKS),
)
LAUNCHES = (
    *(
        Launch(
            f"{family}-{strategy}-host",
            family,
            (*ARGS, *STRATEGY_ARGS[strategy], *CHECKED, "--enable-metrics"),
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
    *DRAFTING,
)
NUM_CONVERSATIONS = 3 * KV_TOKENS // 1_000
LEFT_OUT = ("evicted", "aborted", "every-position")
"""What is asserted there holds without a host tier, or that is emptied before each prompt."""
FEW = {"multi-turn", "concurrent", "chunked-prefill", "thinking-dropped"}
"""Scenarios of ranks, and of servers that draft."""


def is_asked(launch: Launch, scenario: Scenario) -> bool:
    return scenario.name in FEW or launch in LAUNCHES[:2]


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
    if "--enable-metrics" in launch.args:
        assert not all_unanswered(scraped(server.url), ON_THE_HOST.__contains__)


@pytest.mark.slow
@pytest.mark.parametrize(
    "scenario", [each for each in SCENARIOS if each.name not in LEFT_OUT], ids=lambda scenario: scenario.name
)
def test_what_was_evicted_to_the_host_gives_the_same_answer(
    scenario: Any, launch: Launch, server: Any, references: Callable[[str], Reference]
) -> None:
    assert references(launch.family).divergences(twice(scenario, server.url)) == []


@pytest.mark.slow
def test_a_prompt_that_an_orchestrator_prefetches_starts_from_the_device(
    launch: Launch, server: Any, references: Callable[[str], Reference]
) -> None:
    """Between the hint and the prompt the state has come back; without the hint the prompt itself loads it."""
    first = conversations(server.url, seed=70_000)[:2]
    turns = [[*each.prompt, *each.completion.token_ids, *random_tokens(70_500, 40)] for each in first]

    def num_loads() -> int:
        return int(host_of(server.url)["num_loads"])

    exchanges: list[Exchange] = []
    for hinted, loads in ((turns, [2, 0, 0]), (turns[:1], [1, 0, 1])):
        for _ in range(2 * KV_TOKENS // 1_000):
            exchanges.append(one(server.url, random_tokens(71_000 + len(exchanges), 1_000)))
        counts = [num_loads()]
        for number, prompt in enumerate(hinted):
            prefetch(server.url, prompt, 100_000 + 1_000 * len(exchanges) + 100 * number)
        counts.append(num_loads())
        for prompt in turns:
            exchanges.append(one(server.url, prompt))
            assert exchanges[-1].completion.num_cached_tokens > 1_000
            counts.append(num_loads())
        assert [after - before for before, after in pairwise(counts)] == loads
    assert references(launch.family).divergences(exchanges) == []


def prefetch(url: str, prompt: list[int], seed: int) -> None:
    """Short requests hint at `prompt` until it is loaded: not while copies, here late, keep what would be evicted.

    Each is another prompt: one that was sent before may be loaded from the host itself.
    """
    payload = {"input_ids": prompt, "seconds": 1e-3}
    action = {"action_id": "a", "action_type": "prefetch", "action_version": "1.0", "payload": payload}
    body = {
        "sampling_params": {"max_new_tokens": 1},
        "kv_hints": {"protocol_version": "0.1", "message_id": "m", "actions": [action]},
    }
    for attempt in range(50):
        asked = body | {"input_ids": random_tokens(seed + attempt, 20)}
        meta = httpx.post(f"{url}/generate", json=asked, timeout=300.0).json()["meta_info"]
        (answer,) = meta["marconi_kv_hints"]
        if answer["result"] != "rejected":
            assert (answer["result"], answer["num_tokens"] > 1_000) == ("accepted", True), answer
            return
        assert re.match("no room|requests that run|the prefetches of", answer["reason"]), answer
    raise AssertionError(answer)


def twice(scenario: Scenario, url: str) -> list[Exchange]:
    """A scenario twice, and between them as much as the device holds."""
    exchanges = scenario.ask(url)
    for index in range(KV_TOKENS // 1_000):
        exchanges.append(one(url, random_tokens(60_000 + index, 1_000)))
    return exchanges + scenario.ask(url)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launch", "fault"),
    [
        *(pytest.param(LAUNCHES[0], fault, id=f"plain-{fault}") for fault in ("reused", "unlocked", "unwaited")),
        pytest.param(LAUNCHES[2], "unwaited", id="ranks-unwaited"),
        *(pytest.param(each, "unwaited", id=f"{each.name}-unwaited") for each in DRAFTING[:2]),
    ],
)
def test_negative_control_a_broken_tier_turns_answers_red(
    launch: Launch,
    fault: str,
    preload: EntryPoint,
    models: dict[str, Path],
    references: Callable[[str], Reference],
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    broken = broken_by(fault, launch)
    with broken.process(models, tmp_path / "log", entry_point=preload(LATE_COPIES)) as server:
        exchanges = conversations(server.url)
        num_broken = require_broken(server.log_path)
        num_loads = host_of(server.url)["num_loads"]
    red = references(launch.family).divergences(exchanges)
    said = f"{len(red)} answers RED of {num_broken} broken copies and {num_loads} loads"
    record_property(NEGATIVE_CONTROL, f"{broken.name}: {said}")
    assert red


def broken_by(fault: str, launch: Launch) -> Launch:
    """`launch` with a fault, and without checks that would see it first."""
    args = tuple(each for each in launch.args if each not in CHECKED)
    env = (*launch.env, ("MARCONI_TEST_FAULT", fault))
    return replace(launch, name=f"{launch.name}-{fault}", args=args, env=env)


@pytest.mark.slow
def test_a_draft_models_kv_is_loaded_too_and_changes_only_how_much_is_accepted(
    preload: EntryPoint, models: dict[str, Path], references: Callable[[str], Reference], tmp_path: Path
) -> None:
    accepted = []
    for launch in (DRAFTING[0], broken_by("undrafted", DRAFTING[0])):
        with launch.process(models, tmp_path / launch.name, entry_point=preload(LATE_COPIES)) as server:
            assert references(launch.family).divergences(conversations(server.url)) == []
            assert host_of(server.url)["num_loads"] >= 0.5 * NUM_CONVERSATIONS
            accepted.append(tokens_a_step(server.url))
    require_broken(tmp_path / launch.name)
    assert accepted[0] > accepted[1], f"as many tokens a step without the draft's KV as with it: {accepted}"


@pytest.mark.slow
def test_a_small_model_may_draft_beside_a_host_tier(
    preload: EntryPoint,
    models: dict[str, Path],
    attention_model: Path,
    references: Callable[[str], Reference],
    tmp_path: Path,
) -> None:
    """Its KV has a pool of its own, on the host as well."""
    args = ("--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", str(attention_model))
    args = (*ARGS, *STRATEGY_ARGS[EXTRA_BUFFER], *CHECKED, *args, "--context-length", "4096", *NEXTN[2:])
    launch = Launch("gdn-STANDALONE-host", "gdn", args, env=OVERLAP)
    with launch.process(models, tmp_path / "log", entry_point=preload(LATE_COPIES)) as server:
        exchanges = conversations(server.url)
        num_loads = host_of(server.url)["num_loads"]
    assert references(launch.family).divergences(exchanges) == []
    assert num_loads >= 0.5 * NUM_CONVERSATIONS


def tokens_a_step(url: str) -> float:
    """Of the server's steps over drafts so far, what each gave."""
    (rank,) = httpx.get(f"{url}/server_info", timeout=60.0).json()["internal_states"]
    return float(rank["avg_spec_accept_length"])


PREFILLING = [("gdn", EXTRA_BUFFER, ()), ("mamba2-mtp", NO_BUFFER, NEXTN)]


def prefilling(family: str, strategy: str, drafts: tuple[str, ...]) -> Launch:
    """A prefill server and a decode server, but for the host tier of the former."""
    beside = (("MARCONI_TEST_BESIDE", "disaggregated_server.py"),)
    args = (*ARGS[: -len(HOST)], *STRATEGY_ARGS[strategy], *CHECKED, *drafts)
    return Launch(f"{family}-{strategy}-prefill", family, args, strategy, beside, LATE_COPIES)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "strategy", "drafts"), PREFILLING, ids=["plain", "drafting"])
def test_a_prefill_server_hands_over_what_came_back_from_the_host(
    family: str,
    strategy: str,
    drafts: tuple[str, ...],
    preload: EntryPoint,
    models: dict[str, Path],
    references: Callable[[str], Reference],
    tmp_path: Path,
) -> None:
    with disaggregated(prefilling(family, strategy, drafts), models, preload, tmp_path, HOST) as pair:
        exchanges = conversations(pair.url)
        num_loads = host_of(pair.prefill.url)["num_loads"]
        for scenario in SCENARIOS:
            if scenario.name in ("concurrent", "chunked-prefill"):
                exchanges += twice(scenario, pair.url)
    assert references(family).divergences(exchanges) == []
    # Answers never come back to it. Of two states at a prompt's end a token apart the host holds one.
    hits = [exchange.completion.num_cached_tokens for exchange in exchanges[NUM_CONVERSATIONS : 2 * NUM_CONVERSATIONS]]
    assert sum(hit in (999, 1_000) for hit in hits) >= 0.8 * NUM_CONVERSATIONS, hits
    assert num_loads >= 0.5 * NUM_CONVERSATIONS


@pytest.mark.slow
def test_negative_control_a_prefill_server_that_does_not_wait_for_a_load_turns_answers_red(
    preload: EntryPoint,
    models: dict[str, Path],
    references: Callable[[str], Reference],
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    broken = broken_by("unwaited", prefilling(*PREFILLING[0]))
    with disaggregated(broken, models, preload, tmp_path, HOST) as pair:
        exchanges = conversations(pair.url)
        num_broken = require_broken(pair.prefill.log_path)
        num_loads = host_of(pair.prefill.url)["num_loads"]
    red = references("gdn").divergences(exchanges)
    said = f"{len(red)} answers RED of {num_broken} broken copies and {num_loads} loads"
    record_property(NEGATIVE_CONTROL, f"{broken.name}: {said}")
    assert red
