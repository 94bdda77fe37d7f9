"""Marked messages: where they end in tokens of the prompt, whatever the template does, and what is no mark."""

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from sglang.srt.entrypoints.anthropic.serving import AnthropicServing
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest
from sglang.srt.managers.kv_hints import decode_kv_hints_envelope
from starlette.requests import Request
from transformers import AutoTokenizer

from marconi.engine.http.cache_control import SYSTEM, Mark, marks_of, read_marks
from marconi.engine.http.chat_template import around_convert
from marconi.engine.http.hints import KEY, LEFT_OUT, NEXT_TURN, SYSTEM_END
from marconi.engine.launch.flags import BACKEND

EPHEMERAL = {"type": "ephemeral"}
FOR_AN_HOUR = {**EPHEMERAL, "ttl": "1h"}
CHAT, ANTHROPIC = "/v1/chat/completions", "/v1/messages"
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

    supports_inline_system = False

    def __init__(self, tokenizer_path: Path, template: str, backend: str = BACKEND) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(tokenizer_path)
        self.tokenizer.chat_template = template
        self.num_rendered = 0
        self.tokenizer_manager = SimpleNamespace(
            tokenizer=self.tokenizer,
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
        if has_image(request):
            # SGLang's processor of images reads text, and makes more tokens of it.
            text, sampling = self.tokenizer.decode(ids), {"custom_params": request.custom_params}
            return SimpleNamespace(input_ids=None, text=text, sampling_params=sampling), request
        return SimpleNamespace(input_ids=ids, sampling_params={"custom_params": request.custom_params}), request

    def hints(self, body: dict[str, Any], path: str = CHAT) -> tuple[list[int], Any]:
        """The prompt of a body, and the `custom_params` that its request gets, but for what the template alone says."""
        prompt, custom = self.noted(body, path)
        if isinstance(custom, dict):
            custom = {key: value for key, value in custom.items() if key not in (NEXT_TURN, SYSTEM_END)} or None
        return prompt, custom

    def noted(self, body: dict[str, Any], path: str = CHAT) -> tuple[list[int], Any]:
        """The prompt of a body, and the `custom_params` that its request gets."""
        adapted = self.adapted(body, path)
        return adapted.input_ids, adapted.sampling_params["custom_params"]

    def adapted(self, body: dict[str, Any], path: str = CHAT) -> Any:
        """The request that a body becomes, as SGLang's route at `path` converts it."""

        def convert(serving: "Chat", request: Any, raw_request: Any) -> Any:
            return serving.convert(request, raw_request)

        if path == ANTHROPIC:
            messages = AnthropicMessagesRequest.model_validate({"model": "m", "max_tokens": 4, **body})
            request = AnthropicServing(self)._convert_to_chat_completion_request(messages)
        else:
            request = ChatCompletionRequest.model_validate(body)
        return around_convert(convert, self, request, received(body, path))[0]


def has_image(request: Any) -> bool:
    """True if a part of a message of the chat `request` is one."""
    contents = [each.content for each in request.messages if isinstance(each.content, list)]
    return any(part.type == "image_url" for content in contents for part in content)


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
    assert chat.hints({"messages": conversation(0)}, "/v1/responses")[1] is None
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
            list(marks_of({"messages": [{"role": "user", "content": "x"}, wrong]}, is_anthropic=False))
        assert str(refused.value) == f'{where}.cache_control must be {{"type": "ephemeral"}}, got {shown}'


@pytest.mark.parametrize("ttl", ["2h", "", 300, True, ["1h"], {}])
def test_a_ttl_of_another_length_is_named_in_one_line(ttl: object) -> None:
    body = {"messages": [{"content": "x"}], "system": [{"cache_control": {**EPHEMERAL, "ttl": ttl}}]}
    with pytest.raises(ValueError, match="must be") as refused:
        list(marks_of(body, is_anthropic=True))
    assert str(refused.value) == f'system[0].cache_control.ttl must be "5m" or "1h", got {json.dumps(ttl)}'


@pytest.mark.parametrize(("ttl", "retains"), [(None, False), ("5m", False), ("1h", True)])
def test_a_mark_may_say_how_long_and_more(ttl: str | None, retains: bool) -> None:
    body = {"messages": [{"content": "x", "cache_control": {**EPHEMERAL, "ttl": ttl, "scope": "any"}}]}
    assert list(marks_of(body, is_anthropic=False)) == [Mark(0, None, retains)]


def test_two_marks_of_one_place_are_one_and_the_longer_counts() -> None:
    content = [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]
    body = {"messages": [{"role": "user", "content": content}], "prompt_cache_retention": "24h"}
    marked = read_marks(received(body, "/v1/chat/completions"))
    assert marked is not None
    assert marked.marks == [Mark(0, None, retains=True)]


def test_the_places_of_marks_are_named_and_read_in_the_order_of_the_prompt() -> None:
    def body(value: object) -> dict[str, Any]:
        marked = {"cache_control": value}
        result = {"type": "tool_result", "content": [{"type": "text", **marked}, {"type": "text"}]}
        return {
            "tools": [{}, marked],
            "system": [marked, {}, marked],
            "messages": [{"content": "x"}, {"content": [result, marked]}],
            **marked,
        }

    found = [Mark(SYSTEM, None), Mark(SYSTEM, 1), Mark(SYSTEM, None), Mark(1, 1), Mark(1, None), Mark(1, None)]
    assert list(marks_of(body(EPHEMERAL), is_anthropic=True)) == found
    assert list(marks_of(body(EPHEMERAL), is_anthropic=False)) == [found[0], *found[3:]], "no field of OpenAI's"
    rest, places = body(False), []
    for field in ("tools", "system", "messages", "cache_control"):
        with pytest.raises(ValueError, match="must be") as refused:
            list(marks_of({"messages": [], **rest}, is_anthropic=True))
        places.append(str(refused.value).split(" must")[0])
        del rest[field]
    inside = "messages[1].content[0].content[0].cache_control"
    assert places == ["tools[1].cache_control", "system[0].cache_control", inside, "cache_control"]


@pytest.mark.parametrize("path", [CHAT, ANTHROPIC])
def test_a_mark_of_an_hour_retains_its_state_alone(models: dict[str, Path], path: str) -> None:
    turns = conversation()[1:]
    for index, cache_control in enumerate((EPHEMERAL, FOR_AN_HOUR, {**EPHEMERAL, "ttl": "5m"})):
        turns[index] = {**turns[index], "content": [{"type": "text", "text": "x", "cache_control": cache_control}]}
    adapted = Chat(models["gdn"], CHATML).adapted({"messages": turns}, path)
    positions = adapted.sampling_params["custom_params"][KEY]
    assert len(positions) == 3
    (action,) = decode_kv_hints_envelope(adapted.kv_hints).actions
    assert (action.action_type, action.payload) == ("retain", {"seconds": 3600.0, "num_tokens": positions[1]})
    del turns[1]
    assert not hasattr(Chat(models["gdn"], CHATML).adapted({"messages": turns}, path), "kv_hints")


@pytest.mark.parametrize(
    ("retention", "retains"), [(None, False), ("in_memory", False), ("in-memory", False), ("24h", True)]
)
def test_openais_longest_retention_is_a_mark_of_an_hour_at_the_end_of_the_last_message(
    models: dict[str, Path], retention: str | None, retains: bool
) -> None:
    chat, body = Chat(models["gdn"], CHATML), {"messages": conversation(), "prompt_cache_retention": retention}
    adapted = chat.adapted(body)
    assert hasattr(adapted, "kv_hints") == retains
    end = len(adapted.input_ids) - len(chat.ids(ANSWER))
    assert chat.hints(body)[1] == ({KEY: [end], LEFT_OUT: 0} if retains else None)
    if retains:
        (action,) = decode_kv_hints_envelope(adapted.kv_hints).actions
        assert (action.action_type, action.payload) == ("retain", {"seconds": 3600.0, "num_tokens": end})
    assert not hasattr(chat.adapted(agent(prompt_cache_retention=retention), ANTHROPIC), "kv_hints"), "OpenAI's alone"


@pytest.mark.parametrize("retention", ["1h", "", 24, True, ["24h"], {}])
def test_a_retention_of_another_length_is_named_in_one_line(retention: object) -> None:
    body = {"messages": [{"content": "x"}], "prompt_cache_retention": retention}
    with pytest.raises(ValueError, match="must be") as refused:
        list(marks_of(body, is_anthropic=False))
    assert str(refused.value) == f'prompt_cache_retention must be "in_memory" or "24h", got {json.dumps(retention)}'


def test_a_mark_on_a_tool_ends_where_tools_and_system_prompt_end(models: dict[str, Path]) -> None:
    chat, messages = Chat(models["gdn"], CHATML), conversation()
    tools = [*TOOLS, {**TOOLS[0], "cache_control": FOR_AN_HOUR}]
    adapted = chat.adapted({"messages": messages, "tools": tools})
    custom = adapted.sampling_params["custom_params"]
    assert custom[KEY] == [custom[SYSTEM_END]]
    assert adapted.kv_hints["actions"][0]["payload"]["num_tokens"] == custom[SYSTEM_END]
    assert chat.hints({"messages": messages, "tools": [*TOOLS, *TOOLS]})[1] is None


# Anthropic's messages


def blocks(*texts: str, marked: int | None = None) -> list[dict[str, Any]]:
    """Blocks of text, the one at `marked` so."""
    made: list[dict[str, Any]] = [{"type": "text", "text": text} for text in texts]
    if marked is not None:
        made[marked]["cache_control"] = EPHEMERAL
    return made


CALL = {"type": "tool_use", "id": "1", "name": "find", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "found 🙂"}]}
AGENT: list[dict[str, Any]] = [
    {"role": "user", "content": blocks("A document. ", "A question.")},
    {"role": "assistant", "content": [*blocks("Let me look."), CALL]},
    {"role": "user", "content": [RESULT, *blocks("And now?")]},
    {"role": "assistant", "content": "Here."},
    {"role": "user", "content": "\n\nAnd then?"},
]
"""A conversation of which SGLang makes six messages."""
USER, ANSWER, TOOL = "<|im_start|>user\n", "<|im_start|>assistant\n", "<|im_start|>tool\n"
UP_TO = {
    (0, 0): f"{USER}A document. ",
    (0, 1): f"{USER}A document. A question.<|im_end|>\n",
    (1, 0): f"{USER}A document. A question.<|im_end|>\n{ANSWER}Let me look.<|im_end|>\n",
    (1, 1): f"{USER}A document. A question.<|im_end|>\n{ANSWER}Let me look.<|im_end|>\n",
    (2, 0): f"{USER}A document. A question.<|im_end|>\n{ANSWER}Let me look.<|im_end|>\n{TOOL}found 🙂<|im_end|>\n",
}
"""The prompt up to each block, behind the system prompt."""


def agent(*places: tuple[int, int], **fields: Any) -> dict[str, Any]:
    """The body of that conversation, with the blocks at `places` marked."""
    messages = json.loads(json.dumps(AGENT))
    for message, block in places:
        messages[message]["content"][block]["cache_control"] = EPHEMERAL
    return {"messages": messages, "system": "Be kind, Zoë.", **fields}


SYSTEM_TEXT = "<|im_start|>system\nBe kind, Zoë.<|im_end|>\n"


@pytest.mark.parametrize("place", UP_TO)
def test_a_marked_block_ends_where_the_chat_that_is_made_of_it_does(
    models: dict[str, Path], place: tuple[int, int]
) -> None:
    chat = Chat(models["gdn"], CHATML)
    prompt, custom = chat.hints(agent(place), ANTHROPIC)
    ended = chat.ids(SYSTEM_TEXT + UP_TO[place])
    assert custom == {KEY: [len(ended)], LEFT_OUT: 0}
    assert prompt[: len(ended)] == ended
    assert chat.hints(agent(), ANTHROPIC)[1] is None


def test_a_mark_within_a_tools_result_ends_where_the_result_does(models: dict[str, Path]) -> None:
    body = agent()
    body["messages"][2]["content"][0]["content"][0]["cache_control"] = EPHEMERAL
    chat = Chat(models["gdn"], CHATML)
    assert chat.hints(body, ANTHROPIC) == chat.hints(agent((2, 0)), ANTHROPIC)


def test_the_bodys_own_mark_is_one_on_its_last_message(models: dict[str, Path]) -> None:
    chat = Chat(models["gdn"], CHATML)
    prompt, custom = chat.hints(agent(cache_control=EPHEMERAL), ANTHROPIC)
    assert custom == {KEY: [len(prompt) - len(chat.ids(ANSWER))], LEFT_OUT: 0}


@pytest.mark.parametrize("inline", [False, True])
def test_system_messages_behind_a_mark_do_not_move_it(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch, inline: bool
) -> None:
    """Where a template has no place for them, SGLang moves them to the front."""
    monkeypatch.setattr(Chat, "supports_inline_system", inline)
    chat, body = Chat(models["gdn"], CHATML), agent((0, 1))
    body["messages"].insert(4, {"role": "system", "content": "Be brief."})
    front = SYSTEM_TEXT if inline else SYSTEM_TEXT.replace("Zoë.", "Zoë.\nBe brief.")
    assert chat.hints(body, ANTHROPIC)[1][KEY] == [len(chat.ids(front + UP_TO[0, 1]))]


@pytest.mark.parametrize(("marked", "text"), [(0, "<|im_start|>system\nBe kind."), (1, None)])
def test_a_marked_block_of_the_system_prompt_ends_where_it_does(
    models: dict[str, Path], marked: int, text: str | None
) -> None:
    """The last where the system prompt ends."""
    chat = Chat(models["gdn"], CHATML)
    _, custom = chat.noted(agent(system=blocks("Be kind.", "And brief.", marked=marked)), ANTHROPIC)
    assert custom[KEY] == ([custom[SYSTEM_END]] if text is None else [len(chat.ids(text))])


def test_a_mark_on_anthropics_tool_ends_where_tools_and_system_prompt_end(models: dict[str, Path]) -> None:
    chat = Chat(models["gdn"], CHATML)
    tool = {"name": "find", "input_schema": {"type": "object"}}
    _, custom = chat.noted(agent(tools=[tool, {**tool, "cache_control": EPHEMERAL}]), ANTHROPIC)
    assert custom[KEY] == [custom[SYSTEM_END]]


def test_what_cannot_be_found_is_counted(models: dict[str, Path]) -> None:
    """A tool that SGLang leaves out, alone and without a system prompt; marks beyond four; what no template renders."""
    server_tool = {"type": "bash_20250124", "name": "bash", "cache_control": EPHEMERAL}
    body = {"messages": AGENT, "tools": [server_tool]}
    assert Chat(models["gdn"], CHATML).hints(body, ANTHROPIC)[1] == {KEY: [], LEFT_OUT: 1}
    five = Chat(models["gdn"], CHATML).hints(agent(*UP_TO), ANTHROPIC)[1]
    assert (len(five[KEY]), five[LEFT_OUT]) == (4, 1)
    assert Chat(models["gdn"], NEEDS_FIVE).hints(agent((0, 0)), ANTHROPIC)[1] == {KEY: [], LEFT_OUT: 1}
