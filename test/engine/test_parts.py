"""The part of a chat in which its prompt diverged, in an explanation and in the list, on SGLang's own requests."""

import asyncio
import json
import pickle
from collections.abc import AsyncIterator
from itertools import takewhile
from operator import eq
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from marconi.chat.parts import PromptPart
from marconi.engine.http import parts
from marconi.engine.http.hints import around_wait_one_response
from marconi.engine.http.parts import MAX_KEPT_BYTES, Chats, KeptChat, add_parts, with_part
from marconi.engine.reports.explain import EXPLAIN, MAX_LATEST

from .test_cache_control import ANTHROPIC, CHAT, CHATML, Chat
from .test_system_prompt import IMAGE, WITH_IMAGES

DATED = ["Be kind. Today is 2026-11-30.", "Be kind. Today is 2026-12-01."]
SAYS = "hit 5 of {num_prompt:,}; {num_missed:,}: diverged at token {position:,}, no state kept; 1: last token"


def turns(system: str = DATED[0], question: str = "What is a state?", **of_question: Any) -> dict[str, Any]:
    """A body with a system prompt and three messages."""
    beside = [{"role": "assistant", "content": "It depends."}, {"role": "user", "content": "On what?"}]
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question, **of_question}, *beside]
    return {"model": "m", "messages": messages}


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}


def server(models: dict[str, Path], template: str = CHATML, page_size: int = 1) -> Chat:
    chat = Chat(models["gdn"], template)
    chat.tokenizer_manager.server_args.page_size = page_size
    chat.tokenizer_manager.disaggregation_mode = SimpleNamespace(value="null")
    return chat


def explanation(position: int, num_prompt_tokens: int) -> dict[str, Any]:
    """What a scheduler says of a prompt that diverged there."""
    missed = [
        {"cause": "no_state", "start": 5, "end": position},
        {"cause": "first_seen", "start": position, "end": num_prompt_tokens - 1},
    ]
    line = SAYS.format(num_prompt=num_prompt_tokens, num_missed=position - 5, position=position)
    return {"num_prompt_tokens": num_prompt_tokens, "num_hit_tokens": 5, "line": line, "missed": missed}


def answered(chat: Chat, obj: Any, said: dict[str, Any], rid: str = "r") -> dict[str, Any]:
    """The explanation in an answer, through the hook around it."""
    obj.rid = rid
    obj.sampling_params["custom_params"] = {EXPLAIN: True}

    async def wait(*_: Any) -> AsyncIterator[dict[str, Any]]:
        yield {"meta_info": {"id": rid, "cached_tokens_details": {EXPLAIN: json.dumps(said)}}}

    async def answer() -> dict[str, Any]:
        (only,) = [each async for each in around_wait_one_response(wait, chat.tokenizer_manager, obj)]
        explained: dict[str, Any] = only["meta_info"][EXPLAIN]
        return explained

    return asyncio.run(answer())


def diverged(chat: Chat, known: dict[str, Any], prompt: dict[str, Any], path: str = CHAT) -> dict[str, Any]:
    """The explanation of a `prompt` after a `known` one, both as bodies."""
    first, second = chat.adapted(known, path), chat.adapted(prompt, path)
    position = sum(1 for _ in takewhile(bool, map(eq, first.input_ids, second.input_ids)))
    page = chat.tokenizer_manager.server_args.page_size
    return answered(chat, second, explanation(position // page * page, len(second.input_ids)))


SYSTEM, USER, NAMED = (
    {"where": "system"},
    {"where": "messages[1]", "role": "user"},
    {"where": "tools", "tool": "search"},
)


@pytest.mark.parametrize(
    ("known", "prompt", "part"),
    [
        (turns(DATED[0]), turns(DATED[1]), {**SYSTEM, "kind": "date"}),
        (turns(question="Is 17 prime?"), turns(question="Is 27 prime?"), {**USER, "kind": "number"}),
        (turns(), turns(question="Why is a state?"), USER),
        (turns() | {"tools": [tool("find")]}, turns() | {"tools": [tool("search")]}, NAMED),
        (turns(), turns() | {"tools": [tool("search")]}, {"where": "template"}),
    ],
    ids=["date", "number", "message", "tool", "tools added"],
)
def test_an_answer_names_the_part(
    models: dict[str, Path], known: dict[str, Any], prompt: dict[str, Any], part: dict[str, str]
) -> None:
    chat = server(models)
    told = diverged(chat, known, prompt)
    assert told["part"] == part
    words = PromptPart(part["where"], part.get("role", part.get("tool")), part.get("kind")).describe()
    assert f", in {words}, no state kept; 1: last token" in told["line"]
    assert "2026" not in json.dumps(told["part"]), "never a text"


def test_a_chat_of_anthropics_route_is_named_as_sglang_converts_it(models: dict[str, Path]) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "At 09:30?"}]}]
    known = {"system": "Be kind.", "messages": messages}
    other = {"system": "Be kind.", "messages": [{"role": "user", "content": [{"type": "text", "text": "At 10:31?"}]}]}
    told = diverged(server(models), known, other, ANTHROPIC)
    assert told["part"] == {**USER, "kind": "date"}


def test_a_page_is_named_if_it_lies_in_one_part_and_no_field_of_it_is(models: dict[str, Path]) -> None:
    system = "A rule that is long enough for a page of its own. " * 2
    chat = server(models, page_size=8)
    told = diverged(chat, turns(f"{system}7. {system}"), turns(f"{system}8. {system}"))
    assert told["part"] == SYSTEM
    assert "part" not in diverged(chat, turns("Be kind.", "One?"), turns("Be kind.", "Two?")), "a page of several parts"


def with_image(question: str, number: int = 2) -> dict[str, Any]:
    body = turns(question="")
    body["messages"][1]["content"] = [{"type": "text", "text": "See: "}, IMAGE, {"type": "text", "text": question}]
    body["messages"][3]["content"] = f"On {number}?"
    return body


@pytest.mark.parametrize(
    ("text", "num_beyond", "part"),
    [
        ("kind", 0, SYSTEM),
        ("<s>", 0, {**USER, "kind": "image"}),
        ("<s>", 40, {**USER, "kind": "image"}),
        ("2?", 99, {"where": "messages[3]", "role": "user", "kind": "number"}),
    ],
    ids=["before", "at it", "in it", "behind"],
)
def test_an_image_is_named_and_so_is_the_text_on_both_sides_of_it(
    models: dict[str, Path], text: str, num_beyond: int, part: dict[str, str]
) -> None:
    """The prompt has 99 tokens more than its text: those of an image but the first."""
    chat = server(models, WITH_IMAGES)
    obj = chat.adapted(with_image("What is it?"))
    ids = chat.ids(obj.text)
    position = len(chat.ids(obj.text[: obj.text.rindex(text)])) + num_beyond
    assert answered(chat, obj, explanation(position, len(ids) + 99))["part"] == part


def test_the_list_names_the_parts_of_chats_that_did_not_ask(models: dict[str, Path]) -> None:
    chat = server(models)
    manager = chat.tokenizer_manager
    lines = []
    for number in range(2):
        obj = chat.adapted(turns(DATED[number]))
        obj.rid = f"chat-{number}"
        around_wait_one_response(lambda *_: None, manager, obj)
        position = len(chat.ids(chat.tokenizer.decode(obj.input_ids).split("2026")[0])) + 5
        lines.append(explanation(position, len(obj.input_ids)) | {"rid": obj.rid})
    listed = [*lines, explanation(9, 20) | {"rid": "a completion"}]
    add_parts(listed, manager)
    assert [each.get("part") for each in listed] == [{**SYSTEM, "kind": "date"}] * 2 + [None]
    before = chat.num_rendered
    add_parts([dict(line) for line in lines], manager)
    assert chat.num_rendered == before, "each is rendered once"


@pytest.mark.parametrize(
    ("known", "prompt", "told"),
    [
        (turns(DATED[0]), turns(DATED[1]), ("system", {**SYSTEM, "kind": "date"}, "into the last message")),
        (turns(), turns("Be short."), ("system", SYSTEM, "keep the system prompt")),
        (turns(), turns(question="Is 27 prime?"), ("messages", USER, "append to a conversation")),
        (turns(), turns() | {"tools": [tool("find")]}, ("tools", {"where": "template"}, "give all tools")),
        (turns(), turns() | {"model": "n"}, ("model", None, "another model")),
        (turns(), turns(), ("nothing", None, None)),
        (turns(), {**turns(), "messages": [*turns()["messages"], {"role": "assistant", "content": "On it."}]}, None),
    ],
    ids=["date", "system", "message", "tools", "model", "nothing", "more"],
)
def test_a_chat_that_names_an_earlier_one_is_told_what_has_changed(
    models: dict[str, Path], known: dict[str, Any], prompt: dict[str, Any], told: tuple[Any, ...] | None
) -> None:
    changed, part, hint = told or ("more", None, None)
    chat = server(models)
    first, second = chat.adapted(known), chat.adapted(prompt | {"comparison_response_id": "first"})
    answered(chat, first, explanation(9, 20), "first")
    assert second.sampling_params["custom_params"][EXPLAIN] is True, "it need not ask"
    said = answered(chat, second, explanation(9, len(second.input_ids)), "second")
    since = said["since"]
    assert (since["request"], since["changed"], since.get("part")) == ("first", changed, part)
    assert (hint is None and "hint" not in since) or hint in since["hint"]
    same = sum(1 for _ in takewhile(bool, map(eq, first.input_ids, second.input_ids)))
    assert since["num_common_tokens"] == same
    assert said["line"].partition("; since first: ")[2]


def test_a_request_that_is_not_kept_any_more_is_said_to_be_so(models: dict[str, Path]) -> None:
    chat = server(models)
    obj = chat.adapted(turns() | {"comparison_response_id": "gone"})
    said = answered(chat, obj, explanation(9, 20))
    assert said["since"] == {"request": "gone", "changed": "not kept"}
    assert said["line"].endswith("; since gone: that request is not kept")
    listed = [explanation(9, 20) | {"rid": "r"}]
    parts.add_since_to(listed, chat.tokenizer_manager, "r", "r")
    assert listed[0]["since"]["changed"] == "not kept", "nothing has changed since itself"


def test_a_list_compares_no_more_than_its_bound_at_a_time(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "MAX_NAMED_TOKENS", 1)
    chat = server(models)
    for rid in "ab":
        answered(chat, chat.adapted(turns()), explanation(9, 20), rid)
    listed = [explanation(9, 20) | {"rid": rid} for rid in "ba"]
    parts.add_since_to(listed, chat.tokenizer_manager, "", "a")
    assert ["since" in each for each in listed] == [True, False]


def test_a_list_renders_no_more_than_its_bound_at_a_time(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "MAX_NAMED_TOKENS", 1)
    chat = server(models)
    said = []
    for rid in "ab":
        obj = chat.adapted(turns())
        obj.rid = rid
        around_wait_one_response(lambda *_: None, chat.tokenizer_manager, obj)
        said.append(explanation(9, len(obj.input_ids)) | {"rid": rid})
    for names in (["a"], ["a", "b"]):
        asked = [dict(each) for each in said]
        add_parts(asked, chat.tokenizer_manager)
        assert [each["rid"] for each in asked if "part" in each] == names


def test_nothing_is_kept_where_nothing_is_explained(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MARCONI_EXPLAIN", "off")
    chat = server(models)
    obj = chat.adapted(turns())
    before = chat.num_rendered
    assert "part" not in answered(chat, obj, explanation(9, len(obj.input_ids)))
    assert chat.num_rendered == before
    assert vars(chat.tokenizer_manager)["marconi_chats"] is None


def test_a_template_that_refuses_what_is_marked_costs_the_part_alone(models: dict[str, Path]) -> None:
    strict = "{% if messages[0]['content'] != 'Be kind.' %}{{ raise_exception('no') }}{% endif %}" + CHATML
    told = diverged(server(models, strict), turns("Be kind.", "One?"), turns("Be kind.", "Two?"))
    assert "part" not in told
    assert told["line"].endswith("no state kept; 1: last token")


def test_a_prompt_that_is_known_or_new_as_a_whole_has_no_part(models: dict[str, Path]) -> None:
    chat = server(models)
    obj = chat.adapted(turns())
    whole = explanation(9, len(obj.input_ids))
    known = whole | {"missed": [{"cause": "last_token", "start": 9, "end": 10}]}
    new = whole | {"missed": [{"cause": "first_seen", "start": 0, "end": 10}]}
    assert not any("part" in answered(chat, obj, said) for said in (known, new))
    assert "part" in answered(chat, obj, whole), "the control"


def test_sglang_may_still_write_its_object_to_a_file(models: dict[str, Path]) -> None:
    obj = server(models).adapted(turns())
    assert pickle.loads(pickle.dumps(vars(obj)))["marconi_chat"] == 0  # noqa: S301


def test_the_oldest_chats_are_dropped_beyond_their_number_and_their_bytes() -> None:
    chats = Chats()
    first, *_, last = (chats.keep(KeptChat(None, None, 1)) for _ in range(MAX_LATEST + 1))
    assert (chats.get(first), chats.get(last) is None) == (None, False)
    large = chats.keep(KeptChat(None, None, MAX_KEPT_BYTES))
    assert (chats.get(last), chats.get(large) is None) == (None, False)
    assert chats.get(chats.keep(KeptChat(None, None, MAX_KEPT_BYTES + 1))) is None
    assert chats.get(chats.keep(KeptChat(None, None, 1))) is not None


def test_a_line_that_names_no_position_says_the_part_at_its_end() -> None:
    line = "hit 200 of 300; 99: first seen; 1: last token"
    assert with_part(line, 200, PromptPart("tools", "find")) == f"{line}; diverged at token 200, in tools (find)"
