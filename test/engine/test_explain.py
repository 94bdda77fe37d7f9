"""A server says why a request missed: in its answer, in the list of the latest, and in its counts, which add up."""

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from marconi import cli
from marconi.engine.http.hints import KEY
from marconi.engine.http.streams import around_stream, note_explained
from marconi.engine.reports.explain import EXPLAIN, MAX_LATEST, OFF, Explained, Explanations, require_wish, uncached
from marconi.engine.reports.moments import Steps
from marconi.model.learned_latency import LearnedLatency
from marconi.policy.causes import Cause
from marconi.policy.misses import Explanation, Miss
from marconi_cpu.demo.server_process import ServerProcess

from .client import HTTP, random_tokens
from .conftest import STANDARD, StartServer
from .scenarios import EXTRA_BUFFER

LAUNCHES = (STANDARD["gdn", EXTRA_BUFFER],)


def answer(url: str, prompt: list[int], **fields: Any) -> dict[str, Any]:
    custom = {EXPLAIN: True, **fields.pop("custom", {})}
    sampling = {"temperature": 0, "max_new_tokens": 4, "custom_params": custom}
    body = {"input_ids": prompt, "sampling_params": sampling, **fields}
    response = HTTP.post(f"{url}/generate", json=body, timeout=300.0)
    assert response.status_code == 200, response.text
    meta: dict[str, Any] = response.json()["meta_info"]
    return meta


def causes(meta: dict[str, Any]) -> dict[str, int]:
    """Tokens by cause, which follow the hit without a gap."""
    explained, at = meta[EXPLAIN], meta["cached_tokens"]
    assert explained["num_prompt_tokens"] == meta["prompt_tokens"]
    assert explained["num_hit_tokens"] == meta["cached_tokens"]
    tokens: dict[str, int] = {}
    for miss in explained["missed"]:
        assert miss["start"] == at < miss["end"]
        at = miss["end"]
        tokens[miss["cause"]] = tokens.get(miss["cause"], 0) + miss["end"] - miss["start"]
    assert at == meta["prompt_tokens"]
    return tokens


def test_an_answer_explains_each_token_that_was_missed(server: ServerProcess) -> None:
    # Whatever else is there may be worth more than the states of these prompts.
    assert HTTP.post(f"{server.url}/flush_cache?timeout=30", timeout=60.0).status_code == 200
    prompt = random_tokens(500, 300)
    # Asked for, since what the server learned of earlier tests' turns may say that a state before it is enough.
    assert causes(answer(server.url, prompt, custom={KEY: [299]})) == {"first_seen": 299, "last_token": 1}
    assert causes(answer(server.url, prompt)) == {"last_token": 1}
    other = answer(server.url, [*prompt[:200], *random_tokens(501, 100)])
    assert causes(other) == {"no_state": 200 - other["cached_tokens"], "first_seen": 99, "last_token": 1}
    assert "diverged at token 200, no state kept; 99: first seen" in other[EXPLAIN]["line"]
    assert "diverged" not in other[EXPLAIN], "no tokens without --marconi-explain text"
    salted = answer(server.url, [*prompt, *random_tokens(504, 20)], extra_key="another", rid="another")
    assert causes(salted) == {"first_seen": 319, "last_token": 1}, "a client learns nothing of others"
    (rank,) = HTTP.get(f"{server.url}/marconi/requests", timeout=60.0).json()["ranks"]
    (listed,) = (each for each in rank["requests"] if each["rid"] == "another")
    line = re.sub(r" since the flush [^;]+", "", listed["line"])
    assert line == "hit 0 of 320; 300: known in another name space; 19: first seen; 1: last token"
    assert not any("diverged" in each for each in rank["requests"])
    asked = answer(server.url, random_tokens(502, 60), custom={KEY: [10, 20, 30, 40, 50]})
    assert causes(asked) == {"first_seen": 59, "last_token": 1}
    assert asked[KEY]["num_left_out"] == 1
    beyond = answer(server.url, [*random_tokens(502, 60)[:51], *random_tokens(503, 30)])
    assert beyond["cached_tokens"] == 40
    assert causes(beyond) == {"hint_over_limit": 10, "least_gain": 1, "first_seen": 29, "last_token": 1}


def test_a_chat_is_explained_with_the_part_in_which_it_diverged(server: ServerProcess) -> None:
    assert HTTP.post(f"{server.url}/flush_cache?timeout=30", timeout=60.0).status_code == 200
    fields = {"model": "m", "max_tokens": 4, "temperature": 0, "custom_params": {EXPLAIN: True}}
    for number, date in enumerate(("2026-11-30", "2026-12-01")):
        system = {"role": "system", "content": f"Be as brief as you can. Today is {date}."}
        body = {**fields, "messages": [system, {"role": "user", "content": "Why?"}], "rid": f"dated-{number}"}
        told = HTTP.post(f"{server.url}/v1/chat/completions", json=body, timeout=300.0).json()["metadata"][EXPLAIN]
    assert told["part"] == {"where": "system", "kind": "date"}
    assert ", in system, a date" in told["line"]
    (rank,) = HTTP.get(f"{server.url}/marconi/requests", timeout=60.0).json()["ranks"]
    assert rank["requests"][0]["part"] == told["part"]
    assert ", in system, a date" in rank["requests"][0]["line"]
    assert "part" not in rank["requests"][1], "it diverges from nothing"


def test_after_a_flush_what_is_first_seen_says_since_when(server: ServerProcess) -> None:
    prompt = random_tokens(510, 120)
    answer(server.url, prompt)
    assert HTTP.post(f"{server.url}/flush_cache?timeout=30", timeout=60.0).status_code == 200
    again = answer(server.url, prompt)
    assert causes(again) == {"first_seen": 119, "last_token": 1}
    assert "119: first seen since the flush" in again[EXPLAIN]["line"]


def test_who_does_not_ask_is_told_nothing_and_nonsense_is_refused_in_a_line(server: ServerProcess) -> None:
    assert EXPLAIN not in answer(server.url, random_tokens(520, 20), custom={EXPLAIN: False})
    sampling = {"max_new_tokens": 1, "custom_params": {EXPLAIN: "yes"}}
    body = {"input_ids": random_tokens(520, 20), "sampling_params": sampling}
    response = HTTP.post(f"{server.url}/generate", json=body, timeout=60.0)
    assert response.status_code == 400
    assert "custom_params.marconi_explain must be true or false, got 'yes'" in response.text


PROMPTS: dict[str, dict[str, Any]] = {
    "v1/completions": {"prompt": "the cache missed"},
    "v1/chat/completions": {"messages": [{"role": "user", "content": "the cache missed"}]},
}
DONE = "data: [DONE]"


def opened(url: str, path: str, *, explain: bool = True, **fields: Any) -> AbstractContextManager[httpx.Response]:
    """An OpenAI stream."""
    custom = {"custom_params": {EXPLAIN: True}} if explain else {}
    body = {"model": "m", **PROMPTS[path], "max_tokens": 4, "temperature": 0, "stream": True, **custom, **fields}
    return HTTP.stream("POST", f"{url}/{path}", json=body, timeout=300.0)


def streamed(url: str, path: str, **fields: Any) -> list[dict[str, Any]]:
    """The chunks of an OpenAI stream, which ends as it should."""
    with opened(url, path, **fields) as response:
        assert response.status_code == 200
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == DONE
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def test_the_last_part_of_a_stream_explains(server: ServerProcess) -> None:
    sampling = {"temperature": 0, "max_new_tokens": 4, "custom_params": {EXPLAIN: True}}
    body = {"input_ids": random_tokens(530, 50), "sampling_params": sampling, "stream": True}
    with HTTP.stream("POST", f"{server.url}/generate", json=body, timeout=300.0) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: {")]
    *earlier, last = (json.loads(line)["meta_info"] for line in lines)
    assert earlier
    assert all(EXPLAIN not in meta and EXPLAIN not in (meta["cached_tokens_details"] or {}) for meta in earlier)
    assert causes(last) == {"first_seen": 49, "last_token": 1}
    assert Steps.of(last[EXPLAIN]["steps"]).ended is not None


@pytest.mark.parametrize("num_choices", [1, 2])
@pytest.mark.parametrize("path", PROMPTS)
def test_an_openai_stream_ends_with_the_metadata_of_the_same_answer_in_one_piece(
    server: ServerProcess, path: str, num_choices: int
) -> None:
    fields = {"n": num_choices, "stream_options": {"include_usage": True}}
    streamed(server.url, path, **fields)
    body = {"model": "m", **PROMPTS[path], "max_tokens": 4, "temperature": 0, "n": num_choices}
    body["custom_params"] = {EXPLAIN: True, KEY: [3]}
    whole = HTTP.post(f"{server.url}/{path}", json=body, timeout=300.0).json()["metadata"]
    *chunks, last = streamed(server.url, path, **fields, custom_params={EXPLAIN: True, KEY: [3]})
    assert last["choices"] == []
    assert set(last["metadata"]) == set(whole) > {EXPLAIN, KEY}
    told, expected = last["metadata"][EXPLAIN], whole[EXPLAIN]
    assert (told["line"], told["missed"], set(told)) == (expected["line"], expected["missed"], set(expected))
    first = next(chunk for chunk in chunks for choice in chunk["choices"] if choice["index"] == 0)
    assert all(last[name] == first[name] for name in ("id", "object", "created", "model"))
    plain = streamed(server.url, path, **fields, explain=False)
    (usage,) = (chunk for chunk in plain if not chunk["choices"])
    assert usage["usage"]["completion_tokens"] == 4 * num_choices
    # Tokens that come together share a chunk, so only the kinds of chunks are the same.
    assert {frozenset(chunk) for chunk in plain} == {frozenset(chunk) for chunk in chunks}
    assert "metadata" not in set().union(*plain)


@pytest.mark.parametrize("path", PROMPTS)
def test_a_client_that_disconnects_from_a_stream_that_explains_leaves_nothing_running(
    server: ServerProcess, path: str
) -> None:
    with opened(server.url, path, n=2, max_tokens=400, ignore_eos=True) as response:
        assert next(response.iter_lines()).startswith("data: {")
    deadline_s = time.monotonic() + 60.0
    while True:
        (rank,) = HTTP.get(f"{server.url}/marconi", timeout=60.0).json()["ranks"]
        if rank["state_slots"]["in_use"] == 0:
            break
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    assert EXPLAIN in streamed(server.url, path)[-1]["metadata"]
    assert "Traceback" not in server.log_path.read_text(errors="replace")


def test_the_latest_requests_are_listed_newest_first_and_the_counts_add_up(
    server: ServerProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    rids = [answer(server.url, random_tokens(540 + number, 30), rid=f"explained-{number}")["id"] for number in range(3)]
    (rank,) = HTTP.get(f"{server.url}/marconi/requests", timeout=60.0).json()["ranks"]
    assert [each["rid"] for each in rank["requests"][:3]] == rids[::-1]
    assert len(rank["requests"]) <= MAX_LATEST
    newest = rank["requests"][0]
    assert re.fullmatch(r"hit 0 of 30; 29: first seen( since the flush [^;]+)?; 1: last token", newest["line"])
    assert 0 <= newest["seconds_ago"] < 60
    assert cli.main(["why", server.url, rids[-1]]) == 0
    assert newest["line"] in capsys.readouterr().out
    (status,) = HTTP.get(f"{server.url}/marconi", timeout=60.0).json()["ranks"]
    missed = {cause: num for cause, num in status["num_missed_tokens"].items() if cause != "uncached"}
    assert sum(missed.values()) == status["num_prompt_tokens"] - status["num_hit_tokens"]
    assert set(missed) | {"uncached"} == set(Cause) == set(status["missed_s"])


@pytest.mark.slow
def test_a_server_that_explains_nothing_says_so_and_hits_the_same(
    server: ServerProcess, models: dict[str, Path], start_server: StartServer
) -> None:
    silent = start_server(models["gdn"], (*STANDARD["gdn", EXTRA_BUFFER].args, "--marconi-explain", "off"))
    prompt, hits = random_tokens(560, 300), {}
    for url in (server.url, silent.url):
        assert HTTP.post(f"{url}/flush_cache?timeout=30", timeout=60.0).status_code == 200
        answers = [answer(url, prompt, custom={KEY: [299]}), answer(url, prompt)]
        answer(url, [*prompt[:200], *random_tokens(561, 100)], custom={KEY: [200]})
        answers.append(answer(url, [*prompt[:200], *random_tokens(562, 50)]))
        hits[url] = [meta["cached_tokens"] for meta in answers]
        lines = {meta[EXPLAIN]["line"] for meta in answers}
        assert (lines == {OFF}) == (url == silent.url)
    assert hits[silent.url] == hits[server.url] == [0, 299, 200]
    latest = HTTP.get(f"{silent.url}/marconi/requests", timeout=60.0)
    assert (latest.status_code, latest.json()) == (404, {"error": OFF})
    (rank,) = HTTP.get(f"{silent.url}/marconi", timeout=60.0).json()["ranks"]
    assert (rank["explain"], rank["num_missed_tokens"], rank["missed_s"]) == ("off", None, None)
    exported = [HTTP.get(f"{each.url}/metrics", timeout=60.0).text for each in (server, silent)]
    assert ["cause=" in each for each in exported] == [True, False], (
        "a series of zeros would say that nothing is missed"
    )


def test_seconds_by_cause_add_up_to_the_prefill_that_was_learned() -> None:
    latency = LearnedLatency(float)
    explanations = Explanations(latency, float)
    ends = ((40, Cause.NO_STATE), (99, Cause.FIRST_SEEN), (100, Cause.LAST_TOKEN))
    explanation = Explanation(100, 10, 40, [(end, cause, None, None) for end, cause in ends])
    assert explanation.misses[1] == Miss(Cause.FIRST_SEEN, 40, 99)
    explained = Explained("a", 5.0, explanation)
    explanations.note(explained)
    assert not any(explanations.missed_s.values()), "nothing was timed yet"
    assert explanations.saved_s == 0
    latency.follow(0.5, 0.001)
    explanations.note(explained)
    assert explanations.missed_s[Cause.FIRST_SEEN] == pytest.approx(0.059)
    assert sum(explanations.missed_s.values()) == pytest.approx(latency.seconds(10, 100))
    assert explanations.saved_s == pytest.approx(latency.seconds(0, 100) - latency.seconds(10, 100))
    latest = explanations.latest(7.0)
    assert latest is not None
    assert [each["seconds_ago"] for each in latest] == [2.0, 2.0]


def test_a_stream_is_sglangs_own_unless_its_request_asks_and_ends_with_ours() -> None:
    is_closed = []

    async def stream(*_: Any) -> AsyncIterator[str]:
        try:
            yield 'data: {"error": {"message": "full"}}\n\n'
            yield "data: [DONE]\n\n"
        finally:
            is_closed.append(True)

    def around(custom: object, raw: object) -> tuple[Any, Any]:
        own = stream()
        return own, around_stream(lambda *_: own, None, None, SimpleNamespace(custom_params=custom), raw)

    async def check() -> None:
        raw = SimpleNamespace(state=SimpleNamespace())
        for custom, request in ((None, raw), ({EXPLAIN: False}, raw), ({EXPLAIN: True}, None)):
            own, found = around(custom, request)
            assert found is own
            note_explained(request, {"id": "a"})
            assert not vars(raw.state), "nothing is kept for it"
        own, found = around({EXPLAIN: True}, raw)
        assert found is not own
        assert "full" in await anext(found)
        note_explained(raw, {"id": "a"})
        assert await anext(found) == "data: [DONE]\n\n", "an error has no explanation"
        assert not is_closed
        await found.aclose()
        assert is_closed

    asyncio.run(check())


def test_a_request_without_the_cache_misses_all_that_it_does_not_read() -> None:
    explanation = uncached(30, 100)
    assert explanation.num_missed_tokens() == {Cause.UNCACHED: 70}
    assert explanation.describe(0.0) == "hit 30 of 100; 70: served uncached"


def test_only_true_and_false_are_a_wish() -> None:
    for wish in (True, False):
        require_wish({EXPLAIN: wish})
    with pytest.raises(ValueError, match=r"must be true or false, got 1$"):
        require_wish({EXPLAIN: 1})


def test_a_prompt_that_is_refused_for_its_length_leaves_nothing_and_is_in_no_count(server: ServerProcess) -> None:
    (before,) = HTTP.get(f"{server.url}/marconi", timeout=60.0).json()["ranks"]
    limit = HTTP.get(f"{server.url}/server_info", timeout=60.0).json()["max_req_input_len"]
    body = {"input_ids": random_tokens(550, limit), "sampling_params": {"max_new_tokens": 1}}
    response = HTTP.post(f"{server.url}/generate", json=body, timeout=60.0)
    assert response.status_code == 400, response.text
    (after,) = HTTP.get(f"{server.url}/marconi", timeout=60.0).json()["ranks"]
    counts = ("num_requests", "num_requests_uncached", "num_prompt_tokens", "num_missed_tokens", "num_states_written")
    assert {name: after[name] for name in counts} == {name: before[name] for name in counts}
    assert after["num_states"] <= before["num_states"]
