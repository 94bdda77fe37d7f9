"""A server under the backend, as its users and operators meet it: bad bodies, flushes, aborts, other entry points."""

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from marconi.process import LAUNCH
from marconi_cpu.demo.server_process import ServerProcess, environment

from .client import HTTP, generate, random_tokens
from .conftest import MARCONI, STANDARD, EntryPoint
from .processes import is_gone, processes_of
from .scenarios import EXTRA_BUFFER, MAX_KV_TOKENS

BAD_BODIES = [
    ("generate", "{not json"),
    ("generate", "[]"),
    ("generate", "{}"),
    ("generate", '{"text": 5}'),
    ("generate", '{"input_ids": "abc"}'),
    ("generate", '{"input_ids": [5, 99999999]}'),
    ("generate", '{"input_ids": [5, -1]}'),
    ("generate", '{"text": ""}'),
    ("generate", '{"input_ids": [[]]}'),
    ("generate", '{"text": "hi", "return_logprob": true, "top_logprobs_num": 100000}'),
    ("generate", '{"text": "hi", "return_logprob": true, "top_logprobs_num": -5}'),
    ("generate", '{"text": "hi", "sampling_params": 7}'),
    ("generate", '{"text": "hi", "sampling_params": {"temperature": "hot"}}'),
    ("generate", '{"text": "hi", "sampling_params": {"max_new_tokens": -3}}'),
    ("v1/chat/completions", "{not json"),
    ("v1/chat/completions", '{"messages": 3}'),
    ("v1/chat/completions", '{"model": "m", "messages": []}'),
]
LAUNCHES = (STANDARD["gdn", EXTRA_BUFFER],)


@pytest.mark.parametrize(("path", "body"), BAD_BODIES)
def test_a_malformed_body_gets_400_and_the_server_goes_on(server: ServerProcess, path: str, body: str) -> None:
    headers = {"content-type": "application/json"}
    response = HTTP.post(f"{server.url}/{path}", content=body, headers=headers, timeout=30.0)
    assert response.status_code == 400, response.text
    assert generate(server.url, random_tokens(1, 20), max_new_tokens=2).token_ids


def test_a_token_outside_the_vocabulary_is_named(server: ServerProcess) -> None:
    response = HTTP.post(f"{server.url}/generate", json={"input_ids": [5, 7, 99999999]}, timeout=30.0)
    assert "input_ids[2] must be a token id from 0 to" in response.text


def test_flushing_a_busy_server_loses_no_request(server: ServerProcess) -> None:
    prompts = [random_tokens(50 + i, 200) for i in range(6)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = [pool.submit(generate, server.url, prompt, max_new_tokens=200) for prompt in prompts]
        flushes = []
        while not all(answer.done() for answer in answers):
            flushes.append(HTTP.post(f"{server.url}/flush_cache", timeout=60.0).status_code)
            time.sleep(0.1)
        assert [len(answer.result().token_ids) for answer in answers] == [200] * len(prompts)
    assert flushes, "the server was never asked to flush while it was busy"
    assert HTTP.post(f"{server.url}/flush_cache?timeout=30", timeout=60.0).status_code == 200
    assert generate(server.url, prompts[0]).num_cached_tokens == 0


def test_the_log_says_what_the_cache_is_and_what_it_saved(server: ServerProcess) -> None:
    prompt = random_tokens(70, 300)
    for _ in range(3):
        generate(server.url, prompt)
        time.sleep(0.2)
    log = server.log_path.read_text(errors="replace")
    assert f"marconi: {MAX_KV_TOKENS} KV tokens of" in log
    assert "48 state slots of" in log
    assert "prompt tokens from the cache (" in log


def test_the_status_adds_up(server: ServerProcess) -> None:
    """`GET /marconi` counts what was asked, and its pools hold what they have."""
    # Whatever else is there may be worth more than what this prompt leaves.
    assert HTTP.post(f"{server.url}/flush_cache?timeout=30", timeout=60.0).status_code == 200
    before = HTTP.get(f"{server.url}/marconi", timeout=60.0).json()["ranks"][0]
    assert HTTP.get(f"{server.url}/health", timeout=60.0).status_code == 200
    prompt = random_tokens(75, 200)
    for _ in range(2):
        generate(server.url, prompt)
    (after,) = HTTP.get(f"{server.url}/marconi", timeout=60.0).json()["ranks"]
    assert after["num_health_checks"] - before["num_health_checks"] == 1
    assert after["num_requests"] - before["num_requests"] == 2
    assert after["num_prompt_tokens"] - before["num_prompt_tokens"] == 400
    assert after["num_hit_tokens"] - before["num_hit_tokens"] == 199
    assert after["hits"]["input_prefix"] - before["hits"]["input_prefix"] == 1
    assert after["hits"]["none"] - before["hits"]["none"] == 1
    assert sum(after["hits"].values()) == after["num_requests"]
    for pool in (after["kv_tokens"], after["state_slots"]):
        assert pool["free"] + pool["cached"] + pool["in_use"] == pool["size"]
        assert pool["in_use"] == 0
    assert after["num_states_not_written"] == before["num_states_not_written"]


def test_the_metrics_of_an_idle_server_are_its_status(server: ServerProcess) -> None:
    """Two requests come within a second, in which metrics are set once; a moment later they say both."""
    for seed in (76, 77):
        generate(server.url, random_tokens(seed, 150))
    (status,) = HTTP.get(f"{server.url}/marconi", timeout=60.0).json()["ranks"]
    deadline_s = time.monotonic() + 60.0
    while True:
        lines = HTTP.get(f"{server.url}/metrics/", timeout=60.0).text.splitlines()
        (line,) = (line for line in lines if line.startswith("marconi_prompt_tokens_total{"))
        if float(line.split()[-1]) == status["num_prompt_tokens"]:
            break
        assert time.monotonic() < deadline_s, line
        time.sleep(0.2)
    assert "# TYPE marconi_prompt_tokens_total counter" in lines
    assert 'cache_type="marconi"' in line
    assert 'dp_rank="0"' in line


@pytest.mark.slow
@pytest.mark.usefixtures("few_models")
def test_sglang_serve_takes_the_backend_and_ends_by_itself_when_it_is_interrupted(
    models: dict[str, Path], tmp_path: Path
) -> None:
    """And records what it has served, if it is asked to."""
    entry_point = (str(Path(sys.executable).with_name("sglang")), "serve")
    record = tmp_path / "served.jsonl"
    args = [*MARCONI, "--marconi-record", str(record)]
    with ServerProcess(models["mamba2"], args, log_path=tmp_path / "log", entry_point=entry_point) as running:
        prompt = random_tokens(80, 300)
        generate(running.url, prompt)
        assert generate(running.url, prompt + random_tokens(81, 40)).num_cached_tokens > 0
        assert "bytes for KV tokens" in running.log_path.read_text(errors="replace"), "flags name no division"
        group = running.pid
        assert len(processes_of(group)) >= 3, "an HTTP server, a scheduler and a detokenizer"
        os.kill(group, signal.SIGINT)
        assert is_gone(group, within_s=60)
    served = [json.loads(line) for line in record.read_text(encoding="utf-8").splitlines()][-2:]
    assert [each["input_length"] for each in served] == [300, 340]
    assert served[0]["hash_ids"][:4] == served[1]["hash_ids"][:4]
    assert served[1]["cached_tokens"] > 0


@pytest.mark.slow
def test_a_model_of_attention_alone_is_served_by_sglangs_own_cache(
    attention_model: Path, preload: EntryPoint, tmp_path: Path
) -> None:
    args, log_path = list(MARCONI), tmp_path / "log"
    with ServerProcess(attention_model, args, log_path=log_path, entry_point=preload(LAUNCH)) as running:
        prompt = random_tokens(90, 300)
        first = generate(running.url, prompt)
        again = generate(running.url, prompt)
        assert again.token_ids == first.token_ids
        assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 299)
        log = log_path.read_text(errors="replace")
        assert "marconi: this model has no recurrent layers, its cache is SGLang's own" in log
        assert "impl=UnifiedRadixCache" in log
        status = HTTP.get(f"{running.url}/marconi", timeout=60.0)
        assert (status.status_code, "no recurrent layers" in status.json()["error"]) == (404, True)


@pytest.mark.slow
def test_an_offline_engine_takes_the_backend_and_refuses_in_one_line(
    models: dict[str, Path], preload: EntryPoint
) -> None:
    program = str(Path(__file__).with_name("offline_engine.py"))
    done = subprocess.run(
        [sys.executable, *preload((program,)), str(models["gdn"])],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    first, second, refused = done.stdout.strip().splitlines()[-3:]
    assert int(first.removeprefix("cached ")) == 0
    assert int(second.removeprefix("cached ")) > 0
    assert refused == ("Refusal: --enable-lmcache and --radix-cache-backend marconi are two caches: give one of them")
