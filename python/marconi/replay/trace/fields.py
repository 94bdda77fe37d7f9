"""Checked access to the fields of a record: each function gives the value or raises `BadRecord` with what is wrong.

A number written as a string, a truth value, NaN and infinity are wrong, not converted.
"""

import json
import math
from collections.abc import Sequence
from typing import Any

from marconi.replay.trace.base import BadRecord

MAX_ID = 2**32 - 1
"""The largest id that a path can hold."""

Record = dict[str, Any]


def parsed(line: bytes | str) -> Any:
    """The JSON value of `line`."""
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        what = error.msg.removesuffix(" at")
        raise BadRecord(f"not JSON (character {error.pos}: {what}): cut off or malformed") from None
    except (ValueError, RecursionError) as error:
        raise BadRecord(f"not JSON ({error})") from None


def record(value: Any) -> Record:
    """`value`, which must be a JSON object."""
    if not isinstance(value, dict):
        raise BadRecord(f"{_shown(value)} stands where an object should")
    return value


def integer(record: Record, key: str, minimum: int = 0) -> int:
    """A whole number of at least `minimum`."""
    value = _present(record, key)
    if type(value) is not int:
        raise BadRecord(f"{key} is {_shown(value)}, must be a whole number")
    if value < minimum:
        raise BadRecord(f"{key} is {value}, must be at least {minimum}")
    return value


def number(record: Record, key: str) -> float:
    """A finite number of at least 0."""
    value = _present(record, key)
    if type(value) not in (int, float) or not math.isfinite(value):
        raise BadRecord(f"{key} is {_shown(value)}, must be a number")
    if value < 0:
        raise BadRecord(f"{key} is {value}, must be at least 0")
    return float(value)


def text(record: Record, key: str) -> str:
    """A string."""
    value = _present(record, key)
    if not isinstance(value, str):
        raise BadRecord(f"{key} is {_shown(value)}, must be a text")
    return value


def name(record: Record, key: str) -> str | int:
    """A whole number or a string that names something."""
    value = _present(record, key)
    if type(value) is not int and not isinstance(value, str):
        raise BadRecord(f"{key} is {_shown(value)}, must be a whole number or a text")
    return value


def objects(record: Record, key: str) -> list[Record]:
    """A list of objects."""
    value = _present(record, key)
    if not isinstance(value, list):
        raise BadRecord(f"{key} is {_shown(value)}, must be a list")
    for index, entry in enumerate(value):
        if not isinstance(entry, dict):
            raise BadRecord(f"{key}[{index}] is {_shown(entry)}, must be an object")
    return value


def ids(record: Record, key: str) -> list[int]:
    """A list of whole numbers of at least 0."""
    value = _present(record, key)
    if not isinstance(value, list):
        raise BadRecord(f"{key} is {_shown(value)}, must be a list of whole numbers")
    if not set(map(type, value)) <= {int}:
        wrong = next(entry for entry in value if type(entry) is not int)
        raise BadRecord(f"{key} holds {_shown(wrong)}, must hold whole numbers")
    if value and min(value) < 0:
        raise BadRecord(f"{key} holds {min(value)}, must hold numbers of at least 0")
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


def _shown(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 40 else f"{shown[:37]}..."
