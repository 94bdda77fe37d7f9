"""Records decoded into msgspec structs: a format declares its fields, and a fault names the field and its value.

A number written as a string, a truth value, NaN and infinity are wrong, not converted. Every number has an upper bound
that no real trace comes near, so that a corrupt one ends here and not in an overflow or in all of the memory.
"""

import re
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Generic, TypeAlias, TypeVar

import msgspec

from marconi.replay.trace.base import BadRecord
from marconi.replay.trace.identity import MAX_ID

MAX_TOKENS = 2**24
"""The most tokens of a prompt or an output; models with 10 million of context are the largest there are."""
MAX_TIME_S = 10**12
"""The latest time: 30,000 years, be it from the start of a trace or from 1970."""
MAX_INTEGER = 2**63 - 1
"""The largest of other whole numbers."""

PromptTokens: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)]
Tokens: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]
Seconds: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=MAX_TIME_S)]
Milliseconds: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=MAX_TIME_S * 10**3)]
Microseconds: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_TIME_S * 10**6)]
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_INTEGER)]
BlockHash: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
Id: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_ID)]
"""An id that a path can hold as it is."""

T = TypeVar("T")

_FAULT = re.compile(r"(.*?)(?: - at `\$\.?(.*)`)?", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.*)`")
_WRONG = re.compile(r"Expected (.*?)(?:, got `(.*)`)?")
_STEP = re.compile(r"\[(\d+)\]|([^.\[\]]+)")


class RecordDecoder(Generic[T]):
    """Decodes records of the struct `kind`; what is not one is a `BadRecord`.

    `choices` says, for each field with a fixed set of values, which these are.
    """

    def __init__(self, kind: type[T], choices: dict[str, str] | None = None) -> None:
        self._kind = kind
        self._json = msgspec.json.Decoder(kind)
        self._choices = choices or {}

    def __call__(self, text: bytes) -> T:
        """The record that the JSON `text` holds."""
        try:
            return self._json.decode(text)
        except msgspec.ValidationError as error:
            raise self._bad_record(str(error), text) from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            what = str(error).removeprefix("JSON is malformed: ")
            if text.strip() in (b"{", b"["):
                raise BadRecord(
                    f"not JSON ({what}): cut off, or of several lines, and must be one object a line"
                ) from None
            raise BadRecord(f"not JSON ({what}): cut off or malformed") from None

    def convert(self, value: Any, *, strict: bool = True) -> T:
        """The record that parsed JSON holds; numbers may be strings if not `strict`."""
        try:
            return msgspec.convert(value, self._kind, strict=strict)
        except msgspec.ValidationError as error:
            raise self._bad_record(str(error), value) from None

    def _bad_record(self, error: str, record: Any) -> BadRecord:
        fault = _FAULT.fullmatch(error)
        assert fault is not None, "the pattern matches any text"
        what, path = fault[1], fault[2] or ""
        if missing := _MISSING.fullmatch(what):
            return BadRecord(f"{path}.{missing[1]} is missing".removeprefix("."))
        wrong = _WRONG.fullmatch(what)
        if wrong:
            expected = wrong[1].replace("`", "")
        elif what.startswith("Invalid"):
            expected = self._choices.get(path.rpartition(".")[2], "a known value")
        elif what.endswith("out of range"):
            expected = "in range"
        else:  # raised by the struct itself
            return BadRecord(f"{path}: {what}" if path else what)
        got = _value_at(path, record) or (wrong and wrong[2]) or "more digits than are read"
        return BadRecord(f"{path or 'the record'} must be {expected}, got {got}")


def _value_at(path: str, record: Any) -> str | None:
    """The value at `path` of `record`, as a message shows it; None where it cannot be decoded."""
    try:
        value = msgspec.json.decode(record) if isinstance(record, bytes) else record
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    for index, key in _STEP.findall(path):
        value = value[int(index)] if index else value[key]
    return shown(value)


def check_num_blocks(hash_ids: Sequence[int], num_tokens: int, block_tokens: int, *, partial_named: bool) -> None:
    """Checks that `hash_ids` names the blocks of a prompt of `num_tokens`.

    A last block that is not full may be left out unless `partial_named`.
    """
    whole, most = num_tokens // block_tokens, -(-num_tokens // block_tokens)
    if len(hash_ids) != most and (partial_named or len(hash_ids) != whole):
        raise BadRecord(
            f"hash_ids must hold {most} for {num_tokens} tokens in blocks of {block_tokens}, got {len(hash_ids)}"
        )


def check_order(field: str, value: Any, before: Any) -> None:
    """Checks that `value` is not below `before`, the last good record's; None where there was none."""
    if before is not None and value < before:
        raise BadRecord(f"{field} must be at least {_plain(before)} as in the record before it, got {_plain(value)}")


def _plain(value: Any) -> str:
    return f"{value:.15g}" if isinstance(value, float) else str(value)


def clock_s(field: str, text: str) -> float:
    """Seconds since 1970 of an ISO 8601 date and time, in UTC without a zone."""
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise BadRecord(f"{field} must be a number or an ISO 8601 date and time, got {shown(text)}") from None
    return (time if time.tzinfo is not None else time.replace(tzinfo=UTC)).timestamp()


def shown(value: Any) -> str:
    """`value` as a message shows it, cut where it is long."""
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
