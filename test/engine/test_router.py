"""`marconi router` in front of two real servers: what it promises they hit, and nothing is lost when one is killed."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import sglang as sgl
from anthropic import Anthropic
from openai import OpenAI
from sglang.lang.backend.runtime_endpoint import RuntimeEndpoint

from marconi_cpu.demo.server_process import ServerProcess

from .client import HTTP
from .conftest import StartServer, server_args
from .processes import free_ports
from .routers import Router, arguments, greedy, running
from .scenarios import EXTRA_BUFFER
from .scrapes import AFTER_A_FAILURE, all_unanswered, scraped

pytestmark = pytest.mark.slow

SESSION = "The state after these words stands for all of them, and cannot be rolled back. "
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Schlägt nach — 何でも 🔎",
            "parameters": {"type": "object", "properties": {"what": {"type": "string", "enum": ["größe", "名前"]}}},
        },
    }
]


@pytest.fixture(scope="module")
def router(
    models: dict[str, Path], start_server: StartServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Router]:
    def start(_: int) -> ServerProcess:
        events = f"tcp://127.0.0.1:{free_ports(2)}"
        args = [*server_args(EXTRA_BUFFER), "--enable-cache-report", "--marconi-events", events]
        return start_server(models["gdn"], args)

    with ThreadPoolExecutor() as threads:
        workers = tuple(threads.map(start, range(2)))
    with running(workers, models["gdn"], tmp_path_factory.mktemp("router") / "log") as made:
        yield made


CHATS: dict[str, dict[str, Any]] = {
    "plain": {"messages": [{"role": "system", "content": SESSION * 2}]},
    "tools": {"messages": [{"role": "system", "content": SESSION}], "tools": TOOLS},
    "unicode": {"messages": [{"role": "system", "content": "e\u0301 中文 👩‍👩‍👧 \u200fעברית " * 8}]},  # noqa: RUF001
    "parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": SESSION}]}]},
}


@pytest.mark.parametrize("name", CHATS)
def test_a_workers_hits_are_what_the_router_promised_for_chats(router: Router, name: str) -> None:
    promised_for_chats(router, name)


def promised_for_chats(router: Router, name: str, **space: str) -> None:
    body = {**CHATS[name], "model": "x", "max_tokens": 8, "temperature": 0, **space}
    messages = list(body["messages"])
    for turn in range(3):
        messages.append({"role": "user", "content": f"Turn {turn} of {name}: why?"})
        answer = router.post("/v1/chat/completions", {**body, "messages": messages}).json()
        messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"] or "-"})
        promised = router.latest()
        assert promised["num_prompt_tokens"] == answer["usage"]["prompt_tokens"]
        details = answer["usage"]["prompt_tokens_details"] or {"cached_tokens": 0}
        assert promised["num_hit_tokens"] == details["cached_tokens"]
        assert not turn or promised["num_hit_tokens"] > 0
        router.until_told()


@pytest.mark.parametrize(
    "space", [{}, {"extra_key": "an adapter"}, {"cache_salt": "a tenant"}], ids=["plain", "extra_key", "salt"]
)
def test_a_workers_hits_are_what_the_router_promised_for_texts(router: Router, space: dict[str, str]) -> None:
    promised_for_texts(router, space)


def promised_for_texts(router: Router, space: dict[str, str]) -> None:
    text = f"{space} öäü 中文 " + SESSION * 3
    hits = []
    for _ in range(3):
        answer = router.post("/generate", {"text": text, "sampling_params": greedy(), **space}).json()
        promised = router.latest()
        assert promised["num_prompt_tokens"] == answer["meta_info"]["prompt_tokens"]
        assert promised["num_hit_tokens"] == answer["meta_info"]["cached_tokens"]
        hits.append(answer["meta_info"]["cached_tokens"])
        text += answer["text"] + " and more of it"
        router.until_told()
    assert 0 == hits[0] < hits[1] < hits[2]


def test_the_clients_of_openai_and_anthropic_read_what_was_cached(router: Router) -> None:
    """Whole and streamed, through the router and from a worker, with what a coding agent sends beside its prompt."""
    for name, url in (("router", router.url), ("worker", router.workers[0].url)):
        openai = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        anthropic = Anthropic(base_url=url, api_key="none", max_retries=0)
        asks = (asked_by_openai(openai, f"{name}, to OpenAI"), asked_by_anthropic(anthropic, f"{name}, to Anthropic"))
        for ask in asks:
            (num_prompt, none), *others = [ask(is_stream) for is_stream in (False, True, False)]
            assert none < 64, "no more than a template and the first words"
            for told, cached in others:
                assert told == num_prompt
                assert num_prompt - 64 <= cached < num_prompt
            if name == "router":
                promised = router.latest()
                assert promised["num_prompt_tokens"] == num_prompt
                assert promised["num_hit_tokens"] == promised["num_cached_tokens"] == others[-1][1]


def asked_by_openai(client: OpenAI, name: str) -> Callable[[bool], tuple[int, int]]:
    """A chat by OpenAI's client; each time it tells prompt tokens, and those of them that were cached."""
    given: dict[str, Any] = {
        "model": "x",
        "messages": [{"role": "system", "content": f"{name}. {SESSION * 4}"}, {"role": "user", "content": "And now?"}],
        "tools": TOOLS,
        "max_tokens": 8,
        "temperature": 0,
        "prompt_cache_key": name,
        "prompt_cache_retention": "24h",
    }

    def ask(is_stream: bool) -> tuple[int, int]:
        if is_stream:
            chunks = client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **given)
            usage = [chunk.usage for chunk in chunks if chunk.usage is not None][-1]
        else:
            usage = client.chat.completions.create(**given).usage
        details = usage.prompt_tokens_details
        return usage.prompt_tokens, 0 if details is None else details.cached_tokens or 0

    return ask


def asked_by_anthropic(client: Anthropic, name: str) -> Callable[[bool], tuple[int, int]]:
    """The same by Anthropic's, with a call and its result, marks and a tool."""
    marked = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    given: dict[str, Any] = {
        "model": "x",
        "system": [{"type": "text", "text": f"{name}. {SESSION * 4}", **marked}],
        "messages": [
            {"role": "user", "content": "Look it up."},
            {
                "role": "assistant",
                "content": [
                    {"type": "text", "text": "I do."},
                    {"type": "tool_use", "id": "1", "name": "look_up", "input": {"what": "größe"}},
                ],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "12", **marked}]},
        ],
        "tools": [{"name": "look_up", "input_schema": TOOLS[0]["function"]["parameters"]}],
    }
    num_counted = client.messages.count_tokens(**given).input_tokens
    more: dict[str, Any] = {"max_tokens": 8, "metadata": {"user_id": name}, **given}

    def ask(is_stream: bool) -> tuple[int, int]:
        if is_stream:
            with client.messages.stream(**more) as stream:
                usage = stream.get_final_message().usage
        else:
            usage = client.messages.create(**more).usage
        cached = usage.cache_read_input_tokens or 0
        assert usage.input_tokens + cached == num_counted
        return num_counted, cached

    return ask


def test_sessions_stay_where_their_states_are(router: Router) -> None:
    homes: dict[int, set[str]] = {}
    texts = {session: f"{session}" * 7 + SESSION * 2 for session in range(6)}
    for _ in range(3):
        for session in texts:
            answer = router.post("/generate", {"text": texts[session], "sampling_params": greedy()}).json()
            texts[session] += answer["text"] + " and then?"
            homes.setdefault(session, set()).add(router.latest()["worker"])
        router.until_told()
    assert all(len(workers) == 1 for workers in homes.values())


def test_a_stream_through_the_router_says_what_a_worker_says(router: Router) -> None:
    body = {"text": SESSION, "sampling_params": greedy(12), "stream": True}
    with HTTP.stream("POST", f"{router.url}/generate", json=body, timeout=120.0) as answer:
        lines = [line for line in answer.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    whole = HTTP.post(f"{router.workers[0].url}/generate", json={**body, "stream": False}, timeout=120.0).json()
    assert json.loads(lines[-2].removeprefix("data: "))["text"] == whole["text"]


@sgl.function  # type: ignore[untyped-decorator]
def branches(s: Any) -> None:
    s += "A program with branches. " + SESSION * 4
    s.sync()
    forks = list(s.fork(4))
    for fork, question in zip(forks, ("What?", "Who?", "Why?", "How?"), strict=True):
        fork += question
        fork += sgl.gen("answer", max_tokens=4, temperature=0)
    s["cached"] = [fork.get_meta_info("answer")["cached_tokens"] for fork in forks]


def test_a_frontend_program_with_forks_runs_through_the_router(router: Router) -> None:
    state = branches.run(backend=RuntimeEndpoint(router.url))
    length = len("A program with branches. " + SESSION * 4)
    # Some may go to the other worker, where the one that holds it is slow for a moment.
    assert sum(cached == length for cached in state["cached"]) >= 2, state["cached"]


def test_a_client_that_leaves_has_its_request_aborted_on_the_worker(router: Router) -> None:
    def in_use() -> int:
        return sum(
            HTTP.get(f"{worker.url}/marconi", timeout=30.0).json()["ranks"][0]["kv_tokens"]["in_use"]
            for worker in router.workers
        )

    # More than it could answer until it is given up.
    body = {"text": "endless " + SESSION, "sampling_params": greedy(7000), "stream": True}
    with HTTP.stream("POST", f"{router.url}/generate", json=body, timeout=120.0) as answer:
        # A generator that is let go of closes the stream.
        lines = answer.iter_lines()
        first = next(lines)
        assert in_use() > 0, first
    give_up_s = time.monotonic() + 20
    while in_use():
        assert time.monotonic() < give_up_s, "it still runs"
        time.sleep(0.1)


def without_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def with_another_template(folder: Path) -> None:
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").unlink(missing_ok=True)


@pytest.mark.parametrize(("change", "here"), [(without_tokenizer, []), (with_another_template, ["texts"])])
def test_what_a_router_does_not_tokenize_as_its_workers_do_they_tokenize_and_hits_are_as_promised(
    router: Router, models: dict[str, Path], tmp_path: Path, change: Callable[[Path], None], here: list[str]
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for path in models["gdn"].iterdir():
        if path.suffix in (".json", ".jinja"):
            (other / path.name).write_bytes(path.read_bytes())
    change(other)
    with running(router.workers, other, tmp_path / "log") as another:
        assert another.state()["tokenizer"]["here"] == here
        assert another.state()["tokenizer"]["num_asked_of_workers"] == 0
        promised_for_chats(another, "tools", cache_salt=change.__name__)
        assert another.state()["tokenizer"]["num_asked_of_workers"] == 3
        promised_for_texts(another, {"extra_key": change.__name__})
        asked = another.state()["tokenizer"]
        assert (asked["num_asked_of_workers"], asked["num_not_answered"]) == (3 if here else 6, 0)


def test_another_server_is_refused_in_one_line(router: Router, models: dict[str, Path]) -> None:
    done = subprocess.run(arguments([router.url], models["gdn"], 0), capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert f"{router.url}: must be an SGLang server" in done.stderr.splitlines()[-1]


def test_killed_under_load_a_worker_loses_no_request_that_had_not_streamed(router: Router) -> None:
    def ask(number: int) -> tuple[int, list[str]]:
        body = {"text": f"{number}: {SESSION}", "sampling_params": greedy(40), "stream": number % 2 == 0}
        if not body["stream"]:
            answer = client.post("/generate", json=body)
            return answer.status_code, ["data: [DONE]"] if "text" in answer.json() else []
        with client.stream("POST", "/generate", json=body) as stream:
            return stream.status_code, [line for line in stream.iter_lines() if line]

    victim = router.workers[0]
    # One client: a busy machine takes longer to make 48 than to answer them, and nothing would run beside anything.
    with (
        httpx.Client(base_url=router.url, timeout=120.0, trust_env=False) as client,
        ThreadPoolExecutor(max_workers=24) as threads,
    ):
        asked = [threads.submit(ask, number) for number in range(48)]
        router.until(lambda state: state["workers"][0]["num_running"] >= 2)
        os.killpg(victim.pid, signal.SIGKILL)
        answers = [each.result() for each in asked]
    assert [status for status, _ in answers] == [200] * 48
    for number, (_, lines) in enumerate(answers):
        if lines[-1] != "data: [DONE]":
            assert number % 2 == 0
            assert len(lines) > 1, "it had not streamed, so it is another worker's"
            assert json.loads(lines[-1].removeprefix("data: "))["error"]["code"] == 502
    state = router.state()
    assert [worker["condition"] for worker in state["workers"]] == ["down", "up"]
    assert router.post("/generate", {"text": "still there?", "sampling_params": greedy()}).status_code == 200
    assert not all_unanswered(scraped(router.url), AFTER_A_FAILURE.__contains__)
