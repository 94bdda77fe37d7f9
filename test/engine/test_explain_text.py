"""A server that may show texts shows the tokens on both sides of a divergence, to its operator and to who asks."""

from typing import Any

import pytest

from marconi.engine.http.diverged import DIVERGED, with_text
from marconi.engine.reports.explain import EXPLAIN
from marconi_cpu.demo.server_process import ServerProcess

from .client import HTTP, random_tokens
from .test_explain import PROMPTS, answer, streamed
from .test_runtime_endpoints import ADMIN_KEY, HOST

LAUNCHES = (pytest.param(HOST, marks=pytest.mark.slow),)


@pytest.fixture(autouse=True)
def flushed(request: pytest.FixtureRequest) -> None:
    """Every test begins with an empty cache."""
    if "server" in request.fixturenames:
        server: ServerProcess = request.getfixturevalue("server")
        assert HTTP.post(f"{server.url}/flush_cache?timeout=30", headers=AS_OPERATOR, timeout=60.0).status_code == 200


AS_OPERATOR = {"Authorization": f"Bearer {ADMIN_KEY}"}


def listed(server: ServerProcess, rid: str) -> dict[str, Any]:
    """A request in the operator's list."""
    (rank,) = HTTP.get(f"{server.url}/marconi/requests", headers=AS_OPERATOR, timeout=60.0).json()["ranks"]
    (found,) = (each for each in rank["requests"] if each["rid"] == rid)
    return dict(found)


def test_the_tokens_on_both_sides_are_shown_to_who_asks_and_to_the_operator(server: ServerProcess) -> None:
    known, other = random_tokens(800, 300), random_tokens(801, 100)
    assert "diverged" not in answer(server.url, known, cache_salt="me")[EXPLAIN], "it diverges from nothing"
    meta = answer(server.url, [*known[:200], *other], rid="drifted", cache_salt="me")
    diverged = meta[EXPLAIN]["diverged"]
    assert diverged["position"] == 200
    sides = {side: diverged[side]["token_ids"] for side in ("before", "prompt", "known")}
    assert sides == {"before": known[184:200], "prompt": other[:16], "known": known[200:216]}
    assert DIVERGED not in str(meta)
    assert listed(server, "drifted")["diverged"] == diverged
    answer(server.url, [*known[:100], *other], rid="silent", custom={EXPLAIN: False}, cache_salt="me")
    assert listed(server, "silent")["diverged"]["position"] == 100, "whether it asked or not"
    shown = HTTP.get(f"{server.url}/marconi/requests", timeout=60.0)
    assert shown.status_code in (401, 403), "the operator's alone"


def test_saving_is_the_operators_and_names_the_flag_that_it_needs(server: ServerProcess) -> None:
    assert HTTP.post(f"{server.url}/marconi/save", timeout=60.0).status_code in (401, 403)
    refused = HTTP.post(f"{server.url}/marconi/save", headers=AS_OPERATOR, timeout=60.0)
    assert (refused.status_code, "--hicache-storage-backend" in refused.json()["error"]) == (404, True)


def test_without_a_salt_the_operator_alone_sees_tokens(server: ServerProcess) -> None:
    """Who has no salt shares one name space with everybody."""
    known = random_tokens(805, 300)
    for fields in ({}, {"extra_key": "a"}):
        answer(server.url, known, **fields)
        meta = answer(server.url, [*known[:200], *random_tokens(806, 50)], rid=f"no salt {fields}", **fields)
        assert "diverged" not in meta[EXPLAIN]
        assert listed(server, f"no salt {fields}")["diverged"]["known"]["token_ids"] == known[200:216]


def test_texts_are_those_of_the_tokens(server: ServerProcess) -> None:
    """The small models' tokenizer makes a token of every byte."""
    custom = {"custom_params": {EXPLAIN: True}, "max_tokens": 2, "model": "m"}
    for text in ("a long beginning, then this: one", "a long beginning, then this: two, and more"):
        body = {"prompt": text, "cache_salt": "me", **custom}
        told = HTTP.post(f"{server.url}/v1/completions", json=body, timeout=300.0).json()["metadata"][EXPLAIN]
    diverged = told["diverged"]
    assert diverged["position"] == len("a long beginning, then this: ")
    assert diverged["before"]["text"].endswith("then this: ")
    assert "two, and more".startswith(diverged["prompt"]["text"])
    assert diverged["known"]["text"].startswith("one")
    streamed(server.url, "v1/chat/completions", **PROMPTS["v1/chat/completions"], cache_salt="me")
    messages = [{"role": "user", "content": "the cache hit"}]
    last = streamed(server.url, "v1/chat/completions", messages=messages, cache_salt="me")[-1]
    in_stream = last["metadata"][EXPLAIN]["diverged"]
    assert (in_stream["prompt"]["text"][0], in_stream["known"]["text"][0]) == ("h", "m")


@pytest.mark.parametrize(
    "fields", [{"extra_key": "a", "cache_salt": "b"}, {"cache_salt": "b"}, {}], ids=["key", "salt", "neither"]
)
def test_no_token_of_another_name_space_is_shown(server: ServerProcess, fields: dict[str, str]) -> None:
    known, other = random_tokens(810, 300), random_tokens(811, 100)
    answer(server.url, known, cache_salt="a")
    meta = answer(server.url, [*known[:200], *other], rid=f"other-{fields}", **fields)
    assert "diverged" not in meta[EXPLAIN]
    found = listed(server, f"other-{fields}")
    assert "diverged" not in found
    assert "known in another name space" in found["line"], "the operator learns of the name space, not of its tokens"
    own = answer(server.url, [*known[:150], *other], cache_salt="a")
    assert own[EXPLAIN]["diverged"]["known"]["token_ids"] == known[150:166]


def test_neither_log_nor_metrics_nor_status_show_tokens(server: ServerProcess) -> None:
    known = random_tokens(820, 300)
    answer(server.url, known, cache_salt="me")
    drifted = [*known[:200], *random_tokens(821, 100)]
    assert "diverged" in answer(server.url, drifted, rid="logged", cache_salt="me")[EXPLAIN]
    log = server.log_path.read_text(errors="replace")
    shown = ", ".join(map(str, known[200:208]))
    assert "logged" in log, "SGLang logs the request with its meta-information"
    assert EXPLAIN in log
    elsewhere = [
        HTTP.get(f"{server.url}{path}", headers=AS_OPERATOR, timeout=60.0).text for path in ("/marconi", "/server_info")
    ]
    for text in (log, *elsewhere):
        assert DIVERGED not in text
        assert shown not in text
        assert shown.replace(" ", "") not in text


def test_what_no_tokenizer_knows_has_no_text() -> None:
    class Tokenizer:
        def decode(self, ids: list[int]) -> str:
            if max(ids, default=0) > 255:
                raise OverflowError("out of range")
            return bytes(ids).decode()

    values = {"position": 3, "before": [97], "prompt": [2**40], "known": []}
    for tokenizer, texts in ((Tokenizer(), ["a", None, ""]), (None, [None] * 3)):
        shown = with_text(values, tokenizer)
        assert [shown[side]["text"] for side in ("before", "prompt", "known")] == texts
        assert [shown[side]["token_ids"] for side in ("before", "prompt", "known")] == [[97], [2**40], []]
