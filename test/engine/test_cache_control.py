"""Marked messages: where they end in tokens of the prompt, whatever the template does, and what is no mark."""

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest
from starlette.requests import Request
from transformers import AutoTokenizer

from marconi.engine.http.chat_template import Mark, around_convert, marks_of
from marconi.engine.http.hints import KEY, LEFT_OUT, NEXT_TURN, SYSTEM_END
from marconi.engine.launch.flags import BACKEND

EPHEMERAL = {"type": "ephemeral"}
CHATML = (
    "{% if tools %}<|im_start|>tools\n{{ tools }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{{ part['text'] }}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NEEDS_A_USER = (
    "{% if not messages | selectattr('role', 'equalto', 'user') | list %}{{ raise_exception('no user') }}{% endif %}"
    + CHATML
)
LAST_IS_OPEN = (
    "{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}"
    "{% if not loop.last %} [/end]{% endif %}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
"""What it writes behind a message depends on whether another follows."""
NEEDS_FIVE = "{% if messages | length < 5 %}{{ raise_exception('too few') }}{% endif %}" + CHATML
TOOLS = [{"type": "function", "function": {"name": "find", "parameters": {"type": "object", "properties": {}}}}]


class Chat:
    """What is asked of SGLang's chat endpoint, on the tokenizer of the small models and a template of the test's."""

    def __init__(self, tokenizer_path: Path, template: str, backend: str = BACKEND) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(tokenizer_path)
        self.tokenizer.chat_template = template
        self.num_rendered = 0
        self.tokenizer_manager = SimpleNamespace(
            server_args=SimpleNamespace(radix_cache_backend=backend),
            model_config=SimpleNamespace(is_multimodal=False),
        )

    def _process_messages(self, request: Any, _is_multimodal: bool) -> Any:
        self.num_rendered += 1
        text = self.render(
            [message.model_dump(exclude_none=True) for message in request.messages],
            request._format_add_generation_prompt is not False,
            [tool.model_dump(exclude_none=True) for tool in request.tools or []],
        )
        return SimpleNamespace(prompt_ids=self.ids(text))

    def render(self, messages: list[dict[str, Any]], invites: bool, tools: list[dict[str, Any]]) -> str:
        text: str = self.tokenizer.apply_chat_template(
            messages, tools=tools or None, add_generation_prompt=invites, tokenize=False
        )
        return text

    def ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def convert(self, request: Any, _raw_request: Any) -> Any:
        ids = self._process_messages(request, False).prompt_ids
        return SimpleNamespace(input_ids=ids, sampling_params={"custom_params": request.custom_params}), request

    def hints(self, body: dict[str, Any], path: str = "/v1/chat/completions") -> tuple[list[int], Any]:
        """The prompt of a body, and the `custom_params` that its request gets, but for what the template alone says."""
        prompt, custom = self.noted(body, path)
        if isinstance(custom, dict):
            custom = {key: value for key, value in custom.items() if key not in (NEXT_TURN, SYSTEM_END)} or None
        return prompt, custom

    def noted(self, body: dict[str, Any], path: str = "/v1/chat/completions") -> tuple[list[int], Any]:
        """The prompt of a body, and the `custom_params` that its request gets."""

        def convert(serving: "Chat", request: Any, raw_request: Any) -> Any:
            return serving.convert(request, raw_request)

        adapted, _ = around_convert(convert, self, ChatCompletionRequest.model_validate(body), received(body, path))
        return adapted.input_ids, adapted.sampling_params["custom_params"]


def received(body: dict[str, Any], path: str) -> Request:
    """A request whose body has been read."""

    async def read() -> Request:
        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}

        scope = {"type": "http", "method": "POST", "path": path, "headers": [], "query_string": b"", "scheme": "http"}
        request = Request({**scope, "server": ("127.0.0.1", 1)}, receive)
        await request.body()
        return request

    return asyncio.run(read())


def conversation(*marked: int) -> list[dict[str, Any]]:
    """Five messages, those at `marked` so; some beyond ASCII."""
    turns = [
        ("system", "Be kind, Zoë. 你好 🙂"),
        ("user", "What is a state?"),
        ("assistant", "ça dépend 🙃"),
        ("user", "And now?"),
        ("user", "\n\nAnd then?"),
    ]
    return [
        {"role": role, "content": content, **({"cache_control": EPHEMERAL} if index in marked else {})}
        for index, (role, content) in enumerate(turns)
    ]


@pytest.mark.parametrize("tools", [[], TOOLS], ids=["alone", "with tools"])
@pytest.mark.parametrize("index", range(5))
def test_a_marked_message_ends_where_the_conversation_up_to_it_does(
    models: dict[str, Path], index: int, tools: list[dict[str, Any]]
) -> None:
    chat = Chat(models["gdn"], CHATML)
    prompt, custom = chat.hints({"messages": conversation(index), **({"tools": tools} if tools else {})})
    ended = chat.ids(chat.render(conversation()[: index + 1], False, tools))
    assert custom == {KEY: [len(ended)], LEFT_OUT: 0}
    assert prompt[: len(ended)] == ended


def test_a_marked_part_ends_where_it_does(models: dict[str, Path]) -> None:
    chat = Chat(models["gdn"], CHATML)
    parts = [
        {"type": "text", "text": "A long document. ", "cache_control": EPHEMERAL},
        {"type": "text", "text": "A question."},
    ]
    _, custom = chat.hints({"messages": [{"role": "user", "content": parts}]})
    assert custom[KEY] == [len(chat.ids("<|im_start|>user\nA long document. "))]


def test_a_mark_on_the_last_part_is_one_on_the_message(models: dict[str, Path]) -> None:
    chat = Chat(models["gdn"], CHATML)
    part = {"type": "text", "text": "All of it.", "cache_control": EPHEMERAL}
    _, custom = chat.hints({"messages": [{"role": "user", "content": [part], "cache_control": EPHEMERAL}]})
    assert custom == {KEY: [len(chat.ids("<|im_start|>user\nAll of it.<|im_end|>\n"))], LEFT_OUT: 0}


def test_a_template_that_wants_a_user_gets_one_and_the_position_is_behind_its_head(models: dict[str, Path]) -> None:
    chat = Chat(models["gdn"], NEEDS_A_USER)
    for first in "ab":
        messages = [*conversation(0)[:1], {"role": "user", "content": f"{first}ny question"}]
        prompt, custom = chat.hints({"messages": messages})
        head = chat.ids(chat.render(conversation()[:2], False, []).split("What")[0])
        assert custom == {KEY: [len(head)], LEFT_OUT: 0}
        assert prompt[: len(head)] == head


def test_what_a_template_writes_only_behind_the_last_message_is_left_off(models: dict[str, Path]) -> None:
    chat = Chat(models["gdn"], LAST_IS_OPEN)
    prompt, custom = chat.hints({"messages": conversation(1)})
    shared = chat.ids("[system] Be kind, Zoë. 你好 🙂 [/end][user] What is a state?")
    assert custom[KEY] == [len(shared)]
    assert prompt[: len(shared)] == shared


def test_a_mark_that_cannot_be_found_is_left_out_and_counted(models: dict[str, Path]) -> None:
    chat = Chat(models["gdn"], NEEDS_FIVE)
    assert chat.hints({"messages": conversation(0, 4)})[1][LEFT_OUT] == 1
    with_ids = {"messages": conversation(0), "input_ids": [5, 6, 7]}
    assert Chat(models["gdn"], CHATML).hints(with_ids)[1] == {KEY: [], LEFT_OUT: 1}


def test_of_more_than_four_marks_the_first_four_are_rendered_and_the_others_counted(models: dict[str, Path]) -> None:
    _, custom = Chat(models["gdn"], CHATML).hints({"messages": conversation(0, 1, 2, 3, 4)})
    assert (len(custom[KEY]), custom[LEFT_OUT]) == (4, 1)


def test_marks_join_the_positions_of_the_same_request(models: dict[str, Path]) -> None:
    chat = Chat(models["gdn"], CHATML)
    _, alone = chat.hints({"messages": conversation(0)})
    _, both = chat.hints({"messages": conversation(0), "custom_params": {KEY: [3, -1], "of another": 1}})
    assert both == {KEY: [3, -1, *alone[KEY]], LEFT_OUT: 0, "of another": 1}
    _, wrong = chat.hints({"messages": conversation(0), "custom_params": {KEY: "3"}})
    assert wrong[KEY] == "3", "refused later, as it came"


def test_nothing_is_read_without_a_mark_on_another_route_or_under_another_cache(models: dict[str, Path]) -> None:
    chat = Chat(models["gdn"], CHATML)
    assert chat.hints({"messages": conversation()})[1] is None
    assert chat.hints({"messages": conversation(0)}, "/v1/messages")[1] is None
    nothing = [{"role": "user", "content": "cache_control", "cache_control": None}]
    assert chat.hints({"messages": nothing})[1] is None
    assert Chat(models["gdn"], CHATML, "").hints({"messages": conversation(0)})[1] is None


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ({"type": "persistent"}, '{"type": "persistent"}'),
        ({"ttl": "5m"}, '{"ttl": "5m"}'),
        ("ephemeral", '"ephemeral"'),
        (True, "true"),
        (0, "0"),
        ([], "[]"),
    ],
)
def test_a_mark_of_another_kind_is_named_in_one_line(value: object, shown: str) -> None:
    message = {"role": "user", "content": "x", "cache_control": value}
    part = {"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "text", "cache_control": value}]}
    for wrong, where in ((message, "messages[1]"), (part, "messages[1].content[1]")):
        with pytest.raises(ValueError, match="must be") as refused:
            list(marks_of([{"role": "user", "content": "x"}, wrong]))
        assert str(refused.value) == f'{where}.cache_control must be {{"type": "ephemeral"}}, got {shown}'


def test_a_mark_may_say_more_than_its_type() -> None:
    assert list(marks_of([{"content": "x", "cache_control": {"type": "ephemeral", "ttl": "1h"}}])) == [Mark(0, None)]


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
