"""A log is never read as less than was sent: each shape of an API's log, in two dresses; what is left out is said."""

import json
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

from marconi.policy.request import Request, unpack
from marconi.replay.trace import ReadOptions, read
from marconi.replay.trace.identity import MAX_ID
from router.prompts import folders

Body = Mapping[str, Any]

ASKED = {"role": "user", "content": "Name a tree."}
SHOWN = {"role": "assistant", "content": "An oak is a tree."}
NEXT = {"messages": [ASKED, SHOWN, {"role": "user", "content": "Another."}], "ts": 9}
THOUGHT = "Oaks, elms and pines are trees, and any of them would do for an answer here."


def jsonl(path: Path, *lines: object) -> Path:
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def requests_of(path: Path, *lines: object) -> tuple[Sequence[Request], list[str]]:
    remarks: list[str] = []
    return read(jsonl(path, *lines), on_remark=remarks.append).requests, remarks[1:]


def num_shared(one: Request, other: Request) -> int:
    pairs = zip(unpack(one.path), unpack(other.path), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log.jsonl"


# Thinking


def thought(message: Body, num_tokens: int | None = 40) -> dict[str, Any]:
    usage = {} if num_tokens is None else {"usage": {"completion_tokens": num_tokens}}
    return {"messages": [ASKED], "ts": 1, "response": {"choices": [{"message": message}], **usage}}


@pytest.mark.parametrize("num_tokens", [None, 40])
@pytest.mark.parametrize(
    "dress",
    [
        {"reasoning": THOUGHT},
        {"reasoning": THOUGHT, "reasoning_details": [{"type": "reasoning.text", "text": THOUGHT}]},
        {"reasoning_details": [{"type": "reasoning.text", "text": THOUGHT}]},
        {"content": [{"type": "thinking", "thinking": THOUGHT}, {"type": "text", "text": SHOWN["content"]}]},
    ],
    ids=str,
)
def test_thinking_is_read_alike_by_whatever_name(log: Path, dress: Body, num_tokens: int | None) -> None:
    (one, after), _ = requests_of(log, thought(SHOWN | {"reasoning_content": THOUGHT}, num_tokens), NEXT)
    (other, _), _ = requests_of(log, thought(SHOWN | dress, num_tokens), NEXT)
    assert other.path == one.path
    assert num_shared(one, after) == one.num_prompt_tokens, "the next prompt lacks the thinking"


@pytest.mark.parametrize("told", ["answer", "next message"])
def test_what_the_server_counted_beyond_the_visible_answer_is_thinking(log: Path, told: str) -> None:
    first = thought(SHOWN) if told == "answer" else {"messages": [ASKED], "ts": 1, "usage": {"completion_tokens": 40}}
    (one, after), _ = requests_of(log, first, NEXT)
    (plain, _), _ = requests_of(log, thought(SHOWN, None), NEXT)
    answer = unpack(one.path)[one.num_prompt_tokens :]
    num_hidden = 40 - plain.num_output_tokens
    assert (one.num_output_tokens, len(answer)) == (40, 40)
    assert len(set(answer[:num_hidden])) == 1
    assert answer[0] > MAX_ID - 2
    assert answer[num_hidden:] == unpack(plain.path)[plain.num_prompt_tokens :]
    assert num_shared(one, after) == one.num_prompt_tokens


def test_control_an_answer_as_long_as_was_counted_is_resumed_from(log: Path) -> None:
    (plain, after), _ = requests_of(log, thought(SHOWN, None), NEXT)
    for num_tokens in (1, plain.num_output_tokens, plain.num_output_tokens + 1):
        (one, _), _ = requests_of(log, thought(SHOWN, num_tokens), NEXT)
        assert one.path == plain.path
    assert num_shared(plain, after) == len(plain.path) // 4


def test_thinking_that_a_template_leaves_out_is_an_answers_tokens(log: Path, tmp_path: Path) -> None:
    options = ReadOptions(tokenizer=folders.write("llama", tmp_path / "llama"))
    path = jsonl(log, thought(SHOWN | {"reasoning": THOUGHT}, None), thought(SHOWN, None))
    one, other = read(path, options).requests
    assert one.num_output_tokens > other.num_output_tokens + 10


# Anthropic's shapes

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}


def test_a_system_prompt_beside_the_messages_is_read(log: Path) -> None:
    system = "Answer as a botanist would."
    told = {"messages": [{"role": "system", "content": system}, ASKED], "ts": 1}
    beside = {"messages": [ASKED], "ts": 1}
    texts = [{"type": "text", "text": system, "cache_control": {"type": "ephemeral"}}]
    requests, _ = requests_of(log, told, *(beside | {"system": each} for each in (system, texts)))
    assert len({request.path for request in requests}) == 1
    (inner,), _ = requests_of(log, {"request": beside | {"system": system}})
    assert inner.num_prompt_tokens == requests[0].num_prompt_tokens


def test_blocks_of_tools_are_what_the_other_api_has_for_them(log: Path) -> None:
    used = [
        {"type": "thinking", "thinking": THOUGHT, "signature": "s"},
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "id": "c", "name": "look_up", "input": {"city": "Bonn"}},
    ]
    result = [
        {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "5 km"}]},
        {"type": "text", "text": "And?"},
    ]
    call = {"id": "c", "type": "function", "function": {"name": "look_up", "arguments": {"city": "Bonn"}}}
    called = {"role": "assistant", "content": [{"type": "text", "text": "I look."}], "tool_calls": [call]}
    theirs = {
        "messages": [ASKED, {"role": "assistant", "content": used}, {"role": "user", "content": result}],
        "tools": [{"name": "look_up", "description": "Looks", "input_schema": SCHEMA}],
        "response": {"type": "message", "content": used, "usage": {"input_tokens": 30, "output_tokens": 5}},
    }
    ours = {
        "messages": [
            *(ASKED, called, {"role": "tool", "tool_call_id": "c", "content": "5 km"}),
            {"role": "user", "content": "And?"},
        ],
        "tools": [{"function": {"name": "look_up", "description": "Looks", "parameters": SCHEMA}}],
        "response": {"choices": [{"message": called | {"reasoning_content": THOUGHT}}]},
    }
    (one, other), remarks = requests_of(log, theirs, ours)
    assert one.path == other.path
    assert one.num_output_tokens > 20
    assert remarks == []


def test_a_prompt_much_shorter_than_the_server_counted_is_said(log: Path) -> None:
    counted = {"response": {"content": [], "usage": {"input_tokens": 4, "cache_read_input_tokens": 400}}}
    _, remarks = requests_of(log, {"messages": [ASKED]} | counted, {"messages": [ASKED]})
    assert remarks == [
        f"the server counted many more tokens of the prompt than the line holds: 1 record ({log}, line 1)"
    ]


# Calls cut off, failed or of embeddings


@pytest.mark.parametrize("arguments", ['{"city": "Bo', '{"city": ["Bonn"'])
@pytest.mark.parametrize("model", [None, "qwen"])
def test_a_call_cut_off_is_an_answer_of_its_counted_length(
    log: Path, tmp_path: Path, model: str | None, arguments: str
) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "look_up", "arguments": arguments}}
    line = thought({"content": None, "tool_calls": [call]}, 12)
    jsonl(log, line, {"messages": [ASKED], "ts": 2})
    folder = None if model is None else folders.write(model, tmp_path / model)
    one, other = read(log, ReadOptions(tokenizer=folder)).requests
    assert one.num_output_tokens == 12
    assert set(unpack(one.path)[one.num_prompt_tokens :]) == {MAX_ID}
    assert one.num_prompt_tokens == other.num_prompt_tokens > 0


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ({"messages": [ASKED], "status": "failure", "response": {}, "error_str": "429"}, "a failed call"),
        ({"body": {"messages": [ASKED]}, "response": {"status_code": 500, "body": {}}}, "a failed call"),
        ({"messages": [ASKED], "response": {"error": {"code": 500}}}, "a failed call"),
        ({"messages": [ASKED], "call_type": "aembedding", "response": {}}, "an embedding call"),
        ({"url": "/v1/embeddings", "body": {"input": "a text"}}, "an embedding call"),
        (
            {"input": ["a"], "messages": "a", "response": {"object": "list", "data": [{"embedding": [0.5]}]}},
            "an embedding call",
        ),
    ],
    ids=str,
)
def test_a_call_that_took_no_prompt_is_left_out_and_counted(log: Path, line: Body, kind: str) -> None:
    good = {"messages": [ASKED], "status": "success", "status_code": 200, "error": None, "response": "An oak."}
    requests, remarks = requests_of(log, line, good, line)
    assert len(requests) == 1
    assert remarks == [f"left out, {kind}: 2 records ({log}, line 1; {log}, line 3)"]


def test_an_answer_of_an_unknown_shape_is_said(log: Path) -> None:
    requests, remarks = requests_of(log, {"messages": [ASKED], "response": {"generations": ["An oak."]}})
    assert len(requests) == 1
    assert remarks == [f"the answer has no shape that is known, and counts as none: 1 record ({log}, line 1)"]


# Times


def test_times_of_a_load_generator_are_milliseconds(log: Path) -> None:
    lines = [{"messages": [ASKED], "timestamp": time, "output_length": 5} for time in (0, 1500, 90000.5)]
    requests, _ = requests_of(log, *lines)
    assert [request.arrival_s for request in requests] == pytest.approx([0, 1.5, 90.0005])


@pytest.mark.parametrize(("unit", "last_s"), [("s", 4000), ("ms", 4), ("us", 0.004)])
def test_the_unit_of_times_that_are_no_clocks_is_asked_for(log: Path, unit: Any, last_s: float) -> None:
    jsonl(log, *({"messages": [ASKED], "ts": time} for time in (0, 4000)))
    with pytest.raises(ValueError, match=r"^--time-unit must say whether times from 0 to 4000, .* are in s, ms or us$"):
        read(log)
    assert read(log, ReadOptions(time_unit=unit)).requests[1].arrival_s == pytest.approx(last_s)


# Sound JSON of another shape


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        (json.dumps({"messages": [ASKED]}, indent=1), r"an object over several lines: `jq -c \.`"),
        (json.dumps({"messages": [ASKED]}, indent=1) * 2, r"an object over several lines: `jq -c \.`"),
        (json.dumps([{"messages": [ASKED]}] * 2), r"one array: `jq -c \.\[\]`"),
    ],
)
@pytest.mark.parametrize("skips", [False, True])
def test_sound_json_of_another_shape_is_called_so(log: Path, text: str, shape: str, skips: bool) -> None:
    log.write_text(text)
    with pytest.raises(ValueError, match=f"^{log}: must be one JSON object a line, got sound JSON .*, {shape}"):
        read(log, on_bad=[].append if skips else None)


# Media


def seen(*urls: str) -> dict[str, Any]:
    images = [{"type": "image_url", "image_url": {"url": url, "detail": "low"}} for url in urls]
    return {"messages": [{"role": "user", "content": [{"type": "text", "text": "Look."}, *images]}]}


def test_an_image_is_tokens_that_equal_images_have_alike(log: Path) -> None:
    (one, same, other, none), remarks = requests_of(log, seen("x:a"), seen("x:a"), seen("x:b"), seen())
    assert one.path == same.path
    assert one.path != other.path
    assert one.num_prompt_tokens - none.num_prompt_tokens in range(256, 262)
    assert num_shared(one, other) < 20
    assert remarks == [
        "an image, sound or file stands for 256 tokens, for want of the model's own number: 3 records "
        f"({log}, line 1; {log}, line 2; {log}, line 3)"
    ]


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}},
        {"type": "input_audio", "input_audio": {"data": "aGk=", "format": "wav"}},
        {"type": "video_url", "video_url": {"url": "x:v"}},
        {"type": "document", "source": {"type": "url", "url": "x:d"}},
        {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "image", "source": {"data": "aGk="}}]},
    ],
    ids=str,
)
def test_other_media_are_tokens_as_well(log: Path, part: Body) -> None:
    (request,), remarks = requests_of(log, {"messages": [{"role": "user", "content": [part]}]})
    assert request.num_prompt_tokens > 256
    assert len(remarks) == 1


@pytest.mark.parametrize(
    ("config", "num_tokens"),
    [
        ({"mm_tokens_per_image": 60}, 60),
        ({"vision_config": {"image_size": 336, "patch_size": 14}}, 576),
        ({"vision_config": {"image_size": 448, "patch_size": 14, "spatial_merge_size": 2}}, 256),
    ],
)
def test_an_image_has_the_models_number_of_tokens(log: Path, tmp_path: Path, config: Body, num_tokens: int) -> None:
    folder = folders.write("qwen", tmp_path / "qwen")
    (folder / "config.json").write_text(json.dumps(config))
    jsonl(log, seen("x:a"), seen("x:b", "x:a"))
    one, two = read(log, ReadOptions(model_folder=folder)).requests
    assert sum(1 for each in unpack(one.path) if each >= 2**31) == num_tokens
    assert two.num_prompt_tokens - one.num_prompt_tokens in range(num_tokens, num_tokens + 3)


# Estimates


@pytest.mark.parametrize(
    "text",
    [
        "The oldest of the trees that stand along the river were planted by people whose names nobody remembers. " * 9,
        "".join(f"{index * 7919**5:x}" for index in range(90)),
        "古い木は川のそばに立っている" * 20,
    ],
)
def test_without_a_tokenizer_tokens_are_estimated_from_bytes(log: Path, text: str) -> None:
    (request,), _ = requests_of(log, {"prompt": text})
    assert 0.75 < request.num_prompt_tokens / (len(text.encode()) / 4) < 1.25


def test_a_models_folder_without_a_tokenizer_is_refused(log: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    jsonl(log, {"messages": [ASKED]})
    with pytest.raises(ValueError, match=f"^--model must be a folder with a tokenizer .*, got {tmp_path} without one"):
        read(log, ReadOptions(model_folder=tmp_path))
