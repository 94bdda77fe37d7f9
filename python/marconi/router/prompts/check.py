"""Probes: texts and chats that a worker tokenizes, to compare its tokenizer with this router's.

    probe    the body of a `POST /v1/tokenize`: a text, or a chat for the worker's own template
    answer   compared by SHA-256 over its ids, as unsigned 32-bit numbers
    verdict  the kinds of prompts that this router may tokenize itself: those of which all agree

The endpoint is SGLang's own; it takes a worker's `--api-key` as `Authorization: Bearer`, and no admin key. A chat is
rendered by the code that serves chats, with the worker's `--chat-template` and `--default-chat-template-kwargs`. The
probes have what tokenizers and templates differ in: every script, marks apart and composed, special tokens written in a
text, whitespace, digits, turns, parts, thinking, tools, calls.

They do not cover `--completion-template`, adapters, and differences in other texts than these. A chat that this router
has no ids of (its template refuses the role `system`, say) is no probe; a kind without any is not tokenized here.
Templates may print the date, so probes are made each time that they are sent.

Source: `srt/entrypoints/openai/serving_tokenize.py`.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Final

from marconi.router.prompts import CHAT, PromptKind
from marconi.router.prompts.reader import TokenizingReader

TOKENIZE: Final = "/v1/tokenize"
_SHOWN_CHARACTERS: Final = 40
_SHOWN_DIGITS: Final = 12
_MAX_ID: Final = (1 << 32) - 1

_TEXTS: Final = {
    "plain": "The quick brown fox jumps over the lazy dog. It's 3.14159, isn't it?\n\n\tdef f(x): return x ** 2\r\n  ",
    "unicode": (
        "Ünïcödé e\u0301 \u1e9b\u0323 中文字 日本語 한국어 العربية עברית हिन्दी ไทย "
        "\U0001f469\u200d\U0001f469\u200d\U0001f467\U0001f3f3\ufe0f\u200d\U0001f308 "
        "\u200f\u00a0\u2028\u0000\x07\ufeff\ufb01 ½ \U0001d518"
    ),
    "digits": "0 12 345 6789 12345678901234567890 1,000,000.00 ٣٤٥ ²³",
}
_SYSTEM: Final = {"role": "system", "content": "Be brief."}
_ASKED: Final = {"role": "user", "content": "What is it? 这是什么"}
_ANSWERED: Final = {"role": "assistant", "content": " It is it. "}
_TWO_PARTS: Final = [{"type": "text", "text": "one "}, {"type": "text", "text": " two"}]

_TOOL: Final = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": 'Look "it" up: größe & <b>.',
        "parameters": {
            "type": "object",
            "properties": {
                "query": {"type": "string", "description": "这是什么", "enum": ["a", "b"]},
                "limit": {"type": ["integer", "null"], "default": None, "maximum": 1.5},
            },
            "required": ["query"],
        },
    },
}
_TOOL_IN_ANOTHER_ORDER: Final = {
    "function": {"parameters": {"properties": {}, "type": "object"}, "description": "", "name": "now"},
    "type": "function",
}
_CALL: Final = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "look_up", "arguments": '{"query":"größe & <b>\\n","limit":3,"more":{"a":[1.50,null,true]}}'},
}
_CALL_IN_ANOTHER_ORDER: Final = {
    "function": {"arguments": "{ }", "name": "now"},
    "index": 1,
    "type": "function",
    "id": "call_2",
}
_CALLED: Final = {"role": "assistant", "content": None, "reasoning_content": None, "tool_calls": [_CALL]}
_CALLED_TWICE: Final = {"tool_calls": [_CALL, _CALL_IN_ANOTHER_ORDER], "role": "assistant", "content": " It. "}
_RESULT: Final = {"role": "tool", "tool_call_id": "call_1", "content": ' {"it": "größe"}\n'}
_SECOND_RESULT: Final = {"role": "tool", "tool_call_id": "call_2", "name": "now", "content": ""}


def _in_parts(message: Mapping[str, Any]) -> dict[str, Any]:
    return {**message, "content": _TWO_PARTS}


_CHATS: Final[Mapping[str, tuple[PromptKind, dict[str, Any]]]] = {
    "chat": (PromptKind.CHATS, {"messages": [_SYSTEM, _ASKED]}),
    "chat without a system message": (PromptKind.CHATS, {"messages": [_ASKED]}),
    "chat of turns": (PromptKind.CHATS, {"messages": [_ASKED, _ANSWERED, _ASKED]}),
    "chat of more turns": (PromptKind.CHATS, {"messages": [_SYSTEM, _ASKED, _ANSWERED, _ASKED, _ANSWERED, _ASKED]}),
    "chat of parts": (PromptKind.PARTS, {"messages": [_in_parts(_ASKED)]}),
    "chat of parts of the system": (PromptKind.PARTS, {"messages": [_in_parts(_SYSTEM), _ASKED]}),
    "chat of parts of an answer": (PromptKind.PARTS, {"messages": [_ASKED, _in_parts(_ANSWERED), _ASKED]}),
    **{
        f"chat with {name} {value}": (
            PromptKind.THINKING,
            {"messages": [_ASKED], "chat_template_kwargs": {name: value}},
        )
        for name in ("enable_thinking", "thinking")
        for value in (False, True)
    },
    "chat with a tool": (PromptKind.TOOLS, {"messages": [_ASKED], "tools": [_TOOL]}),
    "chat with tools": (
        PromptKind.TOOLS,
        {"messages": [_SYSTEM, _ASKED], "tools": [_TOOL, _TOOL_IN_ANOTHER_ORDER], "tool_choice": "auto"},
    ),
    "chat with a call": (PromptKind.CALLS, {"messages": [_ASKED, _CALLED, _RESULT]}),
    "chat with calls": (
        PromptKind.CALLS,
        {"messages": [_SYSTEM, _ASKED, _CALLED_TWICE, _SECOND_RESULT, _RESULT, _ANSWERED, _ASKED]},
    ),
}


class Unlike(ValueError):
    """A worker's ids that are not this router's; one line."""


@dataclass(frozen=True, slots=True)
class Probe:
    """A text or a chat to be tokenized, and the expected ids."""

    name: str
    kind: PromptKind
    body: Mapping[str, Any]
    expected_hash: str | None
    """SHA-256 of this router's ids, hexadecimal; None where it has no tokenizer."""

    def hash(self, answer: object, worker: str) -> str:
        """The hash of a worker's answer; `ValueError`, one line, where that has no ids."""
        tokens = answer.get("tokens") if isinstance(answer, dict) else None
        if not isinstance(tokens, list) or not all(type(each) is int and 0 <= each <= _MAX_ID for each in tokens):
            shown = repr(answer)
            if len(shown) > _SHOWN_CHARACTERS:
                shown = f"{shown[:_SHOWN_CHARACTERS]}..."
            raise ValueError(f"{worker}: {TOKENIZE} must answer the probe '{self.name}' with tokens, got {shown}")
        return hash_of(tokens)


def probes(reader: TokenizingReader) -> list[Probe]:
    """The probes: all texts, and of each kind of chats those that `reader` has ids of, or one without ids."""
    reader, found = reader.for_workers(frozenset(PromptKind)), list[Probe]()
    tokenizer, texts = reader.tokenizer, dict(_TEXTS)
    if tokenizer is not None:
        texts["special tokens"] = " a".join(("", *tokenizer.added_texts, ""))
    for name, text in texts.items():
        for adds_special in (True, False):
            expected = None if tokenizer is None else hash_of(tokenizer.encode(text, adds_special=adds_special))
            body = {"prompt": text, "add_special_tokens": adds_special}
            found.append(Probe(name if adds_special else f"{name}, bare", PromptKind.TEXTS, body, expected))
    rendered = {name: reader.read(CHAT, chat).ids for name, (_, chat) in _CHATS.items()}
    for kind in dict.fromkeys(kind for kind, _ in _CHATS.values()):
        of_kind = {name: chat for name, (each, chat) in _CHATS.items() if each is kind}
        known = {name: ids for name in of_kind if (ids := rendered[name]) is not None}
        found += [Probe(name, kind, of_kind[name], hash_of(ids)) for name, ids in known.items()]
        if not known:
            # Nothing was compared, so nothing is alike.
            name, chat = next(iter(of_kind.items()))
            found.append(Probe(name, kind, chat, None))
    return found


def verify(probe: Probe, answer: object, worker: str) -> None:
    """Raise `Unlike` for a worker whose ids are not this router's, `ValueError` for an answer without ids."""
    found = probe.hash(answer, worker)
    if found != probe.expected_hash:
        raise Unlike(
            f"{worker}: its tokenizer is not this router's: the probe '{probe.name}' hashes to "
            f"{found[:_SHOWN_DIGITS]} there, to {(probe.expected_hash or 'nothing')[:_SHOWN_DIGITS]} here"
        )


def without(kinds: frozenset[PromptKind], unlike: PromptKind) -> frozenset[PromptKind]:
    """The kinds that are left where one is unlike: each chat is one of `CHATS`, too, and each is made of texts."""
    needs_it = {PromptKind.TEXTS: frozenset(PromptKind), PromptKind.CHATS: frozenset(PromptKind) - {PromptKind.TEXTS}}
    return kinds - needs_it.get(unlike, {unlike})


def hash_of(ids: Sequence[int]) -> str:
    """SHA-256 over ids as unsigned 32-bit numbers, little-endian, hexadecimal."""
    packed = array("I", ids)
    if packed.itemsize != 4:  # pragma: no cover
        raise ValueError(f"unsigned numbers must have 4 bytes, got {packed.itemsize}")
    return sha256(packed.tobytes()).hexdigest()
