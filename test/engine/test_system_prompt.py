"""Where a chat's system prompt ends, and marks beside images: positions in tokens of the prompt."""

from pathlib import Path
from typing import Any

import pytest

from marconi.engine.http.hints import KEY, LEFT_OUT, SYSTEM_END

from .test_cache_control import CHATML, EPHEMERAL, LAST_IS_OPEN, NEEDS_A_USER, NEEDS_FIVE, TOOLS, Chat, conversation


@pytest.mark.parametrize("template", [CHATML, NEEDS_A_USER, LAST_IS_OPEN])
@pytest.mark.parametrize("tools", [[], TOOLS], ids=["alone", "with tools"])
def test_the_system_prompt_ends_where_another_users_turn_differs(
    models: dict[str, Path], template: str, tools: list[dict[str, Any]]
) -> None:
    chat = Chat(models["gdn"], template)
    fields = {"tools": tools} if tools else {}
    prompt, custom = chat.noted({"messages": conversation(), **fields})
    ended = chat.ids(chat.render(conversation()[:2], False, tools).split("What")[0])
    assert custom[SYSTEM_END] == len(ended)
    assert prompt[: len(ended)] == ended
    marked = chat.noted({"messages": conversation(0), **fields})[1]
    assert (marked[SYSTEM_END], marked[LEFT_OUT]) == (len(ended), 0), "beside the client's own"


def test_a_system_prompt_is_rendered_once_and_anew_with_other_tools(models: dict[str, Path]) -> None:
    chat = Chat(models["gdn"], CHATML)
    chat.noted({"messages": [{"role": "user", "content": "the next turn's distance is known from here on"}]})
    rendered = []
    for tools in ([], [], TOOLS, TOOLS):
        before = chat.num_rendered
        for text in "Why?", "All at once?":
            messages = [*conversation()[:1], {"role": "user", "content": text}]
            chat.noted({"messages": messages, **({"tools": tools} if tools else {})})
        rendered.append(chat.num_rendered - before - 2)
    assert rendered == [1, 0, 1, 0]


def test_without_a_system_prompt_or_where_it_cannot_be_rendered_no_end_is_noted(models: dict[str, Path]) -> None:
    chat = Chat(models["gdn"], CHATML)
    assert SYSTEM_END not in chat.noted({"messages": conversation()[1:]})[1]
    assert SYSTEM_END not in (chat.noted({"messages": conversation(), "input_ids": [5, 6, 7]})[1] or {})
    assert SYSTEM_END in chat.noted({"messages": conversation()[1:2], "tools": TOOLS})[1]
    assert SYSTEM_END not in (Chat(models["gdn"], NEEDS_FIVE).noted({"messages": conversation()})[1] or {})
    assert Chat(models["gdn"], CHATML, "").noted({"messages": conversation()})[1] is None


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
WITH_IMAGES = CHATML.replace("{{ part['text'] }}", "{{ part['text'] if part['type'] == 'text' else '<s>' }}")


def test_the_system_prompt_and_marks_before_an_image_end_where_they_do_without_it(models: dict[str, Path]) -> None:
    messages, text = conversation(0, 2)[:3], {"type": "text", "text": "a state?"}
    alone, beside = (
        Chat(models["gdn"], WITH_IMAGES).noted(
            {"model": "m", "messages": [*messages, {"role": "user", "content": parts}]}
        )
        for parts in ([text], [IMAGE, text])
    )
    assert alone[1][KEY]
    assert alone[1][SYSTEM_END]
    assert beside[1] == alone[1]


def test_a_mark_behind_an_image_is_left_out_and_counted(models: dict[str, Path]) -> None:
    with_image = {"role": "user", "content": [IMAGE, {"type": "text", "text": "What?", "cache_control": EPHEMERAL}]}
    body = {"model": "m", "messages": [*conversation(0)[:1], with_image, *conversation(3)[2:]]}
    _, custom = Chat(models["gdn"], WITH_IMAGES).hints(body)
    assert (len(custom[KEY]), custom[LEFT_OUT]) == (1, 2)


def test_a_turn_in_parts_that_begins_as_the_other_turn_does_not_move_the_system_prompts_end(
    models: dict[str, Path],
) -> None:
    system, ends = conversation()[0], set()
    for content in ("Hello", [{"type": "text", "text": "Hello"}], [{"type": "text", "text": "and so"}]):
        body = {"model": "m", "messages": [system, {"role": "user", "content": content}]}
        ends.add(Chat(models["gdn"], CHATML).noted(body)[1][SYSTEM_END])
    assert len(ends) == 1
