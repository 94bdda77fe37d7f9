"""Other parts of SGLang keep working on this cache: each test on a server that checks its invariants when idle."""

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from marconi_cpu.demo.server_process import ServerProcess

from .client import HTTP, completion_of, generate_together, random_tokens
from .conftest import CONSENSUS, MARCONI, STRATEGY_ARGS, TWO_RANKS, Launch
from .reference import Reference
from .scenarios import EXTRA_BUFFER, NO_BUFFER, Exchange

pytestmark = pytest.mark.slow

MAX_KV_TOKENS = 1100
"""Room for few requests: prefixes are evicted throughout."""


EVICTION_ARGS = {
    EXTRA_BUFFER: ("--marconi-eviction", "tail:0.02"),
    NO_BUFFER: ("--marconi-eviction", "marconi"),
}
"""A rule that uses learned prefill times, and the paper's."""
POOLS = ("--max-total-tokens", str(MAX_KV_TOKENS), "--max-mamba-cache-size", "24", "--max-running-requests", "5")
SCHEDULING = ("--chunked-prefill-size", "128", "--schedule-conservativeness", "0.1")
RETRACTING_SERVER = (str(Path(__file__).with_name("retracting_server.py")),)
NUM_ANSWER_TOKENS = 100
"""More than there is room for in five requests."""
LAUNCHES = tuple(
    Launch(
        f"retracting-{strategy}{ranks}",
        "gdn",
        (*MARCONI, *STRATEGY_ARGS[strategy], *POOLS, *SCHEDULING, *EVICTION_ARGS[strategy], *args),
        strategy,
        env,
        RETRACTING_SERVER,
    )
    for strategy, ranks, args, env in (
        (EXTRA_BUFFER, "-two-ranks", TWO_RANKS, CONSENSUS),
        (NO_BUFFER, "", (), ()),
    )
)


def ask(url: str, prompt: list[int], max_new_tokens: int = 16, **fields: Any) -> list[dict[str, Any]]:
    """The answers to a request of `/generate`, greedy unless `fields` say otherwise."""
    sampling = {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True}
    sampling |= fields.pop("sampling_params", {})
    body = {"input_ids": prompt, "sampling_params": sampling, **fields}
    response = HTTP.post(f"{url}/generate", json=body, timeout=300.0)
    response.raise_for_status()
    answer = response.json()
    return answer if isinstance(answer, list) else [answer]


def flush(server: ServerProcess) -> None:
    """A state of little worth takes no slot of one that is worth more, and the tests above left many."""
    assert HTTP.post(f"{server.url}/flush_cache?timeout=30", timeout=60.0).status_code == 200


def num_cached(answer: dict[str, Any]) -> int:
    cached: int = answer["meta_info"]["cached_tokens"]
    return cached


def test_requests_that_are_retracted_answer_as_if_they_had_not_been(
    server: ServerProcess, references: Callable[[str], Reference]
) -> None:
    """Five at once, some given up every 25 steps."""
    prompts = [random_tokens(1000 + index, 150 + index) for index in range(5)]
    together = generate_together(server.url, prompts, max_new_tokens=NUM_ANSWER_TOKENS)
    log = server.log_path.read_text(errors="replace")
    assert re.search(r"#retracted_reqs: [1-9]", log), "nothing was retracted"
    exchanges = [Exchange(tuple(prompt), got) for prompt, got in zip(prompts, together, strict=True)]
    assert references("gdn").divergences(exchanges) == []


def test_requests_that_ask_for_checkpoints_answer_so_too_when_they_are_retracted(
    server: ServerProcess, references: Callable[[str], Reference]
) -> None:
    """Each leaves its prompt's end, locks it, decodes on from it, is given up, and begins anew."""
    prompts = [random_tokens(1050 + index, 150 + index) for index in range(5)]
    asked = {"sampling_params": {"custom_params": {"marconi_checkpoints": [40, -1]}}, "return_logprob": True}
    log = server.log_path.read_text(errors="replace")
    with ThreadPoolExecutor(len(prompts)) as pool:
        together = list(pool.map(lambda p: ask(server.url, p, NUM_ANSWER_TOKENS, **asked)[0]["meta_info"], prompts))
    retracted = re.findall(r"#retracted_reqs: [1-9]", server.log_path.read_text(errors="replace")[len(log) :])
    assert retracted, "nothing was retracted"
    assert [each["marconi_checkpoints"]["num_asked"] for each in together] == [2] * len(prompts)
    exchanges = [Exchange(tuple(prompt), completion_of(meta)) for prompt, meta in zip(prompts, together, strict=True)]
    assert references("gdn").divergences(exchanges) == []


def test_a_session_may_ask_for_checkpoints_by_position_in_all_of_it(server: ServerProcess) -> None:
    flush(server)
    opened = HTTP.post(f"{server.url}/open_session", json={"capacity_of_str_len": 4000}, timeout=60.0)
    opened.raise_for_status()
    session = {"id": opened.json()}
    first, more = random_tokens(1070, 60), random_tokens(1071, 50)
    (turn,) = ask(server.url, first, session_params={**session, "rid": None})
    hints = {"custom_params": {"marconi_checkpoints": [100, -1]}}
    ask(server.url, more, session_params={**session, "rid": turn["meta_info"]["id"]}, sampling_params=hints)
    whole = first + list(turn["output_ids"]) + more
    (other,) = ask(server.url, whole[:100] + random_tokens(1072, 20))
    assert num_cached(other) == 100


def test_salts_and_adapters_share_no_prefix(server: ServerProcess) -> None:
    flush(server)
    prompt = random_tokens(1100, 120)
    for names in ({"cache_salt": "a"}, {"cache_salt": "b"}, {"extra_key": "a"}, {}):
        assert [num_cached(ask(server.url, prompt, **names)[0]) for _ in range(2)] == [0, 119]


def test_samples_of_one_prompt_share_it(server: ServerProcess) -> None:
    flush(server)
    prompt = random_tokens(1200, 140)
    (alone,) = ask(server.url, prompt)
    samples = ask(server.url, prompt, sampling_params={"n": 3})
    assert len(samples) == 3
    assert {tuple(sample["output_ids"]) for sample in samples} == {tuple(alone["output_ids"])}
    assert [num_cached(sample) for sample in samples] == [139] * 3


def test_a_prompt_in_many_chunks_leaves_its_own_states_only(server: ServerProcess) -> None:
    """Chunks of 128: the branch point and the end are hit, and before it a state on trial, none that was tracked."""
    flush(server)
    trunk = random_tokens(1300, 600)
    assert num_cached(ask(server.url, trunk)[0]) == 0
    assert num_cached(ask(server.url, trunk)[0]) == 599
    branches = [trunk[:300] + random_tokens(1310 + index, 40) for index in range(3)]
    assert [num_cached(ask(server.url, branch)[0]) for branch in branches] == [256, 300, 300]


def test_a_session_goes_on_from_its_last_turn(server: ServerProcess) -> None:
    flush(server)
    opened = HTTP.post(f"{server.url}/open_session", json={"capacity_of_str_len": 4000}, timeout=60.0)
    opened.raise_for_status()
    session = {"id": opened.json()}
    first = random_tokens(1400, 90)
    (turn,) = ask(server.url, first, session_params={**session, "rid": None})
    more = random_tokens(1401, 30)
    (following,) = ask(server.url, more, session_params={**session, "rid": turn["meta_info"]["id"]})
    whole = first + list(turn["output_ids"]) + more
    assert num_cached(following) >= len(first) + len(turn["output_ids"]) - 1
    flush(server)
    assert ask(server.url, whole)[0]["output_ids"] == following["output_ids"]


def rank_of(server: ServerProcess) -> dict[str, Any]:
    (rank,) = HTTP.get(f"{server.url}/marconi", timeout=60.0).json()["ranks"]
    return dict(rank)


def test_a_request_that_may_leave_nothing_is_served_and_counted(server: ServerProcess) -> None:
    """SGLang keeps nothing of a request that names its address for trials of disaggregated serving."""
    prompt = random_tokens(1500, 90)
    before = rank_of(server)["num_requests_uncached"]
    answers = [ask(server.url, prompt, bootstrap_host="2.2.2.2")[0] for _ in range(2)]
    assert [num_cached(answer) for answer in answers] == [0, 0]
    assert rank_of(server)["num_requests_uncached"] == before + 2
    assert answers[0]["output_ids"] == ask(server.url, prompt)[0]["output_ids"]
