"""The part in which an edit lies is named: of 200 drawn edits on three templates, 98 in 100 at least."""

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import takewhile
from operator import eq
from typing import Any

import pytest

from marconi.chat.parts import PromptPart, PromptParts, kind_of

from .templates import TEMPLATES, render

NUM_EDITS = 200
LEAST_SHARE = 0.98
_TOKEN = re.compile(r"<\|[^|]*\|>| ?[A-Za-z]+|\d{1,3}|[^\S\n]+|\n+|[^\sA-Za-z\d]+?")
"""Cuts a text nearly as the tokenizers of large models do."""
_WORDS = (
    *("cache", "state", "prefix", "branch", "token", "model", "answer", "latency", "request", "memory", "kernel"),
    *("table", "chunk", "worker", "queue", "page", "ledger"),
)
_DATES: tuple[Callable[[random.Random], str], ...] = (
    lambda rng: f"2026-{rng.randint(1, 12):02}-{rng.randint(10, 28)}",
    lambda rng: f"2026-11-30T{rng.randint(10, 23)}:{rng.randint(10, 59)}:07Z",
    lambda rng: f"{rng.randint(10, 28)} {rng.choice(('Nov', 'December', 'June'))} 2026",
    lambda rng: f"{rng.choice(('Monday', 'Friday', 'Sunday'))}, {rng.randint(10, 23)}:{rng.randint(10, 59)}",
    lambda rng: f"{rng.choice(('March', 'May', 'August'))} {rng.randint(10, 28)}, 2026",
)


@dataclass(frozen=True)
class Drawn:
    """A chat, each of whose images has its own content."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    effort: str | None
    images: list[int] = field(default_factory=list)
    """The contents of the images, in the order of the prompt."""

    def text(self, template: str) -> str:
        return render(template, self.messages, self.tools, self.effort)

    def tokens(self, template: str) -> list[str]:
        contents = iter(self.images)
        texts = _TOKEN.findall(self.text(template))
        return [f"{text}{next(contents)}" if text == "<|image|>" else text for text in texts]


@dataclass(frozen=True)
class Edit:
    """A chat that the cache knows, a prompt that differs in one field, and where that is."""

    template: str
    known: Drawn
    prompt: Drawn
    part: PromptPart


def sentence(rng: random.Random) -> str:
    return " ".join(rng.choices(_WORDS, k=rng.randint(4, 12))).capitalize() + "."


def text_with(rng: random.Random, value: str) -> str:
    return f"{sentence(rng)} It is {value}, so much. {sentence(rng)}"


def tool_of(rng: random.Random, name: str) -> dict[str, Any]:
    names = rng.sample(_WORDS, 2)
    properties = {
        names[0]: {"type": "string", "description": sentence(rng), "enum": rng.sample(_WORDS, 3)},
        names[1]: {"type": "integer", "maximum": rng.randint(2, 90)},
    }
    parameters = {"type": "object", "properties": properties, "required": names}
    function = {"description": sentence(rng), "name": name, "parameters": parameters}
    return {"type": "function", "function": function}


def call_of(rng: random.Random, name: str) -> dict[str, Any]:
    arguments = json.dumps({"query": sentence(rng), "limit": rng.randint(100, 999)})
    return {"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}


def drawn(rng: random.Random) -> Drawn:
    """A chat of three to six turns, some with calls and images."""
    tools = [tool_of(rng, f"{name}_tool") for name in rng.sample(_WORDS, rng.randint(0, 4))]
    messages: list[dict[str, Any]] = [{"role": "system", "content": text_with(rng, "nothing")}]
    images = []
    for _ in range(rng.randint(3, 6)):
        content: Any = f"{sentence(rng)}{rng.choice(('', ' ', chr(10)))}"
        if rng.random() < 0.3:
            images.append(rng.randint(0, 99))
            content = [{"type": "image_url", "image_url": {"url": "u"}}, {"type": "text", "text": content}]
        messages.append({"role": "user", "content": content})
        if tools and rng.random() < 0.5:
            call = call_of(rng, tools[0]["function"]["name"])
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
            messages.append({"role": "tool", "content": sentence(rng), "tool_call_id": "1"})
        thought = f"<think>\n{sentence(rng)}\n</think>\n\n" if rng.random() < 0.5 else ""
        messages.append({"role": "assistant", "content": f"{thought}{sentence(rng)}"})
    messages.append({"role": "user", "content": sentence(rng)})
    return Drawn(messages, tools, "low", images)


def with_text(chat: Drawn, index: int, text: str) -> Drawn:
    """The same chat with another text of one message, behind its images."""
    message = chat.messages[index]
    content: Any = text
    if isinstance(message["content"], list):
        content = [*message["content"][:-1], {"type": "text", "text": text}]
    return replace(
        chat, messages=[*chat.messages[:index], {**message, "content": content}, *chat.messages[index + 1 :]]
    )


def part_of(chat: Drawn, index: int, kind: str | None) -> PromptPart:
    return (
        PromptPart(f"messages[{index}]", chat.messages[index]["role"], kind)
        if index
        else PromptPart("system", None, kind)
    )


def edited_text(rng: random.Random, chat: Drawn, kind: str) -> tuple[Drawn, Drawn, PromptPart]:
    """Another date, number or sentence in a message."""
    index = rng.choice([number for number, each in enumerate(chat.messages) if each["content"]])
    if kind == "message":
        return with_text(chat, index, sentence(rng)), with_text(chat, index, sentence(rng)), part_of(chat, index, None)
    date = rng.choice(_DATES)
    values = (date(rng), date(rng)) if kind == "date" else (str(rng.randint(7, 99_999)), f"{rng.randint(7, 99_999):,}")
    state = rng.getstate()
    known, prompt = (with_text(chat, index, _again(rng, state, value)) for value in values)
    return known, prompt, part_of(chat, index, kind)


def _again(rng: random.Random, state: Any, value: str) -> str:
    rng.setstate(state)
    return text_with(rng, value)


def edited_tool(rng: random.Random, chat: Drawn) -> tuple[Drawn, Drawn, PromptPart]:
    """Another tool in a tool's place, or one whose description, name or limits differ."""
    chat = replace(chat, tools=chat.tools or [tool_of(rng, "only_tool")])
    index = rng.randrange(len(chat.tools))
    function = chat.tools[index]["function"]
    maximum = json.loads(json.dumps(function["parameters"]))
    (*_, limits) = maximum["properties"].values()
    limits["maximum"] += rng.randint(100, 900)
    other = rng.choice(
        (
            function | {"description": sentence(rng)},
            function | {"name": "another_tool"},
            function | {"parameters": maximum},
            tool_of(rng, "new_tool")["function"],
        )
    )
    tools = [*chat.tools[:index], {"type": "function", "function": other}, *chat.tools[index + 1 :]]
    kind = "number" if other["parameters"] is maximum else None
    return chat, replace(chat, tools=tools), PromptPart("tools", other["name"], kind)


def edited_call(rng: random.Random, chat: Drawn) -> tuple[Drawn, Drawn, PromptPart]:
    """Another number at the end of a call."""
    index = rng.randint(1, len(chat.messages) - 1)
    texts = [json.dumps({"query": "a state", "limit": rng.randint(100, 999)}) for _ in range(2)]
    known, prompt = (
        replace(chat, messages=[*chat.messages[:index], _calling(text), *chat.messages[index:]]) for text in texts
    )
    return known, prompt, PromptPart(f"messages[{index}]", "assistant", "number")


def _calling(arguments: str) -> dict[str, Any]:
    call = {"id": "1", "type": "function", "function": {"name": "find", "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def edited_image(rng: random.Random, chat: Drawn) -> tuple[Drawn, Drawn, PromptPart]:
    """Another image in the place of the first."""
    index = rng.choice([number for number, each in enumerate(chat.messages) if each["role"] == "user"])
    messages = [
        {**each, "content": each["content"][-1]["text"]} if isinstance(each["content"], list) else each
        for each in chat.messages
    ]
    text = messages[index]["content"]
    parts = [{"type": "text", "text": text}, {"type": "image_url", "image_url": {"url": "u"}}]
    messages[index] = {"role": "user", "content": [*parts, {"type": "text", "text": sentence(rng)}]}
    plain = replace(chat, messages=messages)
    return replace(plain, images=[1]), replace(plain, images=[2]), PromptPart(f"messages[{index}]", "user", "image")


def edit(rng: random.Random) -> Edit:
    """An edit that the template shows: of what it drops, another is drawn."""
    while True:
        template = TEMPLATES[rng.choice([*TEMPLATES])]
        chat = drawn(rng)
        kind = rng.choice(("date", "effort", "tool", "image", "message", "number", "call"))
        if kind == "effort":
            found = chat, replace(chat, effort=rng.choice(("high", "medium"))), PromptPart("template")
        elif kind in ("tool", "call", "image"):
            found = {"tool": edited_tool, "call": edited_call, "image": edited_image}[kind](rng, chat)
        else:
            found = edited_text(rng, chat, kind)
        drew = Edit(template, *found)
        if drew.known.tokens(template) != drew.prompt.tokens(template):
            return drew


def divergence(one: Edit) -> tuple[int, int]:
    """The characters of the prompt's first token that is not known."""
    texts, known = one.prompt.tokens(one.template), one.known.tokens(one.template)
    shared = sum(1 for _ in takewhile(bool, map(eq, texts, known)))
    plain = _TOKEN.findall(one.prompt.text(one.template))
    start = len("".join(plain[:shared]))
    return start, start + len(plain[shared])


def named(one: Edit, at: tuple[int, int]) -> PromptPart | None:
    prompt = one.prompt
    parts = PromptParts(prompt.messages, prompt.tools, lambda *chat: render(one.template, *chat, prompt.effort))
    return parts.at(*at)


@pytest.fixture(scope="module")
def edits() -> list[Edit]:
    rng = random.Random(20_261)  # noqa: S311
    return [edit(rng) for _ in range(NUM_EDITS)]


def test_drawn_edits_are_named_on_every_template(edits: list[Edit], record_property: Any) -> None:
    wrong = [(one.part, found) for one in edits if (found := named(one, divergence(one))) != one.part]
    share = 1 - len(wrong) / NUM_EDITS
    record_property("share_named", share)
    print(f"{share:.1%} of {NUM_EDITS} edits are named")
    assert {one.template for one in edits} == {*TEMPLATES.values()}
    assert share >= LEAST_SHARE, wrong


def test_another_requests_position_names_another_part(edits: list[Edit]) -> None:
    """The control: the parts are told apart, and no answer is right by chance alone."""
    others = [divergence(one) for one in (*edits[1:], edits[0])]
    right = sum(named(one, at) == one.part for one, at in zip(edits, others, strict=True))
    assert right < NUM_EDITS / 4


@pytest.mark.parametrize("num_characters", [-120, 120])
def test_shifted_bounds_name_other_parts(edits: list[Edit], num_characters: int) -> None:
    at = [(start + num_characters, end + num_characters) for start, end in map(divergence, edits)]
    right = sum(named(one, shifted) == one.part for one, shifted in zip(edits, at, strict=True))
    assert right < NUM_EDITS / 2


@pytest.mark.parametrize(
    ("text", "token", "kind"),
    [
        ("Today is 2026-11-30, a Monday", "11", "date"),
        ("at 2026-11-30T09:14:07Z it", "14", "date"),
        ("on 3rd", "3", None),
        ("on 30 November 2026 it", " November", "date"),
        ("on May 3, 2026 it", "3", "date"),
        ("it may be", "may", None),
        ("Today is Monday, and", " Monday", "date"),
        ("at 9:41 PM sharp", "41", "date"),
        ("of 12,288 tokens", "288", "number"),
        ("-3.5e4 of", "5", "number"),
        ("99%", "99", "number"),
        ("gpt4 has", "4", None),
        ("id 3f2a91bc of", "91", None),
        ("no number", "number", None),
        ("the 7 states", "states", None),
    ],
)
def test_what_looks_like_a_date_or_a_number(text: str, token: str, kind: str | None) -> None:
    start = text.index(token)
    assert kind_of(text, start, start + len(token)) == kind


def test_a_template_that_shows_marked_texts_otherwise_names_what_is_before_them() -> None:
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Why?"}]

    def shouted(messages: Any, _tools: Any) -> str:
        texts = [each["content"] for each in messages]
        return f"[{texts[0]}][{texts[1] if len(texts[1]) == 4 else 'too long'}]"

    parts = PromptParts(messages, [], shouted)
    assert [parts.at(at, at + 1) for at in (0, 1, 11, 12)] == [PromptPart("template"), PromptPart("system"), None, None]


def test_a_character_that_marks_itself_is_never_taken_for_a_mark() -> None:
    text = "a \U000f0000b\U000f0001 c"
    messages = [{"role": "user", "content": text}, {"role": "user", "content": "d"}]
    parts = PromptParts(messages, [], lambda messages, _: "".join(each["content"] for each in messages))
    assert {parts.at(at, at + 1) for at in range(2, len(parts.text))} == {None}
