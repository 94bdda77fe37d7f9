"""Logs of an OpenAI-style API: every shape of a line, times, sessions by growing messages, and the router's ids."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marconi.policy.request import Request, unpack
from marconi.replay.trace import Half, ReadOptions, read, write
from marconi.replay.trace.identity import MAX_ID
from marconi.router.prompts import CHAT, COMPLETIONS
from marconi.router.prompts.reader import TokenizingReader
from router.prompts import folders

Body = Mapping[str, Any]

USER = {"role": "user", "content": "How far is it?"}
BODY = {"model": "m", "messages": [USER]}
SAID = {"role": "assistant", "content": "Not far."}
CHOICES = {"choices": [{"message": SAID}], "created": 1700000009}
CALL = {"id": "c1", "type": "function", "function": {"name": "look_up", "arguments": '{"place": "there"}'}}
TOOL = {
    "type": "function",
    "function": {"name": "look_up", "description": "Looks", "parameters": {"type": "object", "properties": {}}},
}


def jsonl(path: Path, *lines: object) -> Path:
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log.jsonl"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folders.write("qwen", tmp_path_factory.mktemp("model") / "qwen")


def turns(requests: Sequence[Request]) -> list[tuple[int, int]]:
    return [(request.session, request.turn) for request in requests]


# Lines


@pytest.mark.parametrize(
    "line",
    [
        BODY | {"response": CHOICES},
        BODY | {"response": "Not far."},
        BODY | {"output": "Not far."},
        BODY | {"completion": CHOICES, "response": None},
        BODY | {"response": {"choices": [{"text": "Not far."}]}},
        {"custom_id": "1", "method": "POST", "body": BODY, "response": {"status_code": 200, "body": CHOICES}},
        {"request": BODY, "response": CHOICES},
        {"request": "POST /v1/chat/completions", "body": BODY, "response": CHOICES},
        {"body": {"messages": [{"role": "user", "content": [{"type": "text", "text": USER["content"]}]}]}} | {
            "response": {"body": "Not far."}
        },
    ],
    ids=str,
)  # fmt: skip
def test_a_request_and_its_answer_are_found_wherever_they_stand(log: Path, line: Body) -> None:
    (expected,) = read(jsonl(log, BODY | {"response": "Not far."})).requests
    (found,) = read(jsonl(log, line)).requests
    assert found.path == expected.path
    assert (found.num_prompt_tokens, found.num_output_tokens) == (expected.num_prompt_tokens, 4)
    assert found.num_known_tokens == found.num_prompt_tokens + found.num_output_tokens == len(found.path) // 4


@pytest.mark.parametrize(
    ("line", "num_output"),
    [
        (BODY | {"usage": {"completion_tokens": 7}}, 7),
        (BODY | {"response": {"usage": {"completion_tokens": 7}, "choices": []}}, 7),
        ({"body": BODY, "response": {"body": {"usage": {"completion_tokens": 7}}}}, 7),
        (BODY, 0),
    ],
    ids=str,
)
def test_an_answer_that_is_not_there_has_its_length_and_ids_of_its_own(log: Path, line: Body, num_output: int) -> None:
    first, second = read(jsonl(log, line, line)).requests
    prompt = unpack(first.path)[: first.num_prompt_tokens]
    assert unpack(first.path) == [*prompt, *[MAX_ID] * num_output]
    assert unpack(second.path) == [*prompt, *[MAX_ID - 1] * num_output]
    assert first.num_output_tokens == num_output


def test_an_answer_in_a_later_history_has_the_ids_that_it_had_when_it_was_given(log: Path) -> None:
    first, second = read(
        jsonl(log, BODY | {"response": CHOICES}, {"messages": [USER, SAID, USER], "response": CHOICES})
    ).requests
    assert second.path.startswith(first.path)
    assert second.num_prompt_tokens > first.num_known_tokens


def test_calls_of_an_answer_have_the_words_that_they_have_in_a_later_history(log: Path) -> None:
    called = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    result = {"role": "tool", "tool_call_id": "c1", "content": "5 km"}
    first = {"messages": [USER], "tools": [TOOL], "response": {"choices": [{"message": called}]}, "ts": 1}
    second = {"messages": [USER, called, result], "tools": [TOOL], "ts": 2}
    one, other = read(jsonl(log, first, second, {"messages": [USER], "ts": 3})).requests[:2]
    assert other.path.startswith(one.path)
    assert one.num_output_tokens > 4


@pytest.mark.parametrize("prompt", [[5, 6, 7], [MAX_ID]])
def test_a_prompt_of_ids_is_taken_as_it_is(log: Path, prompt: list[int]) -> None:
    (request,) = read(jsonl(log, {"prompt": prompt})).requests
    assert unpack(request.path) == prompt


def test_cache_salts_are_namespaces_in_which_no_chat_continues_anothers(log: Path) -> None:
    again = {"messages": [USER, SAID, USER]}
    lines = [BODY, BODY | {"cache_salt": "a"}, again | {"cache_salt": "b"}, again | {"cache_salt": "a"}, again]
    path = jsonl(log, *(line | {"ts": time} for time, line in enumerate(lines)))
    requests = read(path).requests
    assert [request.namespace for request in requests] == [0, 1, 2, 1, 0]
    assert turns(requests) == [(0, 0), (1, 0), (2, 0), (1, 1), (0, 1)]


BAD = [
    ({}, "messages or prompt must hold what was asked, in the line, its body or its request, got none"),
    ({"messages": []}, "messages or prompt must hold what was asked"),
    ({"messages": "Hi"}, "messages must be array | null, got 'Hi'"),
    ({"messages": [{"role": 5}]}, "messages[0].role must be str, got 5"),
    (
        {"body": {"messages": [{"role": "user", "content": [{"type": "hologram"}]}]}},
        "body.messages[0].content[0]: type must be one of text, input_text, output_text, refusal, image, image_url, "
        "input_image, audio_url, input_audio, video_url, file, input_file, document, thinking, redacted_thinking, "
        "tool_use, tool_result, got 'hologram'",
    ),
    ({"prompt": ["a", "b"]}, "prompt[0] must be int, got 'a'"),
    ({"prompt": [1, -2]}, "prompt[1] must be int >= 0, got -2"),
    (BODY | {"usage": {"completion_tokens": -1}}, "usage.completion_tokens must be int >= 0, got -1"),
    (BODY | {"ts": "soon"}, "ts must be a number or an ISO 8601 date and time, got 'soon'"),
    (BODY | {"ts": -1}, "ts must be from 0 to below 1e+17, got -1.0"),
    (BODY | {"ts": 1.7e18}, "ts must be from 0 to below 1e+17, got 1.7e+18"),
    (BODY | {"tools": [{"type": "web_search"}]}, "tools[0]: function, or name, must say what the tool is, got neither"),
]


@pytest.mark.parametrize(("line", "says"), BAD, ids=str)
def test_a_bad_line_is_named_and_can_be_skipped(log: Path, line: Body, says: str) -> None:
    jsonl(log, BODY | {"ts": 1}, line, BODY | {"ts": 2})
    with pytest.raises(ValueError, match="line 2") as raised:
        read(log)
    assert str(raised.value).startswith(f"{log}, line 2: {says}")
    reports: list[str] = []
    assert [request.arrival_s for request in read(log, on_bad=reports.append).requests] == [0.0, 1.0]
    assert reports == [str(raised.value)]


# Times


@pytest.mark.parametrize("name", ["timestamp", "ts", "time", "created", "created_at", "startTime", "start_time"])
@pytest.mark.parametrize(
    "times",
    [
        (1700000000, 1700000001.5),
        (1700000000000, 1700000001500),
        (1700000000000000, 1700000001500000),
        ("2026-01-02T03:04:05Z", "2026-01-02T03:04:06.500Z"),
        ("2026-01-02T03:04:05", "2026-01-02 04:04:06.5+01:00"),
        (0, 1.5),
    ],
)
def test_a_time_has_any_of_its_names_and_units(log: Path, name: str, times: tuple[float | str, float | str]) -> None:
    early, late = times
    requests = read(jsonl(log, BODY | {name: late, "usage": {"completion_tokens": 3}}, BODY | {name: early})).requests
    assert [request.arrival_s for request in requests] == pytest.approx([0.0, 1.5])
    assert [request.num_output_tokens for request in requests] == [0, 3]


def test_a_lines_own_time_goes_before_its_responses(log: Path) -> None:
    lines = [
        {"body": BODY, "response": CHOICES},
        {"body": BODY, "response": CHOICES, "ts": 1700000001},
        {"body": BODY, "response": {"body": CHOICES}},
    ]
    assert [request.arrival_s for request in read(jsonl(log, *lines)).requests] == [0, 8, 8]


def test_requests_of_one_time_keep_the_order_of_the_file(log: Path) -> None:
    names = [*"abcdbacd" * 5]
    lines = [BODY | {"session_id": name, "ts": 0.7 if index < 39 else 0.1} for index, name in enumerate(names)]
    numbers: dict[str, int] = {}
    expected = [numbers.setdefault(name, len(numbers)) for name in (names[-1], *names[:-1])]
    assert [request.session for request in read(jsonl(log, *lines)).requests] == expected


def test_lines_without_a_time_among_others_are_bad_and_named(log: Path) -> None:
    jsonl(log, BODY, BODY | {"ts": 1}, BODY | {"session_id": "x"})
    with pytest.raises(ValueError, match=r"log\.jsonl, line 1: a time is missing, which other lines have$"):
        read(log)
    reports: list[str] = []
    assert len(read(log, on_bad=reports.append).requests) == 1
    assert [report.partition("jsonl, ")[2][:6] for report in reports] == ["line 1", "line 3"]


def test_without_times_sessions_start_at_the_rate_and_turns_follow_answers(log: Path) -> None:
    growing = [{"messages": [USER, SAID] * turn + [USER], "usage": {"completion_tokens": 500}} for turn in range(3)]
    lines = [line | {"session_id": session} for session in range(200) for line in growing]
    slow, fast = (read(jsonl(log, *lines), ReadOptions(session_rate=rate)).requests for rate in (0.01, 10.0))
    assert slow != fast
    assert read(log) == read(log, ReadOptions(session_rate=1.0))
    starts = [request.arrival_s for request in fast if request.turn == 0]
    assert starts[0] == 0
    assert 10 < starts[-1] < 40
    by_session = sorted(fast, key=lambda request: (request.session, request.turn))
    gaps = [b.arrival_s - a.arrival_s for a, b in pairwise(by_session) if b.turn]
    assert min(gaps) >= 10
    assert 35 < sum(gaps) / len(gaps) < 45


def test_a_session_rate_moves_sessions_and_keeps_their_pauses(log: Path) -> None:
    lines = [BODY | {"session_id": session, "ts": 400 * session + pause} for session in range(3) for pause in (0, 7)]
    requests = read(jsonl(log, *lines), ReadOptions(session_rate=5.0)).requests
    times = {(request.session, request.turn): request.arrival_s for request in requests}
    assert all(times[session, 1] - times[session, 0] == pytest.approx(7) for session in range(3))
    assert times[2, 0] < 100


# Sessions


def chat(*texts: str, system: str | None = None) -> dict[str, Any]:
    messages = [] if system is None else [{"role": "system", "content": system}]
    messages += [{"role": ("user", "assistant")[index % 2], "content": text} for index, text in enumerate(texts)]
    return {"messages": messages}


def sessions(path: Path, *lines: Body) -> list[int]:
    timed = [{"ts": index, **line} for index, line in enumerate(lines)]
    return [request.session for request in read(jsonl(path, *timed)).requests]


def test_a_request_continues_the_one_whose_messages_it_begins_with(log: Path) -> None:
    lines = [chat("a"), chat("b"), chat("a", "x", "c"), chat("b", "y", "c"), chat("a", "x", "c", "z", "d")]
    assert sessions(log, *lines) == [0, 1, 0, 1, 0]


def test_a_system_prompt_alone_makes_no_session(log: Path) -> None:
    lines = [chat("a", system="s"), chat("b", system="s"), chat(system="s"), chat("c", system="s")]
    assert sessions(log, *lines) == [0, 1, 2, 3]


def test_equal_first_requests_are_continued_once_each_the_latest_first(log: Path) -> None:
    after = [chat("a", "x", text) for text in "pqr"]
    assert sessions(log, chat("a"), chat("a"), *after) == [0, 1, 1, 0, 1]


def test_the_longest_beginning_wins_over_a_later_one(log: Path) -> None:
    assert sessions(log, chat("a"), chat("a", "x", "b"), chat("a"), chat("a", "x", "b", "y", "c")) == [0, 0, 1, 0]


def test_reasoning_and_parts_make_no_other_message(log: Path) -> None:
    first = chat("a", "x", "b")
    first["messages"][1] |= {"reasoning_content": "hm", "refusal": None}
    second = chat("a", "x", "b", "y", "c")
    second["messages"][0]["content"] = [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]
    assert sessions(log, first, second) == [0, 0]


def test_other_calls_make_another_message(log: Path) -> None:
    called = [{"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "tool", "content": "5 km"}]
    other = [called[0] | {"tool_calls": [CALL | {"function": {"name": "other"}}]}, called[1]]
    lines: list[Body] = [{"messages": [USER, *called]}, {"messages": [USER, *other, SAID, USER]}]
    assert sessions(log, *lines) == [0, 1]
    assert sessions(log, lines[0], {"messages": [USER, *called, SAID, USER]}) == [0, 0]


@pytest.mark.parametrize("name", ["session_id", "conversation_id", "chat_id"])
def test_a_name_decides_over_what_was_said(log: Path, name: str) -> None:
    lines: list[Body] = [chat("a") | {name: "s"}, {"body": chat("b") | {name: "s"}}, chat("a", "x", "b") | {name: 5}]
    assert sessions(log, *lines) == [0, 0, 1]


def test_sessions_follow_time_and_not_the_file(log: Path) -> None:
    assert sessions(log, chat("a", "x", "b") | {"ts": 9}, chat("a") | {"ts": 1}, chat("b") | {"ts": 5}) == [0, 1, 0]


def test_half_and_max_sessions_are_kept(log: Path) -> None:
    lines = [line | {"ts": index} for index, line in enumerate([chat("a"), chat("b"), chat("b", "x", "c"), chat("c")])]
    jsonl(log, *lines)
    assert turns(read(log, ReadOptions(half=Half.REPORTING)).requests) == [(0, 0), (0, 1)]
    assert turns(read(log, ReadOptions(max_sessions=2)).requests) == [(0, 0), (1, 0), (1, 1)]


@dataclass
class Twin:
    """A request as the definition sees it."""

    said: list[tuple[str, str]]
    session: int
    is_continued: bool = False


def sessions_by_definition(chats: Sequence[Body]) -> list[int]:
    """For each chat, every earlier one is looked at."""
    before: list[Twin] = []
    for lines in chats:
        said = [(message["role"], message["content"]) for message in lines["messages"]]
        beginnings = [
            (len(each.said), not each.is_continued, index)
            for index, each in enumerate(before)
            if len(each.said) < len(said)
            and each.said == said[: len(each.said)]
            and any(role != "system" for role, _ in each.said)
        ]
        session = len({each.session for each in before})
        if beginnings:
            continued = before[max(beginnings)[2]]
            continued.is_continued, session = True, continued.session
        before.append(Twin(said, session))
    return [each.session for each in before]


CHATS = st.lists(
    st.builds(
        lambda texts, system: chat(*texts, system=system),
        st.lists(st.sampled_from("ab"), min_size=1, max_size=5),
        st.sampled_from([None, "s"]),
    ),
    min_size=1,
    max_size=25,
)


@settings(max_examples=60)
@given(chats=CHATS)
def test_sessions_are_those_of_the_definition(tmp_path_factory: pytest.TempPathFactory, chats: list[Body]) -> None:
    assert sessions(tmp_path_factory.mktemp("log") / "log", *chats) == sessions_by_definition(chats)


def test_the_definition_finds_sessions_of_all_kinds() -> None:
    """The control: it tells a continued chat from an equal one and a branch."""
    assert sessions_by_definition([chat("a"), chat("a"), chat("a", "b", "a"), chat("a", "b", "b")]) == [0, 1, 1, 0]


# Tokens of a model

ASKED: list[Body] = [
    {"messages": [{"role": "system", "content": "Be brief."}, USER]},
    {"messages": [USER, SAID, {"role": "user", "content": "größe 中文字符"}]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "It"}, {"type": "text", "text": "here?"}]}]},
    {"messages": [USER], "chat_template_kwargs": {"enable_thinking": False}},
    {"messages": [USER], "tools": [TOOL]},
    {
        "messages": [
            USER,
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": "5 km"},
        ],
        "tools": [TOOL],
    },
]


@pytest.mark.parametrize("body", ASKED, ids=str)
def test_a_prompts_ids_are_the_routers(log: Path, model: Path, body: Body) -> None:
    expected = TokenizingReader.of(model).read(CHAT, body).ids
    assert expected is not None
    for options in (ReadOptions(tokenizer=model), ReadOptions(model_folder=model)):
        (request,) = read(jsonl(log, body), options).requests
        assert unpack(request.path) == list(expected)


def test_a_texts_ids_are_the_routers(log: Path, model: Path) -> None:
    body = {"prompt": "How far is it?"}
    (request,) = read(jsonl(log, body), ReadOptions(tokenizer=model)).requests
    assert unpack(request.path) == list(TokenizingReader.of(model).read(COMPLETIONS, body).ids or ())


def test_parts_are_joined_for_a_template_that_takes_texts_alone(log: Path, tmp_path: Path) -> None:
    folder = folders.write("llama", tmp_path / "llama")
    parts = [{"type": "text", "text": "It"}, {"type": "text", "text": "here?"}]
    both = [{"messages": [{"role": "user", "content": content}]} for content in (parts, "It here?")]
    one, other = read(jsonl(log, *both), ReadOptions(tokenizer=folder)).requests
    assert one.path == other.path


def test_an_answer_has_the_ids_that_the_template_gives_it(log: Path, tmp_path: Path) -> None:
    from marconi_cpu.tiny_model.tokenizer import tokenizer_config, tokenizer_json

    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "tokenizer.json").write_text(tokenizer_json())
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config(4096)))
    path = jsonl(log, BODY | {"response": CHOICES}, {"messages": [USER, SAID, USER], "ts": 1700000099})
    first, second = read(path, ReadOptions(tokenizer=folder)).requests
    assert second.path.startswith(first.path), "the end of the turn is the answer's last token"
    assert first.num_output_tokens == len("Not far.") + 1


def test_what_a_template_refuses_is_a_bad_line(log: Path, tmp_path: Path) -> None:
    folder = folders.write("llama", tmp_path / "llama")
    jsonl(log, {"messages": [USER, USER]})
    with pytest.raises(ValueError, match=r"line 1: messages cannot be rendered by the chat template \(turns\)$"):
        read(log, ReadOptions(tokenizer=folder))


def test_a_tokenizer_without_a_template_is_named_for_chats_only(log: Path, tmp_path: Path) -> None:
    folder = folders.write("llama", tmp_path / "llama")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    assert read(jsonl(log, {"prompt": "Hi"}), ReadOptions(tokenizer=folder)).requests
    jsonl(log, BODY)
    with pytest.raises(ValueError, match=r"line 1: messages need a chat template, and the tokenizer has none$"):
        read(log, ReadOptions(tokenizer=folder))


def test_a_tokenizer_file_counts_its_own_ids_with_plain_roles(log: Path, model: Path) -> None:
    remarks: list[str] = []
    jsonl(log, BODY)
    exact = read(log, ReadOptions(tokenizer=model / "tokenizer.json"), on_remark=remarks.append)
    assert remarks == []
    words = read(log, on_remark=remarks.append)
    assert remarks == [
        "no tokenizer is given: tokens are estimated from bytes, about four a token, and all figures are approximate"
    ]
    assert unpack(exact.requests[0].path) != unpack(words.requests[0].path)


def test_without_transformers_a_line_says_what_to_install(
    log: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    jsonl(log, BODY)
    with pytest.raises(ValueError, match=r"needs transformers, which is not installed: pip install "):
        read(log, ReadOptions(tokenizer=model))


@pytest.mark.parametrize("name", ["no/where/here", "nowhere"])
def test_a_name_that_is_no_folder_and_no_models_is_refused(log: Path, name: str) -> None:
    jsonl(log, BODY)
    with pytest.raises(ValueError, match=f"^--tokenizer must be a model's folder or a hub name, got '{name}'$"):
        read(log, ReadOptions(tokenizer=Path(name)))


def test_a_hub_name_is_the_folder_that_the_hub_gives(log: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("marconi.chat.folder.snapshot_download", lambda name, **_: {"some/model": str(model)}[name])
    jsonl(log, BODY)
    found = read(log, ReadOptions(tokenizer=Path("some/model"))).requests
    assert found == read(log, ReadOptions(tokenizer=model)).requests


def test_other_formats_of_text_take_a_models_folder(log: Path, model: Path) -> None:
    line = {"timestamp": 5, "input": "How far", "output": " is it?", "session_id": "s"}
    (request,) = read(jsonl(log, line), ReadOptions(tokenizer=model)).requests
    (same,) = read(log, ReadOptions(tokenizer=model / "tokenizer.json")).requests
    assert request.path == same.path


def test_a_folder_of_logs_is_one_log(tmp_path: Path, log: Path) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    jsonl(folder / "1.jsonl", BODY | {"ts": 5})
    jsonl(folder / "2.jsonl", {"messages": [USER, SAID, USER], "ts": 9}, BODY | {"ts": 1})
    assert turns(read(folder).requests) == [(0, 0), (1, 0), (1, 1)]


def test_a_log_that_was_written_as_token_ids_is_the_same_trace(tmp_path: Path, log: Path) -> None:
    lines = [chat("a"), chat("b") | {"cache_salt": "x"}, chat("a", "x", "c") | {"usage": {"completion_tokens": 9}}]
    trace = read(jsonl(log, *({"ts": index, **line} for index, line in enumerate(lines))))
    write(trace, tmp_path / "trace", "artifact")
    assert read(tmp_path / "trace").requests == trace.requests
