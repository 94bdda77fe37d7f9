"""Servers with our cache and a host tier: answers are those without a cache, also from what had to come back.

Their copies run late, and what is freed on either tier is overwritten at once (`late_copies_server.py`). The negative
controls break the tier in three ways, each of which has to turn answers wrong.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from marconi_cpu.demo.server_process import ServerProcess

from .breaking import num_broken, require_broken
from .client import HTTP, generate, random_tokens
from .conftest import CONSENSUS, MTP, NEGATIVE_CONTROL, STRATEGY_ARGS, TWO_RANKS, EntryPoint, Launch
from .disaggregated import disaggregated
from .matrix import DATA_PARALLEL, HOST, MATRIX, NEXTN, SERVER, TIGHT_KV_TOKENS
from .reference import Reference
from .scenarios import CHUNKED_PREFILL_SIZE, EXTRA_BUFFER, SCENARIOS, Exchange, Scenario, one
from .scrapes import ON_THE_HOST, all_unanswered, scraped
from .test_speculation import chats_of_many_lengths, lost_between

LATE_COPIES = (str(Path(__file__).with_name("late_copies_server.py")),)
ARGS = (
    *("--radix-cache-backend", "marconi", "--max-total-tokens", str(TIGHT_KV_TOKENS), "--max-mamba-cache-size", "32"),
    *("--max-running-requests", "6", "--chunked-prefill-size", str(CHUNKED_PREFILL_SIZE), *HOST),
)
LAUNCHES = tuple(
    pytest.param(each, marks=pytest.mark.slow) for each in MATRIX if each.choice and each.choice.has_host_tier
)
NUM_SAID = 12
"""Tokens of an answer whose end is worth a state on the host beside its prompt's."""
NUM_CONVERSATIONS = 3 * TIGHT_KV_TOKENS // 500 + 1
SCENARIOS_TWICE = [
    each for each in SCENARIOS if each.name in {"branch-at-208", "multi-turn", "concurrent", "chunked-prefill"}
]


def is_asked(launch: Launch, name: str, scenario: Scenario | None) -> bool:
    """Each scenario on every second server; long ones not on two caches, and loads by tokens on one rank alone."""
    choice = launch.choice
    if choice is None:
        return True
    if scenario is not None:
        return choice.asks_every_second(SCENARIOS_TWICE.index(scenario))
    if "orchestrator_prefetches" in name:
        return (choice.ranks, choice.page) == ("1", "1")
    return choice.ranks != DATA_PARALLEL


def conversations(url: str, seed: int = 40_000, num: int = NUM_CONVERSATIONS) -> list[Exchange]:
    """Conversations that take three times the device's memory, the second turns after all of the first.

    To a cache that knows of no others: copies are kept and guards placed by what was learned of them.
    """
    HTTP.post(f"{url}/flush_cache?timeout=30", timeout=60.0).raise_for_status()
    prompts = [random_tokens(seed + index, 500) for index in range(num)]
    first = [Exchange(tuple(prompt), generate(url, prompt, max_new_tokens=NUM_SAID)) for prompt in prompts]
    told = [[*exchange.prompt, *exchange.completion.token_ids] for exchange in first]
    return [*first, *(one(url, history + random_tokens(seed + 100 + index, 40)) for index, history in enumerate(told))]


def host_of(server: Any) -> dict[str, Any]:
    """What the server, or that of the two which has one, says of its host tier."""
    rank = HTTP.get(f"{getattr(server, 'prefill', server).url}/marconi").json()["ranks"][-1]
    host: dict[str, Any] = rank["host"]
    return host


def test_conversations_of_three_times_the_devices_memory_are_gone_on_with(
    launch: Launch, server: Any, references: Callable[[str], Reference]
) -> None:
    num_loads = host_of(server)["num_loads"]
    exchanges = conversations(server.url)
    assert references(launch.family).divergences(exchanges) == []
    hits = [exchange.completion.num_cached_tokens for exchange in exchanges[NUM_CONVERSATIONS:]]
    # Elsewhere the last one is near a prompt's end: of two a token apart the host holds one.
    least = 501 if launch.choice and launch.choice.keeps_ends else 496
    assert sum(hit >= least for hit in hits) >= 0.8 * NUM_CONVERSATIONS, hits
    assert host_of(server)["num_loads"] - num_loads >= 0.5 * NUM_CONVERSATIONS
    assert not all_unanswered(scraped(getattr(server, "prefill", server).url), ON_THE_HOST.__contains__)


@pytest.mark.parametrize("scenario", SCENARIOS_TWICE, ids=lambda scenario: scenario.name)
def test_what_was_evicted_to_the_host_gives_the_same_answer(
    scenario: Any, launch: Launch, server: Any, references: Callable[[str], Reference]
) -> None:
    assert references(launch.family).divergences(twice(scenario, server.url)) == []


def test_a_prompt_that_an_orchestrator_prefetches_starts_from_the_device(
    launch: Launch, server: Any, references: Callable[[str], Reference]
) -> None:
    """Between the hint and the prompt the state has come back; without the hint the prompt itself loads it."""
    first = conversations(server.url, seed=70_000)[:2]
    turns = [[*each.prompt, *each.completion.token_ids, *random_tokens(70_500, 40)] for each in first]

    def num_loads() -> int:
        return int(host_of(server)["num_loads"])

    exchanges: list[Exchange] = []
    for hinted in (True, False):
        for _ in range(2 * TIGHT_KV_TOKENS // 500):
            exchanges.append(one(server.url, random_tokens(71_000 + len(exchanges), 500)))
        # One prompt at a time: a prompt that runs may evict what was loaded for another.
        for prompt in turns:
            counts = [num_loads()]
            if hinted:
                prefetch(server.url, prompt, 100_000 + 1_000 * len(exchanges))
            counts.append(num_loads())
            exchanges.append(one(server.url, prompt))
            assert exchanges[-1].completion.num_cached_tokens > 500
            counts.append(num_loads())
            assert [after - before for before, after in pairwise(counts)] == ([1, 0] if hinted else [0, 1])
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
        meta = HTTP.post(f"{url}/generate", json=asked, timeout=300.0).json()["meta_info"]
        (answer,) = meta["marconi_kv_hints"]
        if answer["result"] != "rejected":
            assert (answer["result"], answer["num_tokens"] > 500) == ("accepted", True), answer
            return
        assert re.match("no room|requests that run|the prefetches of", answer["reason"]), answer
    raise AssertionError(answer)


def twice(scenario: Scenario, url: str) -> list[Exchange]:
    """A scenario twice, and between them as much as the device holds."""
    exchanges = scenario.ask(url)
    for index in range(TIGHT_KV_TOKENS // 500 + 1):
        exchanges.append(one(url, random_tokens(60_000 + index, 500)))
    return exchanges + scenario.ask(url)


def alone(name: str, family: str, *more: str, beside: str = "", env: tuple[tuple[str, str], ...] = ()) -> Launch:
    """A server without checks that would see a broken tier first."""
    args = (*ARGS, *STRATEGY_ARGS[EXTRA_BUFFER], *more)
    return Launch(name, family, args, env=(("MARCONI_TEST_BESIDE", f"late_copies_server.py {beside}"), *env))


@contextmanager
def faulty(
    launch: Launch, models: dict[str, Path], preload: EntryPoint, folder: Path
) -> Iterator[tuple[ServerProcess, Path]]:
    """Its server, and the file that says what is broken."""
    file = folder / "fault"
    file.write_text("")
    launch = replace(launch, env=(*launch.env, ("MARCONI_TEST_FAULT_FILE", str(file))))
    with launch.process(models, folder / "log", entry_point=preload(SERVER)) as server:
        yield server, file


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launch", "faults"),
    [
        (alone("gdn", "gdn"), ("unwaited", "reused")),
        (alone("gdn-roomy", "gdn", "--max-total-tokens", "4000"), ("unlocked",)),
        (alone("gdn-ranks", "gdn", *TWO_RANKS, env=CONSENSUS), ("unwaited",)),
    ],
    ids=["plain", "roomy", "ranks"],
)
def test_negative_control_a_broken_tier_turns_answers_red(
    launch: Launch,
    faults: tuple[str, ...],
    preload: EntryPoint,
    models: dict[str, Path],
    references: Callable[[str], Reference],
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    with faulty(launch, models, preload, tmp_path) as (server, file):
        for fault in faults:
            said = require_red(server, file, fault, references(launch.family))
            record_property(NEGATIVE_CONTROL, f"{launch.name}, {fault}: {said}")


def require_red(server: ServerProcess, file: Path, fault: str, reference: Reference) -> str:
    """Assert that answers are wrong while the tier has this fault, and say how many."""
    before = num_broken(server.log_path)
    file.write_text(fault)
    exchanges = conversations(server.url, num=12)
    file.write_text("")
    num = num_broken(server.log_path) - before
    assert num, f"{fault}: the negative control broke nothing, so its answers say nothing"
    red = reference.divergences(exchanges)
    assert red, f"{fault}: every answer is right"
    return f"{len(red)} answers RED of {num} broken copies and {host_of(server)['num_loads']} loads"


@pytest.mark.slow
def test_a_draft_models_kv_is_loaded_too_and_changes_only_how_much_is_accepted(
    preload: EntryPoint,
    models: dict[str, Path],
    references: Callable[[str], Reference],
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    """Where a load is not waited for, answers are wrong."""
    launch = alone("gdn-drafts", "gdn" + MTP, *NEXTN, beside="overlapping_server.py")
    reference, accepted = references(launch.family), []
    with faulty(launch, models, preload, tmp_path) as (server, file):
        for fault in ("", "undrafted"):
            file.write_text(fault)
            num_loads = host_of(server)["num_loads"]
            assert reference.divergences(conversations(server.url)) == []
            assert host_of(server)["num_loads"] - num_loads >= 0.5 * NUM_CONVERSATIONS
            accepted.append(tokens_a_step(server.url))
        require_broken(server.log_path)
        record_property(NEGATIVE_CONTROL, f"{launch.name}: {require_red(server, file, 'unwaited', reference)}")
    assert accepted[0] > accepted[1], f"as many tokens a step without the draft's KV as with it: {accepted}"


@pytest.mark.slow
def test_a_small_model_may_draft_beside_a_host_tier(
    preload: EntryPoint,
    models: dict[str, Path],
    attention_model: Path,
    references: Callable[[str], Reference],
    tmp_path: Path,
) -> None:
    """Its KV has a pool of its own, on the host as well; an answer of any length is gone on from where it ended."""
    drafts = ("--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", str(attention_model))
    drafts += ("--context-length", "4096", *NEXTN[2:])
    launch = alone("gdn-STANDALONE", "gdn", *drafts, beside="overlapping_server.py")
    with faulty(launch, models, preload, tmp_path) as (server, _):
        exchanges = conversations(server.url)
        num_loads = host_of(server)["num_loads"]
        chats = chats_of_many_lengths(server.url)
    assert references(launch.family).divergences([*exchanges, *chats]) == []
    assert num_loads >= 0.5 * NUM_CONVERSATIONS
    assert max(lost_between(chats)[1:]) <= 1


def tokens_a_step(url: str) -> float:
    """Of the server's steps over drafts so far, what each gave."""
    (rank,) = HTTP.get(f"{url}/server_info", timeout=60.0).json()["internal_states"]
    return float(rank["avg_spec_accept_length"])


@pytest.mark.slow
def test_negative_control_a_prefill_server_that_does_not_wait_for_a_load_turns_answers_red(
    preload: EntryPoint,
    models: dict[str, Path],
    references: Callable[[str], Reference],
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    file = tmp_path / "fault"
    file.write_text("unwaited")
    broken = alone("gdn-prefill", "gdn", beside="disaggregated_server.py")
    first = broken.args.index(HOST[0])
    args = broken.args[:first] + broken.args[first + len(HOST) :]
    env = (*broken.env, ("MARCONI_TEST_FAULT_FILE", str(file)))
    broken = replace(broken, args=args, env=env, entry_point=SERVER)
    with disaggregated(broken, models, preload, tmp_path, HOST) as pair:
        exchanges = conversations(pair.url)
        num = require_broken(pair.prefill.log_path)
        num_loads = host_of(pair)["num_loads"]
    red = references("gdn").divergences(exchanges)
    record_property(
        NEGATIVE_CONTROL, f"{broken.name}: {len(red)} answers RED of {num} broken copies and {num_loads} loads"
    )
    assert red
