"""Checked access to the fields of a record: each function gives the value or raises `BadRecord` with what is wrong.

A number written as a string, a truth value, NaN and infinity are wrong, not converted. Every number has an upper bound
that no real trace comes near, so that a corrupt one ends here and not in an overflow or in all of the memory.
"""

import json
import math
import sys
from collections.abc import Sequence
from typing import Any

from marconi.replay.trace.base import BadRecord

MAX_ID = 2**32 - 1
"""The largest id that a path can hold."""

MAX_TOKENS = 2**24
"""The most tokens of a prompt or an output; models with 10 million of context are the largest there are."""
MAX_TIME_S = 1e12
"""The latest time: 30,000 years, be it from the start of a trace or from 1970."""
MAX_INTEGER = 2**63 - 1
"""The largest of other whole numbers."""

Record = dict[str, Any]


def parsed(line: bytes | str) -> Any:
    """The JSON value of `line`."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise not_json(error) from None


def not_json(error: Exception, start: int = 0) -> BadRecord:
    """The message of the JSON decoder's `error`, for a text that begins at character `start`."""
    if isinstance(error, json.JSONDecodeError):
        what = error.msg.removesuffix(" at")
        return BadRecord(f"not JSON (character {error.pos - start}: {what}): cut off or malformed")
    if isinstance(error, UnicodeDecodeError | RecursionError):
        return BadRecord(f"not JSON ({error})")
    return BadRecord(f"holds a number of more than {sys.get_int_max_str_digits()} digits")


def record(value: Any) -> Record:
    """`value`, which must be a JSON object."""
    if not isinstance(value, dict):
        raise BadRecord(f"{shown(value)} stands where an object should")
    return value


def integer(record: Record, key: str, minimum: int = 0, maximum: int = MAX_INTEGER) -> int:
    """A whole number from `minimum` to `maximum`."""
    value = _present(record, key)
    if type(value) is not int:
        raise BadRecord(f"{key} is {shown(value)}, must be a whole number")
    check_bounds(key, value, minimum, maximum)
    return value


def num_tokens(record: Record, key: str, minimum: int = 0) -> int:
    """A number of tokens of a prompt or an output."""
    return integer(record, key, minimum, MAX_TOKENS)


def time_s(record: Record, key: str, per_second: int = 1) -> float:
    """A time of at least 0 in seconds, written in units of which there are `per_second` in one."""
    value = _present(record, key)
    if type(value) not in (int, float) or (type(value) is float and not math.isfinite(value)):
        raise BadRecord(f"{key} is {shown(value)}, must be a number")
    check_bounds(key, value, 0, MAX_TIME_S * per_second)
    return float(value) / per_second


def check_bounds(key: str, value: float, minimum: int, maximum: float) -> None:
    """Checks that the number `value` lies from `minimum` to `maximum`."""
    if value < minimum:
        raise BadRecord(f"{key} is {shown(value)}, must be at least {minimum}")
    if value > maximum:
        most = f"{maximum:g}" if isinstance(maximum, float) else f"{maximum}"
        raise BadRecord(f"{key} is {shown(value)}, must be at most {most}")


def text(record: Record, key: str) -> str:
    """A string."""
    value = _present(record, key)
    if not isinstance(value, str):
        raise BadRecord(f"{key} is {shown(value)}, must be a text")
    return value


def name(record: Record, key: str) -> str | int:
    """A whole number or a string that names something."""
    value = _present(record, key)
    if type(value) is not int and not isinstance(value, str):
        raise BadRecord(f"{key} is {shown(value)}, must be a whole number or a text")
    return value


def objects(record: Record, key: str) -> list[Record]:
    """A list of objects."""
    value = _present(record, key)
    if not isinstance(value, list):
        raise BadRecord(f"{key} is {shown(value)}, must be a list")
    for index, entry in enumerate(value):
        if not isinstance(entry, dict):
            raise BadRecord(f"{key}[{index}] is {shown(entry)}, must be an object")
    return value


def ids(record: Record, key: str) -> list[int]:
    """A list of whole numbers of at least 0."""
    value = _present(record, key)
    if not isinstance(value, list):
        raise BadRecord(f"{key} is {shown(value)}, must be a list of whole numbers")
    if not set(map(type, value)) <= {int}:
        wrong = next(entry for entry in value if type(entry) is not int)
        raise BadRecord(f"{key} holds {shown(wrong)}, must hold whole numbers")
    if value and min(value) < 0:
        raise BadRecord(f"{key} holds {shown(min(value))}, must hold numbers of at least 0")
    return value


def check_num_blocks(block_ids: Sequence[int], num_tokens: int, block_tokens: int, partial: str) -> None:
    """Checks that `block_ids` names the blocks of a prompt of `num_tokens`.

    `partial` says what becomes of a last block that is not full: "named", or "optional".
    """
    whole, most = num_tokens // block_tokens, -(-num_tokens // block_tokens)
    if len(block_ids) != most and not (partial == "optional" and len(block_ids) == whole):
        raise BadRecord(
            f"{len(block_ids)} hash_ids for {num_tokens} tokens, must be {most} with blocks of {block_tokens} tokens"
        )


def _present(record: Record, key: str) -> Any:
    if key not in record:
        raise BadRecord(f"{key} is missing")
    return record[key]


def shown(value: Any) -> str:
    """`value` as a message shows it, cut where it is long."""
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
