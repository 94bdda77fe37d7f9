"""Values of a body, read as leniently as a worker reads them.

SGLang's requests are pydantic models in lax mode: a flag may be the text "true", a whole number a float. What only
laxness would make of a prompt (its ids as texts, say) is `Unknowable`; what no reading admits is `Unreadable`.

Source: `srt/entrypoints/openai/protocol.py`, and pydantic's conversion table.
"""

from array import array
from collections.abc import Mapping
from typing import Any, Final

from marconi.router.prompts.base import Unknowable, Unreadable

_TRUE: Final = frozenset({"1", "true", "t", "yes", "y", "on"})
_FALSE: Final = frozenset({"0", "false", "f", "no", "n", "off"})
_SHOWN_CHARACTERS: Final = 40


def shown(value: object) -> str:
    """A value for a line to its sender: on one line, cut where it is long."""
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "..."


def flag(body: Mapping[str, Any], name: str) -> bool:
    """A truth value, false where there is none."""
    value = body.get(name, False)
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in _TRUE | _FALSE:
        return value.lower() in _TRUE
    if isinstance(value, int | float) and value in (0, 1):
        return bool(value)
    raise Unreadable(f"{name}: {shown(value)} is no truth value; true or false is right")


def optional_text(body: Mapping[str, Any], name: str, where: str = "") -> str | None:
    """A text, or None."""
    value = body.get(name)
    if value is None or isinstance(value, str):
        return value
    raise Unreadable(f"{where}{name}: {shown(value)} is no text")


def optional_flag(body: Mapping[str, Any], name: str) -> bool | None:
    """A truth value that a template may print, so taken only where it is one."""
    value = body.get(name)
    if value is None or isinstance(value, bool):
        return value
    raise Unknowable(f"{name} as {shown(value)}")


def optional_list(body: Mapping[str, Any], name: str, where: str = "") -> list[Any] | None:
    """A list, or None."""
    value = body.get(name)
    if value is None or isinstance(value, list):
        return value
    raise Unreadable(f"{where}{name}: {shown(value)} is no list")


def ids_of(values: list[Any], name: str) -> "array[int]":
    """Token ids, packed."""
    try:
        ids = array("q", values)
    except OverflowError:
        raise Unknowable(f"{name}: an id beyond 63 bits") from None
    except TypeError:
        for value in values:
            if not isinstance(value, int | float | str):
                raise Unreadable(f"{name}: {shown(value)} among token ids") from None
        raise Unknowable(f"{name}: ids that are no whole numbers") from None
    if ids and min(ids) < 0:
        raise Unknowable(f"{name}: a negative id")
    return ids
