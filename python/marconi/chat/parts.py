"""The part of a chat's prompt in which a position lies, without its text, and the kind of the field there.

A part is the template, the system prompt, a tool or a message; a kind is a date, a number or a medium. Templates trim,
drop and rearrange, so parts are not searched for; the template itself shows them. Each text of the messages is rendered
between two marks, characters of a private plane, inside its white space and between tags that templates look for.
Without its marks the rendered text is the prompt, and a mark's place is where that text begins or ends:

    prompt    <system> You are kind. </system> <user> Hello </user> <assistant>
    marked    <system> [You are kind.] </system> <user> [Hello] </user> <assistant>

Where the two differ, the template has treated a marked text otherwise, and nothing is named from there on. Everything
outside of marks is the template's, with three exceptions, each found by a comparison of the prompt with another, which
is rendered only where the position needs it:

    media    without those of a message            they lie where the two differ
    tools    with the first k tools alone          the next tool begins where the two differ
    calls    with other arguments of the last      the calls end where the two are equal again

A token that lies across a boundary belongs to the text that it touches.
"""

import json
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any, Final, NamedTuple, TypeAlias

Fields: TypeAlias = Mapping[str, Any]
"""A message or a tool, as OpenAI's chats have them."""
Render: TypeAlias = Callable[[Sequence[Fields], Sequence[Fields]], str]
"""Renders messages and tools to a prompt; any error where the template refuses them."""

TEMPLATE: Final = "template"
SYSTEM: Final = "system"
TOOLS: Final = "tools"
_KINDS: Final = {"date": "a date", "number": "a number", "image": "an image", "video": "a video", "sound": "a sound"}
_MEDIA: Final = {"image_url": "image", "video_url": "video", "audio_url": "sound", "input_audio": "sound"}
_SYSTEM_ROLES: Final = ("system", "developer")
_FIRST_MARK: Final = 0xF0000
_MAX_MARKS: Final = 0xFFFC
_MARK: Final = re.compile("[\U000f0000-\U000ffffd]")
_TAG: Final = re.compile(r"(</?(?:think|thinking|reasoning|tool_call|tool_response)>|<\|[^|<>]*\|>)")
_JSON_STRING: Final = re.compile(r'"((?:[^"\\]|\\.)*)"(\s*:)?')
"""A string, and what follows the name of a field."""
_OTHER: Final = "\ue000"
"""Begins no text of a chat."""
_OTHER_TOOL: Final = {
    "type": "function",
    "function": {"description": _OTHER, "name": _OTHER, "parameters": {"type": "object", "properties": {}}},
}
_NUM_CONTEXT: Final = 48
"""Characters on both sides in which a date is looked for."""
_MONTH: Final = (
    "(?:Jan(?:uary)?|Feb(?:ruary)?|Mar(?:ch)?|Apr(?:il)?|May|June?|July?|Aug(?:ust)?"
    "|Sept?(?:ember)?|Oct(?:ober)?|Nov(?:ember)?|Dec(?:ember)?)"
)
_CLOCK: Final = r"\d{1,2}:\d{2}(?::\d{2}(?:[.,]\d+)?)?(?: ?[AaPp][Mm]\b)?(?: ?(?:Z|UTC|GMT|[+-]\d{2}:?\d{2}))?"
_DATE: Final = re.compile(
    rf"(?<![\w.])(?:\d{{4}}([-/.])\d{{1,2}}\1\d{{1,2}}(?:[T ]{_CLOCK})?|\d{{1,2}}([-/.])\d{{1,2}}\2\d{{2,4}}"
    rf"|\d{{1,2}}(?:st|nd|rd|th)? {_MONTH}(?:,? \d{{4}})?|{_MONTH} \d{{1,2}}(?:st|nd|rd|th)?(?:,? \d{{4}})?"
    rf"|{_MONTH} \d{{4}}|{_CLOCK}|(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day)(?!\w)"
)
_NUMBER: Final = re.compile(r"(?<![\w.])[-+]?\d+(?:[.,_]\d+)*(?:[eE][-+]?\d+)?(?!\w)")


class PromptPart(NamedTuple):
    """A part of a prompt."""

    where: str
    """`template`, `system`, `tools` or `messages[3]`, counted in the chat that is rendered."""
    name: str | None = None
    """The message's role or the tool's name."""
    kind: str | None = None
    """`date`, `number`, `image`, `video` or `sound`; None for all else."""

    def as_dict(self) -> dict[str, str]:
        """The values for JSON."""
        named = {} if self.name is None else {"tool" if self.where == TOOLS else "role": self.name}
        return {"where": self.where, **named, **({} if self.kind is None else {"kind": self.kind})}

    def describe(self) -> str:
        """In words: `messages[3] (user), a date`."""
        named = "" if self.name is None else f" ({self.name})"
        where = f"the {TEMPLATE}" if self.where == TEMPLATE else self.where
        return f"{where}{named}{'' if self.kind is None else f', {_KINDS[self.kind]}'}"


class Span(NamedTuple):
    """Characters of a prompt, and the message whose text they are."""

    start: int
    end: int
    message: int


class PromptParts:
    """The parts of one prompt; any error of its template where that refuses to render the chat."""

    def __init__(self, messages: Sequence[Fields], tools: Sequence[Fields], render: Render) -> None:
        self._messages = messages
        self._tools = tools
        self._render = render
        self._num_system = next(
            (index for index, each in enumerate(messages) if each["role"] not in _SYSTEM_ROLES), len(messages)
        )
        self.text = render(messages, tools)
        self._num_marked, self._spans = self._marked()
        self._starts = [span.start for span in self._spans]
        self._num_common_with = lru_cache(None)(lambda first: num_common(self.text, render(messages, tools[:first])))
        self._media_in = lru_cache(None)(self._found_media)
        self._calls_end = lru_cache(None)(self._found_calls_end)

    def at(self, start: int, end: int) -> PromptPart | None:
        """The part in which the token of the characters from `start` to `end` lies; None if that is unknown."""
        if not 0 <= start < min(end, len(self.text)) or start >= self._num_marked:
            return None
        index = bisect_right(self._starts, start) - 1
        before = self._spans[index] if index >= 0 else None
        after = self._spans[index + 1] if index + 1 < len(self._spans) else None
        if before is not None and start < before.end:
            return self._message(before.message, kind_of(self.text, start, end))
        if after is not None and after.start < end:
            return self._message(after.message, kind_of(self.text, after.start, end))
        medium = next((each for each in self.media if each[0] <= start < each[1]), None)
        if medium is not None:
            return self._message(medium[2], medium[3])
        kind = kind_of(self.text, start, end)
        if before is not None and after is not None and before.message == after.message:
            return self._message(before.message, kind)
        tool = self._tool(start, kind)
        if tool is not None:
            return tool
        if before is not None and start < self._calls_end(before.message):
            return self._message(before.message, kind)
        return PromptPart(TEMPLATE, None, kind)

    def around(self, start: int, end: int) -> PromptPart | None:
        """The part in which all characters from `start` to `end` lie; None if they lie in several."""
        found = [self.at(each, each + 1) for each in range(start, end)]
        places = {None if part is None else part._replace(kind=None) for part in found}
        return places.pop() if len(places) == 1 else None

    @cached_property
    def media(self) -> list[tuple[int, int, int, str]]:
        """Where the media of each message stand, in characters, with the message and their kind."""
        found = []
        for index, message in enumerate(self._messages):
            kinds = [_MEDIA[part["type"]] for part in _parts_of(message) if part.get("type") in _MEDIA]
            bounds = self._media_in(index) if kinds else None
            if bounds is not None:
                found.append((*bounds, index, kinds[0]))
        return found

    @property
    def num_media(self) -> int:
        """Images, videos and sounds in the messages."""
        return sum(part.get("type") in _MEDIA for message in self._messages for part in _parts_of(message))

    def _message(self, index: int, kind: str | None) -> PromptPart:
        if index < self._num_system:
            return PromptPart(SYSTEM, None, kind)
        return PromptPart(f"messages[{index}]", self._messages[index]["role"], kind)

    def _marked(self) -> tuple[int, list[Span]]:
        """How many characters of the prompt the marked one has as well, and where the marked texts stand."""
        owners: list[int] = []
        messages = [_with_marks(message, index, owners) for index, message in enumerate(self._messages)]
        rendered = self._render(messages, self._tools)
        spans, opened, at = list[Span](), dict[int, int](), 0
        texts = _MARK.split(rendered)
        for text, mark in zip(texts, _MARK.findall(rendered), strict=False):
            at += len(text)
            number, closes = divmod(ord(mark) - _FIRST_MARK, 2)
            if not closes:
                opened[number] = at
            elif number in opened and number < len(owners):
                spans.append(Span(opened.pop(number), at, owners[number]))
        return num_common("".join(texts), self.text), sorted(spans)

    def _found_media(self, index: int) -> tuple[int, int] | None:
        message = self._messages[index]
        texts = [part for part in _parts_of(message) if part.get("type") not in _MEDIA]
        without = [*self._messages[:index], {**message, "content": texts}, *self._messages[index + 1 :]]
        return bounds_of_difference(self.text, self._render(without, self._tools))

    def _tool(self, start: int, kind: str | None) -> PromptPart | None:
        if not self._tools or not self._tools_start <= start <= self._tools_end:
            return None
        if start == self._tools_end:
            return PromptPart(TOOLS, None, kind)
        # The first tool begins where another in its place differs, all others behind those before them.
        index = bisect_right(range(1, len(self._tools)), start, key=self._num_common_with)
        return PromptPart(TOOLS, self._tools[index]["function"]["name"], kind)

    @cached_property
    def _tools_start(self) -> int:
        return num_common(self.text, self._render(self._messages, [_OTHER_TOOL, *self._tools[1:]]))

    @cached_property
    def _tools_end(self) -> int:
        return num_common(self.text, self._render(self._messages, [*self._tools, _OTHER_TOOL]))

    def _found_calls_end(self, index: int) -> int:
        """Where the calls of a message end, in characters; 0 if it has none."""
        message = self._messages[index]
        if not message.get("tool_calls"):
            return 0
        *calls, last = message["tool_calls"]
        other = {**last, "function": {**last["function"], "arguments": json.dumps({_OTHER: _OTHER})}}
        changed = [*self._messages[:index], {**message, "tool_calls": [*calls, other]}, *self._messages[index + 1 :]]
        found = bounds_of_difference(self.text, self._render(changed, self._tools))
        return 0 if found is None else found[1]


def kind_of(text: str, start: int, end: int) -> str | None:
    """`date` or `number` if the token from `start` to `end` lies in something that looks like one."""
    while start < end - 1 and text[start].isspace():
        start += 1
    first = max(start - _NUM_CONTEXT, 0)
    around = text[first : end + _NUM_CONTEXT]
    for kind, pattern in (("date", _DATE), ("number", _NUMBER)):
        if any(each.start() < end - first and start - first < each.end() for each in pattern.finditer(around)):
            return kind
    return None


def num_common(left: str, right: str) -> int:
    """Characters that both begin with."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def bounds_of_difference(text: str, other: str) -> tuple[int, int] | None:
    """Where `text` is not as `other`, in characters; None if it has nothing more."""
    start = num_common(text, other)
    num_left = min(len(text), len(other)) - start
    behind = num_common(text[len(text) - num_left :][::-1], other[len(other) - num_left :][::-1])
    end = len(text) - behind
    return (start, end) if start < end else None


def _parts_of(message: Fields) -> Sequence[Fields]:
    content = message.get("content")
    return content if isinstance(content, list) else ()


def _with_marks(message: Fields, index: int, owners: list[int]) -> Fields:
    """The same message with its texts between marks, each pair noted in `owners` as that of message `index`."""

    def mark(text: str) -> str:
        return "".join(_between_marks(text, index, owners))

    marked = dict(message)
    content = message.get("content")
    if isinstance(content, str):
        marked["content"] = mark(content)
    elif isinstance(content, list):
        marked["content"] = [
            {**part, "text": mark(part["text"])} if isinstance(part.get("text"), str) else part for part in content
        ]
    if isinstance(message.get("reasoning_content"), str):
        marked["reasoning_content"] = mark(message["reasoning_content"])
    if message.get("tool_calls"):
        marked["tool_calls"] = [_call_with_marks(call, mark) for call in message["tool_calls"]]
    return marked


def _call_with_marks(call: Fields, mark: Callable[[str], str]) -> Fields:
    function = call["function"]
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = _JSON_STRING.sub(lambda found: _value_with_marks(found, mark), arguments)
    return {**call, "function": {**function, "name": mark(function["name"]), "arguments": arguments}}


def _value_with_marks(found: re.Match[str], mark: Callable[[str], str]) -> str:
    return found[0] if found[2] else f'"{mark(found[1])}"'


def _between_marks(text: str, index: int, owners: list[int]) -> Iterator[str]:
    for piece in _TAG.split(text):
        core = piece.strip()
        if not core or _TAG.fullmatch(piece) or 2 * len(owners) >= _MAX_MARKS:
            yield piece
            continue
        number = _FIRST_MARK + 2 * len(owners)
        owners.append(index)
        before, after = piece.split(core, 1)
        yield f"{before}{chr(number)}{core}{chr(number + 1)}{after}"
