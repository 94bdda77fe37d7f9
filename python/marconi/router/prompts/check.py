"""Whether a worker tokenizes as this router does, asked of the worker.

    probe    what is posted to `/v1/tokenize`: a text, or a chat for the worker's own template
    verdict  SHA-256 over the ids that come back, as unsigned 32-bit numbers, is the one of this router's ids

The endpoint is SGLang's own; it takes a worker's `--api-key` as `Authorization: Bearer`, and no admin key. A chat is
rendered by the code that serves chats, with the worker's `--chat-template` and `--default-chat-template-kwargs`. The
probes hold what tokenizers and templates part over: every script, marks apart and composed, special tokens written in a
text, whitespace, digits, tools, calls and their results, parts, reasoning, a cut answer.

What they do not show: `--completion-template`, adapters, and texts that two tokenizers agree on here and not elsewhere.
A chat that the template refuses (no role `system`, say) is no probe. Templates may print the date, so probes are made
when they are asked.

Source: `srt/entrypoints/openai/serving_tokenize.py`.
"""

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Final

from marconi.router.prompts.base import Unreadable
from marconi.router.prompts.fields import shown
from marconi.router.prompts.reader import CHAT, TokenizingReader

TOKENIZE: Final = "/v1/tokenize"
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
_TOOL: Final = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": 'Says "what" it is & how <much>',
        "parameters": {
            "type": "object",
            "properties": {"what": {"type": "string", "enum": ["größe", "名前"]}, "count": {"type": "integer"}},
            "required": ["what"],
        },
    },
}
_ASKED: Final = {"role": "user", "content": "What is it? 这是什么"}
_CALL: Final = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {
            "id": "call_1",
            "type": "function",
            "function": {"name": "look_up", "arguments": '{"what": "größe", "count": 2}'},
        }
    ],
}
_CHATS: Final[Mapping[str, dict[str, Any]]] = {
    "chat": {"messages": [{"role": "system", "content": "Be brief."}, _ASKED]},
    "chat without a system message": {"messages": [_ASKED]},
    "chat of turns": {
        "messages": [_ASKED, {"role": "assistant", "content": " It is it. ", "reasoning_content": "Hm."}, _ASKED],
    },
    "chat of parts": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "one "}, {"type": "text", "text": " two"}]}]
    },
    "chat with tools": {"messages": [_ASKED], "tools": [_TOOL]},
    "chat with calls": {
        "messages": [_ASKED, _CALL, {"role": "tool", "tool_call_id": "call_1", "content": "12 \n"}],
        "tools": [_TOOL],
    },
    "chat without thinking": {"messages": [_ASKED], "reasoning_effort": "none"},
    "chat with a cut answer": {
        "messages": [_ASKED, {"role": "assistant", "content": "It is"}],
        "continue_final_message": True,
    },
}


@dataclass(frozen=True, slots=True)
class Probe:
    """One question to a worker."""

    name: str
    path: str
    body: Mapping[str, Any]
    expected_hash: str
    """SHA-256 of this router's ids, hexadecimal."""


def probes(reader: TokenizingReader) -> list[Probe]:
    """All that `reader` can answer itself."""
    return list(_probes(reader))


def verify(probe: Probe, answer: object, worker: str) -> None:
    """Raise `ValueError` with one line for a worker whose answer to `probe` is not this router's."""
    tokens = answer.get("tokens") if isinstance(answer, dict) else None
    if not isinstance(tokens, list) or not all(type(each) is int and 0 <= each <= _MAX_ID for each in tokens):
        raise ValueError(
            f"{worker}: {probe.path} answered {shown(answer)} to the probe '{probe.name}'; tokens of SGLang are right"
        )
    found = hash_of(tokens)
    if found != probe.expected_hash:
        raise ValueError(
            f"{worker}: its tokenizer is not this router's: the probe '{probe.name}' hashes to "
            f"{found[:_SHOWN_DIGITS]} there, to {probe.expected_hash[:_SHOWN_DIGITS]} here"
        )


def hash_of(ids: Sequence[int]) -> str:
    """SHA-256 over ids as unsigned 32-bit numbers, little-endian, hexadecimal."""
    packed = array("I", ids)
    if packed.itemsize != 4:  # pragma: no cover
        raise ValueError(f"unsigned numbers of {packed.itemsize} bytes; 4 are right")
    return sha256(packed.tobytes()).hexdigest()


def _probes(reader: TokenizingReader) -> Iterator[Probe]:
    tokenizer = reader.chat.tokenizer
    texts = {**_TEXTS, "special tokens": " a".join(("", *sorted(tokenizer.added_texts), ""))}
    for name, text in texts.items():
        for adds_special in (True, False):
            ids = tokenizer.encode(text) if adds_special else tokenizer.encode_chat(text)
            body = {"prompt": text, "add_special_tokens": adds_special}
            yield Probe(name if adds_special else f"{name}, bare", TOKENIZE, body, hash_of(ids))
    for name, chat in _CHATS.items():
        try:
            read = reader.read(CHAT, chat).ids
        except Unreadable:
            continue
        if read is not None:
            yield Probe(name, TOKENIZE, chat, hash_of(read))
