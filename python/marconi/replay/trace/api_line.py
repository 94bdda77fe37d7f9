"""One line of the log of an API: what was asked and answered, in the shapes of OpenAI's and Anthropic's APIs.

    message    `content` as a text or in parts; an answer's thinking in `reasoning_content`, `reasoning` or
               `reasoning_details`; Anthropic's blocks become what OpenAI has for them: `tool_use` a call, `tool_result`
               a message of the tool, `thinking` the answer's reasoning
    media      an image, a sound, a film or a file is a mark with the digest of its URL or its content (`chats.mark`)
    kind       a call that failed and gave no answer, and one for an embedding, took no prompt that a cache could hold

What has no meaning here is a `BadRecord` that names it.
"""

from collections.abc import Iterator
from hashlib import blake2b
from typing import Any, Final

import msgspec

from marconi.replay.trace.base import BadRecord
from marconi.replay.trace.chats import mark
from marconi.replay.trace.decode import Id, RecordDecoder, Tokens, shown

_TEXTS = ("text", "input_text", "output_text", "refusal")
_MEDIA = (
    "image",
    "image_url",
    "input_image",
    "audio_url",
    "input_audio",
    "video_url",
    "file",
    "input_file",
    "document",
)
_BLOCKS = ("thinking", "redacted_thinking", "tool_use", "tool_result")


class Part(msgspec.Struct, omit_defaults=True):
    """A part of a message's content."""

    type: str
    text: str = ""
    refusal: str = ""
    thinking: str | list["Part"] = ""
    id: str | None = None
    name: str = ""
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: "str | list[Part] | None" = None
    source: Any = None
    image_url: Any = None
    image: Any = None
    audio_url: Any = None
    input_audio: Any = None
    video_url: Any = None
    file: Any = None

    def __post_init__(self) -> None:
        if self.type not in (*_TEXTS, *_MEDIA, *_BLOCKS):
            known = ", ".join((*_TEXTS, *_MEDIA, *_BLOCKS))
            raise BadRecord(f"type must be one of {known}, got {shown(self.type)}")

    @property
    def flat(self) -> "Part":
        """The part as a text, with a mark for what is none."""
        if self.type not in _MEDIA:
            return Part("text", self.text or self.refusal)
        if isinstance(self.source, dict) and self.source.get("type") == "text":
            return Part("text", str(self.source.get("data", "")))
        said = (self.source, self.image_url, self.image, self.audio_url, self.input_audio, self.video_url, self.file)
        what = next((each for each in said if each is not None), None)
        where = what.get("url", what) if isinstance(what, dict) else what
        return Part("text", mark(blake2b(msgspec.json.encode((where, self.id)), digest_size=16).hexdigest()))


class Function(msgspec.Struct):
    """The function that is called, with its arguments."""

    name: str
    arguments: str | dict[str, Any] = "{}"

    @property
    def is_whole(self) -> bool:
        """True if the arguments are JSON."""
        try:
            msgspec.json.decode(self.arguments or "{}") if isinstance(self.arguments, str) else None
        except (msgspec.DecodeError, RecursionError):
            return False
        return True


class ToolCall(msgspec.Struct, omit_defaults=True):
    """A tool's call."""

    function: Function
    id: str | None = None
    index: int | None = None


class Message(msgspec.Struct, omit_defaults=True):
    """A message of a chat."""

    role: str = "assistant"
    content: str | list[Part] | None = None
    reasoning_content: str | None = None
    reasoning: Any = None
    reasoning_details: Any = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None

    @property
    def fields(self) -> dict[str, Any]:
        """The message as a template takes it, of one that `plain` gave."""
        return {**msgspec.to_builtins(self), "role": self.role}

    @property
    def digest(self) -> bytes:
        """Equal for messages that say the same."""
        content = [part.text for part in self.content] if isinstance(self.content, list) else [self.content or ""]
        calls = [call.function for call in self.tool_calls or ()]
        return blake2b(msgspec.json.encode((self.role, content, self.tool_call_id, calls)), digest_size=16).digest()

    @property
    def is_cut(self) -> bool:
        """True if a call's arguments end before their JSON does, as `max_tokens` cuts them."""
        return any(not call.function.is_whole for call in self.tool_calls or ())

    def plain(self) -> "Iterator[Message]":
        """The message in OpenAI's shape, with texts alone: tools' results, which are messages of their own, first."""
        parts = self.content if isinstance(self.content, list) else []
        calls, results = list(self.tool_calls or ()), 0
        thinking = self.reasoning_content or _text(self.reasoning) or _text(self.reasoning_details)
        texts: list[Part] = []
        for part in parts:
            if part.type == "tool_result":
                content = [each.flat for each in part.content] if isinstance(part.content, list) else part.content
                yield Message("tool", content, tool_call_id=part.tool_use_id)
                results += 1
            elif part.type == "tool_use":
                calls.append(ToolCall(Function(part.name, part.input or {}), part.id))
            elif part.type == "thinking":
                said = part.thinking
                thinking += said if isinstance(said, str) else "".join(each.text for each in said)
            elif part.type != "redacted_thinking":
                texts.append(part.flat)
        if texts or calls or not results:
            yield Message(
                self.role,
                texts or None if isinstance(self.content, list) else self.content,
                thinking or None,
                tool_calls=calls or None,
                tool_call_id=self.tool_call_id,
                name=self.name,
            )


def _text(thinking: Any) -> str:
    """The text of what a field of thinking holds: a text, or a list of objects with a `text` or a `summary`."""
    if isinstance(thinking, str):
        return thinking
    parts = (each for each in thinking if isinstance(each, dict)) if isinstance(thinking, list) else ()
    return "".join(str(part.get("text") or part.get("summary") or "") for part in parts)


class Tool(msgspec.Struct):
    """A tool: `function`, or its name and schema beside each other."""

    function: dict[str, Any] | None = None
    name: str | None = None
    description: str | None = None
    parameters: Any = None
    input_schema: Any = None

    def __post_init__(self) -> None:
        if self.function is None and self.name is None:
            raise BadRecord("function, or name, must say what the tool is, got neither")

    @property
    def fields(self) -> dict[str, Any]:
        """The tool as a template takes it."""
        if self.function is not None:
            return {"function": self.function}
        schema = self.parameters or self.input_schema or {}
        return {"function": {"name": self.name, "description": self.description or "", "parameters": schema}}


class Body(msgspec.Struct):
    """A request's body."""

    messages: list[Message] | None = None
    system: str | list[Part] | None = None
    prompt: str | list[Id] | None = None
    tools: list[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_salt: str | None = None
    session_id: str | int | None = None
    conversation_id: str | int | None = None
    chat_id: str | int | None = None

    @property
    def session(self) -> str | int | None:
        """Its session's name."""
        named = (self.session_id, self.conversation_id, self.chat_id)
        return next((name for name in named if name is not None), None)

    @property
    def chat(self) -> list[Message]:
        """Its messages in OpenAI's shape; none of a prompt."""
        opening = [Message("system", self.system)] if self.system and self.messages else []
        return [plain for message in (*opening, *(self.messages or ())) for plain in message.plain()]

    @property
    def fields(self) -> dict[str, Any]:
        """The body as a template takes it."""
        return {
            "messages": [message.fields for message in self.chat],
            "tools": [tool.fields for tool in self.tools] if self.tools else None,
            "chat_template_kwargs": self.chat_template_kwargs,
        }


class Usage(msgspec.Struct):
    """Tokens as the server counted them."""

    completion_tokens: Tokens | None = None
    output_tokens: Tokens | None = None
    prompt_tokens: Tokens | None = None
    input_tokens: Tokens | None = None
    cache_read_input_tokens: Tokens | None = None
    cache_creation_input_tokens: Tokens | None = None

    @property
    def num_output(self) -> int | None:
        """Tokens of the answer, its thinking included."""
        return self.output_tokens if self.completion_tokens is None else self.completion_tokens

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt; 0 where it does not say. Anthropic counts those that were cached beside the others."""
        cached = (self.cache_read_input_tokens or 0) + (self.cache_creation_input_tokens or 0)
        return self.prompt_tokens or (self.input_tokens or 0) + cached


class Choice(msgspec.Struct):
    """One of OpenAI's choices."""

    message: Message | None = None
    text: str | None = None


class Answer(msgspec.Struct):
    """A response's body."""

    choices: list[Choice] | None = None
    content: str | list[Part] | None = None
    tool_calls: list[ToolCall] | None = None
    reasoning_content: str | None = None
    reasoning: Any = None
    usage: Usage | None = None
    created: float | None = None

    @property
    def message(self) -> Message | None:
        """The answer; None where it does not say."""
        for choice in self.choices or ():
            if choice.message is not None:
                return choice.message
            if choice.text is not None:
                return Message(content=choice.text)
        if self.content is None and self.tool_calls is None:
            return None
        reasoning, thinking = self.reasoning_content, self.reasoning
        return Message("assistant", self.content, reasoning, thinking, tool_calls=self.tool_calls)


class Response(Answer):
    """An answer, or what holds one."""

    body: Answer | str | None = None


class Line(Body):
    """A line."""

    body: Body | str | None = None
    request: Body | str | None = None
    response: Response | str | None = None
    output: Response | str | None = None
    completion: Response | str | None = None
    usage: Usage | None = None
    completion_tokens: Tokens | None = None
    output_length: Tokens | None = None
    timestamp: float | str | None = None
    ts: float | str | None = None
    time: float | str | None = None
    created: float | str | None = None
    created_at: float | str | None = None
    start_time_camel: float | str | None = msgspec.field(default=None, name="startTime")
    start_time: float | str | None = None

    @property
    def asked(self) -> Body:
        """The request's body."""
        for body in (self, self.body, self.request):
            if isinstance(body, Body) and (body.messages or body.prompt):
                return body
        raise BadRecord("messages or prompt must hold what was asked, in the line, its body or its request, got none")

    @property
    def answers(self) -> list[Answer | str]:
        """The answers that the line holds, the innermost first."""
        found: list[Answer | str] = []
        for answer in (self.response, self.output, self.completion):
            inner = answer.body if isinstance(answer, Response) else None
            found += [each for each in (inner, answer) if each is not None]
        return found

    @property
    def answer(self) -> Message | None:
        """The answer in OpenAI's shape; None where the line does not have it."""
        said = (Message(content=each) if isinstance(each, str) else each.message for each in self.answers)
        found = next((message for message in said if message is not None), None)
        return None if found is None else next(found.plain(), None)

    @property
    def usages(self) -> list[Usage]:
        """Tokens as the server counted them, wherever the line says."""
        all_usages = (self.usage, *(each.usage for each in self.answers if isinstance(each, Answer)))
        return [usage for usage in all_usages if usage is not None]

    @property
    def num_output(self) -> int | None:
        """Tokens of the answer as the server counted them; None where the line does not say."""
        said = (*(usage.num_output for usage in self.usages), self.completion_tokens, self.output_length)
        return next((number for number in said if number is not None), None)

    @property
    def came(self) -> tuple[str, float | str] | None:
        """The name and the value of the first field that says when it came; None where none does."""
        times = {
            "timestamp": self.timestamp, "ts": self.ts, "time": self.time, "created": self.created,
            "created_at": self.created_at, "startTime": self.start_time_camel, "start_time": self.start_time,
        }  # fmt: skip
        said = [("response.created", each.created) for each in self.answers if isinstance(each, Answer)]
        return next(((name, value) for name, value in (*times.items(), *said) if value is not None), None)


class _Kind(msgspec.Struct):
    """The fields that say of which kind a line is, whatever they hold."""

    status: Any = None
    status_code: Any = None
    error: Any = None
    error_str: Any = None
    call_type: Any = None
    url: Any = None
    path: Any = None
    endpoint: Any = None
    response: Any = None
    output: Any = None
    completion: Any = None

    @property
    def left_out(self) -> str | None:
        """Why the line is no request to a cache; None where it is one."""
        outer = self.response if isinstance(self.response, dict) else {}
        inner = outer["body"] if isinstance(outer.get("body"), dict) else outer
        where = (self.call_type, self.url, self.path, self.endpoint)
        data = inner.get("data")
        is_embedded = isinstance(data, list) and bool(data) and isinstance(data[0], dict) and "embedding" in data[0]
        if is_embedded or any(isinstance(each, str) and "embedding" in each.lower() for each in where):
            return "an embedding call"
        codes = (self.status, self.status_code, outer.get("status_code"), outer.get("status"))
        failed = any(_is_failure(code) for code in codes) or any(
            (self.error, self.error_str, outer.get("error"), inner.get("error"))
        )
        answered = (inner.get("choices"), inner.get("content"), self.output, self.completion)
        is_answered = any(answered) or (isinstance(self.response, str) and bool(self.response))
        return "a failed call" if failed and not is_answered else None


def _is_failure(code: Any) -> bool:
    if isinstance(code, str):
        return code.lower() in ("failure", "failed", "error", "errored") or (code.isdecimal() and int(code) >= 400)
    return isinstance(code, int) and code >= 400


_kind = RecordDecoder(_Kind)
line_of: Final = RecordDecoder(Line)
"""The line that JSON holds."""


def left_out(text: bytes) -> str | None:
    """Why a line is no request to a cache; None where it is one."""
    return _kind(text).left_out
