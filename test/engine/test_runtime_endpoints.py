"""Endpoints that change a running server leave it serving: answers after each are those without a cache.

The server has a host tier, whose copies run late. What would end the server is refused in a line.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from marconi_cpu import tiny_model
from marconi_cpu.demo.server_process import ServerProcess

from .client import HTTP, random_tokens, stream
from .conftest import MARCONI, STRATEGY_ARGS, Launch
from .reference import Reference
from .scenarios import CHUNKED_PREFILL_SIZE, EXTRA_BUFFER, Exchange, one, together
from .test_host_tier_server import LATE_COPIES

ADMIN_KEY = "test"
KV_TOKENS = 4_000
POOLS = ("--max-total-tokens", str(KV_TOKENS), "--max-mamba-cache-size", "32", "--max-running-requests", "6")
HOST = Launch(
    "gdn-host-admin",
    "gdn",
    (
        *MARCONI,
        *POOLS,
        *STRATEGY_ARGS[EXTRA_BUFFER],
        *("--chunked-prefill-size", str(CHUNKED_PREFILL_SIZE), "--admin-api-key", ADMIN_KEY),
        *("--enable-hierarchical-cache", "--hicache-ratio", "2"),
        *("--hicache-io-backend", "direct", "--hicache-mem-layout", "page_first_direct"),
        *("--marconi-explain", "text", "--log-requests", "--log-requests-level", "1"),
    ),
    entry_point=LATE_COPIES,
)
LAUNCHES = (pytest.param(HOST, marks=pytest.mark.slow),)
STORE = "/hicache/storage-backend"
PROMPTS = [random_tokens(70_000 + index, 700) for index in range(7)]
"""More than the device holds beside a host tier."""
TOO_LONG = 600
"""Tokens of an answer that a request is still running on while other calls are made."""
PAUSED = 90
"""The same while it is paused."""


def call(url: str, method: str, path: str, body: Any = None) -> httpx.Response:
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    return httpx.request(method, f"{url}{path}", json=body, headers=headers, timeout=120.0)


def done(url: str, path: str, body: Any = None) -> None:
    response = call(url, "POST", path, body)
    assert response.status_code == 200, response.text


def update_weights(url: str, model: Path, *, flush_cache: bool = True) -> None:
    done(url, "/update_weights_from_disk", {"model_path": str(model), "flush_cache": flush_cache})


def exchanges(url: str) -> list[Exchange]:
    """Prompts that were asked before, and what they go on with."""
    return [one(url, prompt) for prompt in (*PROMPTS[:2], PROMPTS[0] + random_tokens(70_100, 30))]


@contextmanager
def running(url: str) -> Iterator[None]:
    """A request that is being answered."""
    answer = stream(url, random_tokens(70_200, 300), max_new_tokens=TOO_LONG)
    next(answer)
    with ThreadPoolExecutor(1) as pool:
        last = pool.submit(lambda: list(answer)[-1])
        yield
        assert not last.done(), "it ran no longer, so nothing was tested"
        assert len(last.result().token_ids) == TOO_LONG


CALLS: list[list[tuple[str, str, Any]]] = [
    [("DELETE", STORE, None)],
    [("POST", f"{STORE}/clear", None)],
    [("GET", "/get_hicache_l3_cache_layout", None)],
    [("POST", "/flush_cache", None)],
    [("POST", "/update_weights_from_disk", {"model_path": "/of/nobody"})],
    [("POST", "/load_lora_adapter", {"lora_name": "a", "lora_path": "/of/nobody"})],
    [("POST", "/unload_lora_adapter", {"lora_name": "a"})],
    [("POST", "/abort_request", {"abort_all": True})],
    [("POST", "/close_session", {"session_id": "of nobody"})],
    [("POST", "/continue_generation", {})],
    *(
        [("POST", "/pause_generation", {"mode": mode}), ("POST", "/continue_generation", {})]
        for mode in ("in_place", "retract", "abort")
    ),
    *(
        [("POST", "/release_memory_occupation", tags), ("POST", "/resume_memory_occupation", tags)]
        for tags in ({}, {"tags": ["kv_cache"]}, {"tags": ["kv_cache", "kv_cache"]})
    ),
]


def test_a_call_to_an_idle_server_leaves_its_answers_as_they_were(
    server: ServerProcess, references: Callable[[str], Reference]
) -> None:
    assert references("gdn").divergences(exchanges(server.url)) == []
    for calls in CALLS:
        for method, path, body in calls:
            assert call(server.url, method, path, body).status_code in (200, 400)
        assert references("gdn").divergences(exchanges(server.url)) == [], calls


def test_a_store_is_refused_in_a_line_and_nothing_changes(
    server: ServerProcess, references: Callable[[str], Reference]
) -> None:
    response = call(server.url, "PUT", STORE, {"hicache_storage_backend": "file"})
    assert response.status_code == 400
    _, line = response.text.splitlines()
    assert line == "a store must be given at the start, as --hicache-storage-backend file, got file"
    assert call(server.url, "GET", STORE).json()["hicache_storage_backend"] is None
    assert references("gdn").divergences(exchanges(server.url)) == []


def test_a_busy_server_is_not_flushed_and_an_idle_one_forgets_both_tiers(
    server: ServerProcess, references: Callable[[str], Reference]
) -> None:
    together(server.url, PROMPTS)
    with running(server.url):
        assert call(server.url, "POST", "/flush_cache").status_code == 400
        assert "Timed out" in call(server.url, "POST", "/flush_cache?timeout=0.1").text
    done(server.url, "/flush_cache")
    again = [one(server.url, prompt) for prompt in PROMPTS]
    assert [exchange.completion.num_cached_tokens for exchange in again] == [0] * len(PROMPTS)
    assert references("gdn").divergences(again) == []


def test_new_weights_answer_with_nothing_that_the_old_ones_computed(
    server: ServerProcess, models: dict[str, Path], references: Callable[[str], Reference], tmp_path: Path
) -> None:
    """Unless the caller says so: the negative control."""
    tiny_model.write(tiny_model.Family.GDN, tmp_path / "new", seed=1)
    reference = references("gdn")
    together(server.url, PROMPTS)
    both = server.url, reference.url
    try:
        for url in both:
            update_weights(url, tmp_path / "new", flush_cache=False)
        expected = Reference(lambda: both[1], tmp_path / "kept")
        stale = [one(server.url, prompt) for prompt in PROMPTS]
        assert len(expected.divergences(stale)) > len(PROMPTS) // 2
        update_weights(server.url, tmp_path / "new")
        assert expected.divergences([one(server.url, prompt) for prompt in PROMPTS * 2]) == []
    finally:
        for url in both:
            update_weights(url, models["gdn"])
    assert reference.divergences([one(server.url, prompt) for prompt in PROMPTS]) == []


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["in_place", "retract"])
@pytest.mark.parametrize("is_flushed", [False, True], ids=["kept", "flushed"])
def test_requests_go_on_after_a_pause_in_their_midst(
    mode: str,
    is_flushed: bool,
    server: ServerProcess,
    models: dict[str, Path],
    references: Callable[[str], Reference],
) -> None:
    """Weights may be updated in it, and where requests were retracted, everything may be forgotten."""
    first, *others = [prompt[: 500 + 25 * index] for index, prompt in enumerate(PROMPTS)]
    for num_answered in (2, 30, 60):
        with ThreadPoolExecutor(1) as pool:
            answer = stream(server.url, first, max_new_tokens=PAUSED)
            next(answer)
            # Every step that answers them answers the first as well: none of them can have ended where that has not.
            asked = pool.submit(together, server.url, others, PAUSED)
            while len(next(answer).token_ids) < num_answered:
                pass
            done(server.url, "/pause_generation", {"mode": mode})
            try:
                assert not asked.done(), "they ran no longer, so nothing was tested"
                weights = {"model_path": str(models["gdn"]), "flush_cache": is_flushed}
                updated = call(server.url, "POST", "/update_weights_from_disk", weights)
            finally:
                done(server.url, "/continue_generation", {})
            *_, last = answer
            assert references("gdn").divergences([Exchange(tuple(first), last), *asked.result()]) == []
        assert updated.status_code == 200 or (is_flushed and mode == "in_place"), updated.text


def test_memory_is_released_by_an_idle_server_alone_and_resumed_where_it_was_released(
    server: ServerProcess, references: Callable[[str], Reference]
) -> None:
    with running(server.url):
        refused = call(server.url, "POST", "/release_memory_occupation", {})
        assert refused.status_code == 400
        assert "this one runs requests" in refused.json()["error"]["message"]
    refused = call(server.url, "POST", "/resume_memory_occupation", {"tags": ["kv_cache"]})
    assert refused.status_code == 400
    assert refused.json()["error"]["message"] == "memory that is resumed must be released, got kv_cache"
    done(server.url, "/release_memory_occupation", {"tags": ["kv_cache"]})
    done(server.url, "/resume_memory_occupation", {"tags": ["kv_cache"]})
    assert references("gdn").divergences(exchanges(server.url)) == []


def test_a_session_goes_on_over_a_flush_until_it_is_closed(
    server: ServerProcess, references: Callable[[str], Reference]
) -> None:
    session = call(server.url, "POST", "/open_session", {"capacity_of_str_len": 10_000}).json()
    prompt: list[int] = []
    rid = None
    for turn in range(3):
        more = random_tokens(70_300 + turn, 200)
        body = {
            "input_ids": more,
            "session_params": {"id": session, "rid": rid},
            "sampling_params": {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True},
        }
        answer = HTTP.post(f"{server.url}/generate", json=body, timeout=60.0).json()
        rid = answer["meta_info"]["id"]
        prompt += more
        assert tuple(answer["output_ids"]) == references("gdn").answer(tuple(prompt), 8).token_ids
        prompt += answer["output_ids"]
        done(server.url, "/flush_cache?timeout=30")
    done(server.url, "/close_session", {"session_id": session})
    gone = HTTP.post(f"{server.url}/generate", json=body, timeout=60.0)
    assert gone.status_code == 400
    assert references("gdn").divergences(exchanges(server.url)) == []


def test_ids_that_an_endpoint_lets_through_as_they_are_get_400(server: ServerProcess) -> None:
    response = call(server.url, "POST", "/vertex_generate", {"instances": [{"input_ids": [[[1]]]}]})
    assert response.status_code == 400
    assert response.json()["error"]["message"] == "input_ids[0] must be a token id, an integer, got [[1]]"
