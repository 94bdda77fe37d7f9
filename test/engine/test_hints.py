"""Checkpoints where a request asks for them, in a server: kept at their exact token, told of, or refused in a line."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from marconi.engine.cache.scheduler import asked_by, count_dropped, shared_elsewhere, system_end_of
from marconi.engine.guards.request import refuse_unanswerable
from marconi.engine.http.details import on_get_cached_tokens_details
from marconi.engine.http.hints import KEY, SYSTEM_END, around_wait_one_response, ask_for_end, mapping_of, require_hints
from marconi.engine.reports.explain import EXPLAIN
from marconi.events.base import SHARED_ELSEWHERE
from marconi.policy.admission.trials import CHUNK_TOKENS
from marconi_cpu.demo.server_process import ServerProcess

from .client import HTTP, NUM_TOKENS, Completion, generate, random_tokens
from .conftest import MARCONI, STANDARD, StartServer
from .scenarios import CHUNKED_PREFILL_SIZE, EXTRA_BUFFER, NO_BUFFER

EPHEMERAL = {"type": "ephemeral"}
NUM_NEW_TOKENS = 6
CHUNK = CHUNKED_PREFILL_SIZE
MAX_LOGPROB_DIFFERENCE = 1e-5
NO_MAPPINGS = (5, True, 0.5, [KEY], f"a text with {KEY} in it")
"""Values of `custom_params` that SGLang answers."""
LAUNCHES = (STANDARD["gdn", EXTRA_BUFFER], pytest.param(STANDARD["mamba2", NO_BUFFER], marks=pytest.mark.slow))
MANAGER, OF_DECODE = (SimpleNamespace(disaggregation_mode=SimpleNamespace(value=mode)) for mode in ("null", "decode"))
"""As much of a tokenizer manager as is asked."""


@pytest.fixture(autouse=True)
def flushed(request: pytest.FixtureRequest) -> None:
    """Every test begins with an empty cache."""
    if "server" in request.fixturenames:
        flush(request.getfixturevalue("server"))


def flush(server: ServerProcess) -> None:
    assert HTTP.post(f"{server.url}/flush_cache?timeout=30", timeout=60.0).status_code == 200


def ask(server: ServerProcess, prompt: list[int], hints: object = None, **fields: Any) -> dict[str, Any]:
    """The meta-information of a greedy answer to `prompt`."""
    sampling: dict[str, Any] = {"temperature": 0, "max_new_tokens": NUM_NEW_TOKENS, "ignore_eos": True}
    if hints is not None:
        sampling["custom_params"] = {"marconi_checkpoints": hints}
    body = {"input_ids": prompt, "sampling_params": sampling | fields.pop("sampling_params", {}), **fields}
    response = HTTP.post(f"{server.url}/generate", json=body, timeout=300.0)
    assert response.status_code == 200, response.text
    meta: dict[str, Any] = response.json()["meta_info"]
    return meta


def num_cached(server: ServerProcess, prompt: list[int]) -> int:
    cached: int = ask(server, prompt)["cached_tokens"]
    return cached


@pytest.mark.parametrize("position", [1, 63, 64, 65, 127, CHUNK - 1, CHUNK, CHUNK + 1, 599, -1])
def test_the_first_request_that_goes_on_from_a_hint_starts_there(server: ServerProcess, position: int) -> None:
    """And answers as one that computes everything; a prompt is of two chunks."""
    prompt = random_tokens(20_000 + position, 600)
    depth = 600 if position == -1 else position
    longer = prompt[:depth] + random_tokens(21_000 + position, 40)
    expected = generate(server.url, longer)
    flush(server)
    assert ask(server, prompt, [position])["cached_tokens"] == 0
    got = generate(server.url, longer)
    assert got.num_cached_tokens == depth
    assert_equal(got, expected)


def assert_equal(got: Completion, expected: Completion) -> None:
    assert got.token_ids == expected.token_ids
    assert max(abs(a - b) for a, b in zip(got.logprobs, expected.logprobs, strict=True)) <= MAX_LOGPROB_DIFFERENCE


def test_a_request_that_leaves_its_prompts_end_answers_as_one_that_does_not(server: ServerProcess) -> None:
    prompt = random_tokens(2500, CHUNK + 24)
    expected = generate(server.url, prompt)
    flush(server)
    told = ask(server, prompt, [-1, 100], return_logprob=True, sampling_params={"max_new_tokens": NUM_TOKENS})
    logprobs, token_ids, _ = zip(*told["output_token_logprobs"], strict=True)
    assert_equal(Completion(tuple(token_ids), tuple(logprobs), 0), expected)


def test_the_prompts_end_and_the_state_before_its_last_token_are_both_there(server: ServerProcess) -> None:
    prompt = random_tokens(2510, 200)
    ask(server, prompt, [-1])
    assert num_cached(server, prompt) == 199
    assert num_cached(server, prompt + random_tokens(2511, 30)) == 200


def test_the_example_of_the_page_on_requests(server: ServerProcess) -> None:
    page = (Path(__file__).parents[2] / "docs" / "requests.md").read_text(encoding="utf-8")
    rows = re.findall(r"^    (P.*?)  +(\d+) (?:  +\[.*?\]|) +(\d+) +(\d+)\b", page, re.MULTILINE)
    shown = {name: tuple(map(int, counts)) for name, *counts in rows}
    prompt = random_tokens(2512, 1300)
    prompts = {
        "P": prompt,
        "P[:600] + 50": prompt[:600] + random_tokens(2513, 50),
        "P + 40": prompt + random_tokens(2514, 40),
    }
    found: dict[str, list[int]] = {name: [len(tokens)] for name, tokens in prompts.items()}
    for hints in ([600, -1], None):
        flush(server)
        for name, tokens in prompts.items():
            found[name].append(ask(server, tokens, hints if name == "P" else None)["cached_tokens"])
    assert {name: tuple(counts) for name, counts in found.items()} == {name: shown[name] for name in prompts}


def test_past_four_the_shallowest_are_kept_and_the_answer_says_so(server: ServerProcess) -> None:
    prompt = random_tokens(2520, 240)
    told = ask(server, prompt, [60, 200, 20, -1, 40, 80])["marconi_checkpoints"]
    assert told == {"num_asked": 6, "num_left_out": 2, "num_without_slot": 0}
    for index, depth in enumerate((20, 40, 60, 80)):
        assert num_cached(server, prompt[:depth] + random_tokens(2530 + index, 20)) == depth
    assert num_cached(server, prompt[:190] + random_tokens(2540, 20)) == 128, "from a state on trial"


def test_an_answer_without_hints_says_nothing_of_them(server: ServerProcess) -> None:
    assert "marconi_checkpoints" not in ask(server, random_tokens(2550, 50))


def test_a_batch_and_a_stream_are_told_as_well(server: ServerProcess) -> None:
    sampling = {"max_new_tokens": 3, "custom_params": {"marconi_checkpoints": [-1, 9]}}
    prompts = [random_tokens(2560 + index, 60 + index) for index in range(2)]
    body = {"input_ids": prompts, "sampling_params": sampling}
    answers = HTTP.post(f"{server.url}/generate", json=body, timeout=300.0).json()
    assert [answer["meta_info"]["marconi_checkpoints"]["num_asked"] for answer in answers] == [2, 2]
    assert [num_cached(server, [*prompt, 7, 8]) for prompt in prompts] == [60, 61]
    body = {"input_ids": random_tokens(2570, 50), "sampling_params": sampling, "stream": True}
    stream = HTTP.post(f"{server.url}/generate", json=body, timeout=300.0).text
    chunks = [json.loads(line.removeprefix("data: ")) for line in stream.splitlines() if line.startswith("data: {")]
    assert [chunk["meta_info"]["marconi_checkpoints"]["num_asked"] for chunk in chunks] == [2] * len(chunks)


def test_the_answer_says_what_became_of_each_action_of_the_kv_hints(server: ServerProcess) -> None:
    retain = {"action_id": "a", "action_type": "retain", "action_version": "1.0", "payload": {"seconds": 7200}}
    actions = [retain, {**retain, "action_id": "b", "action_type": "prefetch", "payload": {}}]
    kv_hints = {"protocol_version": "0.1", "message_id": "m", "actions": actions}
    told = ask(server, random_tokens(2575, 50), kv_hints=kv_hints)["marconi_kv_hints"]
    assert [(each["action_id"], each["result"]) for each in told] == [("a", "clipped"), ("b", "rejected")]
    assert (told[0]["seconds"], told[0]["reason"]) == (3600.0, "seconds must be at most 3600, got 7200")
    assert "marconi_kv_hints" not in ask(server, random_tokens(2576, 50))


@pytest.mark.parametrize("hints", ["12", 12, {"at": 1}, [1.5], ["1"], [True], [None], [[1]], [0], [-2], [51]])
@pytest.mark.parametrize("path", ["generate", "v1/completions", "v1/chat/completions"])
def test_what_is_no_list_of_positions_gets_400_in_one_line(server: ServerProcess, path: str, hints: object) -> None:
    custom: dict[str, Any] = {"custom_params": {"marconi_checkpoints": hints}}
    body = {
        "generate": {"input_ids": random_tokens(2580, 50), "sampling_params": custom},
        "v1/completions": {"model": "m", "prompt": random_tokens(2580, 50), **custom},
        "v1/chat/completions": {"model": "m", "messages": [{"role": "user", "content": "ten tokens"}], **custom},
    }[path]
    response = HTTP.post(f"{server.url}/{path}", json=body, timeout=60.0)
    assert response.status_code == 400, response.text
    answer = response.json()
    line = answer.get("message") or answer["error"]["message"]
    assert line.startswith("custom_params.marconi_checkpoints ")
    assert "must be a list of integers from 1 to " in line
    assert "\n" not in line


def test_a_hint_of_null_is_refused_too(server: ServerProcess) -> None:
    custom = {"custom_params": {"marconi_checkpoints": None}}
    body = {"input_ids": random_tokens(2580, 50), "sampling_params": custom}
    response = HTTP.post(f"{server.url}/generate", json=body, timeout=60.0)
    assert (response.status_code, "must be a list" in response.text) == (400, True)


@pytest.mark.parametrize("max_new_tokens", [0, 2])
def test_custom_params_of_any_type_are_answered(server: ServerProcess, max_new_tokens: int) -> None:
    prompt = random_tokens(2590, 40)
    for custom in NO_MAPPINGS:
        assert "marconi_checkpoints" not in ask(
            server, prompt, sampling_params={"custom_params": custom, "max_new_tokens": max_new_tokens}
        )


# OpenAI's endpoints


def chat(server: ServerProcess, messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    body = {"model": "m", "temperature": 0, "max_tokens": 4, "messages": messages, **fields}
    response = HTTP.post(f"{server.url}/v1/chat/completions", json=body, timeout=300.0)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def num_cached_of(answer: dict[str, Any]) -> int:
    cached: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached


def test_openai_answers_say_in_their_metadata_what_became_of_the_hints(server: ServerProcess) -> None:
    custom = {"custom_params": {"marconi_checkpoints": [1, 2, 3, 4, 5]}}
    expected = {"num_asked": 5, "num_left_out": 1, "num_without_slot": 0}
    body = {"model": "m", "prompt": random_tokens(2600, 50), "max_tokens": 3, **custom}
    completion = HTTP.post(f"{server.url}/v1/completions", json=body, timeout=300.0).json()
    assert completion["metadata"]["marconi_checkpoints"] == expected
    answer = chat(server, [{"role": "user", "content": "hello"}], return_meta_info=True, **custom)
    assert answer["metadata"]["marconi_checkpoints"] == expected
    assert answer["choices"][0]["meta_info"]["marconi_checkpoints"] == expected
    assert "marconi_checkpoints" not in chat(server, [{"role": "user", "content": "hello"}])["metadata"]


def test_the_second_chat_with_a_marked_system_message_starts_at_its_end(server: ServerProcess) -> None:
    """Exactly: without the mark it starts where the next turn's text begins."""
    text = "Be kind, Zoë. 你好 🙂 " * 8
    ended = len(f"system\n{text}\n".encode()) + 2  # and the two special tokens around it
    users = [{"role": "user", "content": f"{letter} question"} for letter in "ab"]
    tool = {"type": "function", "function": {"name": "find", "parameters": {"type": "object", "properties": {}}}}
    for fields in ({}, {"tools": [tool]}):
        flush(server)
        marked = chat(server, [{"role": "system", "content": text, "cache_control": EPHEMERAL}, users[0]], **fields)
        assert marked["metadata"]["marconi_checkpoints"]["num_asked"] == 1
        assert num_cached_of(chat(server, [{"role": "system", "content": text}, users[1]], **fields)) == ended


@pytest.mark.parametrize(("role", "least", "most"), [("system", 0.97, 1.0), ("user", 0.0, 0.99)])
def test_the_second_chat_under_a_new_system_prompt_starts_at_its_end(
    server: ServerProcess, role: str, least: float, most: float
) -> None:
    """Where the same text in a user's turn ends nobody knows: the second starts somewhere before it."""
    for index in range(5):
        text = f"{index} is the number of these rules. {role} " * 30
        questions = [f"{letter} question about the rules: " * 8 for letter in "ab"]
        asked = [
            chat(server, [{"role": role, "content": text[:700]}, {"role": "user", "content": question}])
            for question in questions
        ]
        num_shared = len(f"{role}\n{text[:700]}\nuser\n") + 3
        assert least <= num_cached_of(asked[1]) / num_shared <= most
        assert "marconi_checkpoints" not in asked[0]["metadata"], "no client asked"


def test_a_marked_document_is_shared_by_questions_in_the_same_message(server: ServerProcess) -> None:
    document = {"type": "text", "text": "A long document. " * 12, "cache_control": EPHEMERAL}
    for index, letter in enumerate("ab"):
        answer = chat(server, [{"role": "user", "content": [document, {"type": "text", "text": f"{letter}?"}]}])
        assert num_cached_of(answer) >= index * len(document["text"])


def test_anthropics_messages_start_at_marked_ends_and_answer_as_if_computed(server: ServerProcess) -> None:
    """Without marks the second question about a document starts from a state on trial before the document's end."""
    document, system = "A long document. " * 12, "Be kind, Zoë. " * 8
    head = f"system\n{system}\nuser\n"  # and three special tokens
    ended = {"system": len(head.encode()) + 3, "document": len((head + document).encode()) + 3}

    def ask(question: str, marked: str | None) -> tuple[list[Any], int]:
        marks = {key: {"cache_control": {**EPHEMERAL, "ttl": "1h"}} if key == marked else {} for key in ended}
        content = [{"type": "text", "text": document, **marks["document"]}, {"type": "text", "text": question}]
        body = {"model": "m", "temperature": 0, "max_tokens": 4, "messages": [{"role": "user", "content": content}]}
        body["system"] = [{"type": "text", "text": system, **marks["system"]}]
        response = HTTP.post(f"{server.url}/v1/messages", json=body, timeout=300.0)
        assert response.status_code == 200, response.text
        answer = response.json()
        return answer["content"], answer["usage"].get("cache_read_input_tokens", 0)

    on_trial = ended["document"] // CHUNK_TOKENS * CHUNK_TOKENS
    rounds = (("document", ended["document"]), ("system", on_trial), (None, on_trial))
    for length, (marked, shared) in enumerate(rounds, start=1):
        # Each longer than the last: else the cache has learned by now where such prompts diverge.
        first, second = (letter * 10 * length for letter in "ab")
        flush(server)
        alone = ask(second, None)[0]
        flush(server)
        assert ask(first, marked)[1] == 0
        assert ask(second, marked) == (alone, shared)


def test_a_mark_of_an_hour_is_answered_as_a_retention(server: ServerProcess) -> None:
    def answered(retention: str, **mark: Any) -> dict[str, Any]:
        messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "A question.", **mark}]
        metadata: dict[str, Any] = chat(server, messages, prompt_cache_retention=retention).get("metadata", {})
        return metadata

    for retention, ttl in (("in_memory", "1h"), ("24h", "5m")):
        (told,) = answered(retention, cache_control={**EPHEMERAL, "ttl": ttl})["marconi_kv_hints"]
        assert (told["action_type"], told["result"]) == ("retain", "accepted")
        assert (told["num_states"], told["seconds"]) == (1, 3600)
    assert "marconi_kv_hints" not in answered("in_memory", cache_control={**EPHEMERAL, "ttl": "5m"})


def test_a_mark_of_another_type_gets_400_in_one_line(server: ServerProcess) -> None:
    message = {"role": "user", "content": "x", "cache_control": {"type": "persistent"}}
    body = {"model": "m", "max_tokens": 4, "messages": [message]}
    expected = 'messages[0].cache_control must be {"type": "ephemeral"}, got {"type": "persistent"}'
    for path in ("v1/chat/completions", "v1/messages"):
        response = HTTP.post(f"{server.url}/{path}", json=body, timeout=60.0)
        assert response.status_code == 400
        answer = response.json()
        assert (answer["message"] if "message" in answer else answer["error"]["message"]) == expected


def test_the_server_is_whole_and_its_log_has_no_traceback(server: ServerProcess) -> None:
    assert HTTP.get(f"{server.url}/health", timeout=60.0).status_code == 200
    log = server.log_path.read_text(errors="replace")
    assert "Traceback" not in log
    assert "were not written" not in log


# Slots that run out


@pytest.mark.slow
def test_where_slots_run_out_the_deepest_hints_are_dropped_and_told(
    models: dict[str, Path], start_server: StartServer
) -> None:
    """Six slots: with larger pages three for the one request that runs, and three of the four that it asks for."""
    args = ("--max-total-tokens", "4000", "--max-mamba-cache-size", "6", "--max-running-requests", "1")
    server = start_server(models["gdn"], [*MARCONI, *args, "--page-size", "16"])
    prompt = random_tokens(2700, 200)
    told = ask(server, prompt, [32, 64, 96, 128])
    assert told["marconi_checkpoints"] == {"num_asked": 4, "num_left_out": 0, "num_without_slot": 1}
    (rank,) = HTTP.get(f"{server.url}/marconi", timeout=60.0).json()["ranks"]
    assert rank["num_states_not_written"] == 3, "the deepest that was asked for, and the two for the next turn"
    assert num_cached(server, prompt[:128] + random_tokens(2701, 20)) == 96


def test_a_state_is_kept_where_a_router_knows_that_prompts_diverge_and_the_answer_says_nothing_of_it(
    server: ServerProcess,
) -> None:
    """Of the first prompt that has it; without the router's word the second starts from a state on trial."""
    prompt, others = random_tokens(2800, 400), [random_tokens(2801 + number, 60) for number in range(2)]
    expected = generate(server.url, prompt[:300] + others[0])
    for custom, num_tokens in ({SHARED_ELSEWHERE: 300}, 300), ({SHARED_ELSEWHERE: 400}, 256), ({}, 256):
        flush(server)
        told = ask(server, prompt, sampling_params={"custom_params": custom})
        assert (told["cached_tokens"], KEY in told) == (0, False)
        got = generate(server.url, prompt[:300] + others[0])
        assert got.num_cached_tokens == num_tokens
        assert_equal(got, expected)


# Without a server


def request_of(num_prompt_tokens: int, custom: object) -> Any:
    """As a scheduler sees it; the copy that warms several samples generates nothing."""
    params = SimpleNamespace(max_new_tokens=0, custom_params=custom)
    return SimpleNamespace(origin_input_ids=[7] * num_prompt_tokens, sampling_params=params)


@pytest.mark.parametrize(
    ("position", "taken"),
    [(1, (1,)), (49, (49,)), *((wrong, ()) for wrong in (0, -1, 50, 51, True, "9", [9], 9.0, None))],
)
def test_a_scheduler_takes_a_routers_position_within_the_prompt(position: object, taken: tuple[int, ...]) -> None:
    assert shared_elsewhere(request_of(50, {SHARED_ELSEWHERE: position})) == taken
    assert shared_elsewhere(request_of(50, [position])) == ()


@pytest.mark.parametrize(
    ("position", "taken"), [(1, 1), (49, 49), *((wrong, 0) for wrong in (0, -1, 50, 51, True, "9", [9], 9.0, None))]
)
def test_a_scheduler_takes_the_end_of_a_system_prompt_within_the_prompt(position: object, taken: int) -> None:
    assert system_end_of(request_of(50, {SYSTEM_END: position})) == taken
    assert system_end_of(request_of(50, [position])) == 0


@pytest.mark.parametrize(
    ("req", "positions"),
    [
        (request_of(50, None), ()),
        (request_of(50, {"of another": 1}), ()),
        (request_of(50, {KEY: [-1, 9]}), (9, 50)),
        (request_of(50, {KEY: [51]}), ()),
        (request_of(50, {KEY: "nonsense that nobody refused"}), ()),
        *((request_of(50, custom), ()) for custom in NO_MAPPINGS),
    ],
)
def test_a_scheduler_takes_what_makes_sense(req: Any, positions: tuple[int, ...]) -> None:
    assert asked_by(req).positions == positions


@pytest.mark.parametrize(
    ("params", "return_logprob", "asked"),
    [
        ({"max_new_tokens": 0}, False, [-1]),
        ({"max_new_tokens": 0, "custom_params": None}, False, [-1]),
        ({"max_new_tokens": 0, "custom_params": {"of another": 1}}, False, [-1]),
        ({"max_new_tokens": 0, "custom_params": {KEY: [9]}}, False, [9]),
        ({"max_new_tokens": 0, "custom_params": 5}, False, None),
        ({"max_new_tokens": 0}, True, None),
        ({"max_new_tokens": 8}, False, None),
        ({}, False, None),
    ],
)
def test_a_request_that_generates_nothing_asks_for_the_end_of_its_prompt(
    params: dict[str, Any], return_logprob: bool, asked: list[int] | None
) -> None:
    from sglang.srt.managers.io_struct import GenerateReqInput

    obj = GenerateReqInput(input_ids=[[5, 6], [7, 8]], sampling_params=params, return_logprob=return_logprob)
    obj.normalize_batch_and_arguments()
    for each in (obj[0], obj[1]):
        ask_for_end(each)
    custom = [mapping_of(obj[index].sampling_params.get("custom_params")) for index in range(2)]
    assert [each.get(KEY) for each in custom] == [asked, asked]
    assert all(("of another" in each) == ("of another" in mapping_of(params.get("custom_params"))) for each in custom)


def test_only_what_was_asked_for_is_told_as_dropped() -> None:
    req = request_of(50, {KEY: [21, -1]})
    assert on_get_cached_tokens_details(None, None, req) is None
    for depth in (8, 16, 48):
        count_dropped(req, depth, 8)
    assert on_get_cached_tokens_details(None, None, req) == {"device": 0, "host": 0, "marconi_num_without_slot": 2}
    details = {"device": 5, "host": 0}
    assert on_get_cached_tokens_details(details, None, req) == {**details, "marconi_num_without_slot": 2}
    assert details == {"device": 5, "host": 0}


@pytest.mark.parametrize("custom", NO_MAPPINGS)
def test_custom_params_that_are_no_mapping_name_nothing_anywhere(custom: object) -> None:
    """Stock answers them: neither refused, nor planned, nor told of."""
    obj = SimpleNamespace(sampling_params={"custom_params": custom, "max_new_tokens": 0}, return_logprob=False)
    require_hints(obj, 50)
    ask_for_end(obj)
    assert obj.sampling_params["custom_params"] == custom
    responses = object()
    assert around_wait_one_response(lambda *_: responses, MANAGER, obj) is responses
    req = request_of(50, custom)
    count_dropped(req, 50, 1)
    assert on_get_cached_tokens_details(None, None, req) is None


def test_what_was_planned_without_being_named_is_not_told_as_dropped() -> None:
    """Nothing would read the count: an answer counts what was named in `custom_params`."""
    for req in (request_of(50, None), request_of(50, {KEY: [9]})):
        count_dropped(req, 50, 1)
        assert on_get_cached_tokens_details(None, None, req) is None


def test_the_answer_to_a_request_that_was_aborted_while_it_waited_comes_as_it_is() -> None:
    """SGLang's own says no more than this (`TokenizerManager._handle_abort_req`)."""
    aborted = {"text": "", "meta_info": {"id": "1", "finish_reason": {"type": "abort"}, "completion_tokens": 0}}

    async def wait(*_: Any) -> AsyncIterator[dict[str, Any]]:
        yield json.loads(json.dumps(aborted))

    async def answers() -> list[Any]:
        obj = SimpleNamespace(sampling_params={"custom_params": {KEY: [-1]}})
        return [answer async for answer in around_wait_one_response(wait, MANAGER, obj)]

    assert asyncio.run(answers()) == [aborted]


@pytest.mark.parametrize("explain", ["off", "on"])
def test_where_nothing_is_explained_a_request_that_asks_is_told_once_which_flag_turns_it_on(
    explain: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MARCONI_EXPLAIN", explain)

    async def wait(*_: Any) -> AsyncIterator[dict[str, Any]]:
        for reason in (None, {"type": "length"}):
            yield {"meta_info": {"id": "1", "finish_reason": reason, "prompt_tokens": 9}}

    async def told() -> list[Any]:
        obj = SimpleNamespace(sampling_params={"custom_params": {EXPLAIN: True}})
        return [part["meta_info"].get(EXPLAIN) async for part in around_wait_one_response(wait, MANAGER, obj)]

    line = "requests are not explained here: start the server with --marconi-explain on"
    assert asyncio.run(told()) == [None, {"line": line} if explain == "off" else None]


def test_a_decode_server_says_nothing_of_what_another_kept() -> None:
    obj = SimpleNamespace(sampling_params={"custom_params": {KEY: [9]}})
    responses = object()
    assert around_wait_one_response(lambda *_: responses, OF_DECODE, obj) is responses
    assert around_wait_one_response(lambda *_: responses, MANAGER, obj) is not responses


def test_requests_for_embeddings_have_hints_refused_and_are_let_through_without() -> None:
    """They know of no sessions."""
    from sglang.srt.managers.io_struct import EmbeddingReqInput

    manager: Any = SimpleNamespace(
        server_args=SimpleNamespace(radix_cache_backend="marconi"),
        model_config=SimpleNamespace(vocab_size=100),
        context_len=64,
        mm_processor=None,
    )
    obj = EmbeddingReqInput(input_ids=[5, 6, 7])
    obj.normalize_batch_and_arguments()
    refuse_unanswerable(None, manager, obj, [5, 6, 7])
    assert "custom_params" not in obj.sampling_params, "it generates nothing, and asks for no state"
    obj.sampling_params = {"custom_params": {KEY: [4]}}
    with pytest.raises(ValueError, match="from 1 to 3, the prompt's length"):
        refuse_unanswerable(None, manager, obj, [5, 6, 7])
