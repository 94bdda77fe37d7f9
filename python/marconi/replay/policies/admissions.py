"""What may follow the `@` of a policy: an admission rule and its one number of tokens.

    judicious[:GRID]         Marconi's; GRID cuts positions to its multiples, `exact` is the trace's unit (the default)
    every-block[:N]          a state at every N tokens (default 32, vLLM+ of the paper)
    chunk-end[:INTERVAL]     SGLang's `extra_buffer` with its tracking interval (default 256)
    no-buffer[:CHUNK]        SGLang's `no_buffer` with its prefill chunk (default 8192)

A state cannot stand inside a unit of the trace, so a number that is given must be a multiple of the unit, and a default
is rounded up to one.
"""

from collections.abc import Callable
from types import MappingProxyType
from typing import Final

from marconi.policy.admission.base import Admission
from marconi.policy.admission.chunk_end import ExtraBuffer, NoBuffer
from marconi.policy.admission.every_block import EveryBlock
from marconi.policy.admission.judicious import Judicious


def _judicious(tokens: int | None, unit: int) -> Admission:
    return Judicious(_or_default(tokens, 1, unit))


def _every_block(tokens: int | None, unit: int) -> Admission:
    return EveryBlock(_or_default(tokens, EveryBlock().block_tokens, unit))


def _chunk_end(tokens: int | None, unit: int) -> Admission:
    plain = ExtraBuffer()
    return ExtraBuffer(
        grid_tokens=_or_default(None, plain.grid_tokens, unit),
        interval_tokens=_or_default(tokens, plain.interval_tokens, unit),
        chunk_tokens=_or_default(None, plain.chunk_tokens, unit),
    )


def _no_buffer(tokens: int | None, unit: int) -> Admission:
    return NoBuffer(grid_tokens=unit, chunk_tokens=_or_default(tokens, NoBuffer().chunk_tokens, unit))


def _or_default(tokens: int | None, default: int, unit: int) -> int:
    return -(-default // unit) * unit if tokens is None else tokens


_RULES: Final = MappingProxyType[str, Callable[[int | None, int], Admission]](
    {"judicious": _judicious, "every-block": _every_block, "chunk-end": _chunk_end, "no-buffer": _no_buffer}
)


def admission_of(text: str, unit_tokens: int) -> Admission:
    """The rule that `text` names, for a trace whose unit is `unit_tokens`; `ValueError` for what cannot be."""
    name, colon, number = text.partition(":")
    rule = _RULES.get(name)
    if rule is None:
        raise ValueError(f"unknown admission {name!r}: give one of {', '.join(_RULES)}")
    if not colon or (name == "judicious" and number == "exact"):
        return rule(None, unit_tokens)
    tokens = int(number) if number.isascii() and number.isdigit() else 0
    if tokens < 1:
        raise ValueError(f"admission {text!r}: a whole number of tokens, 1 or more, is right after the colon")
    if tokens % unit_tokens:
        raise ValueError(f"admission {text!r}: the trace's unit is {unit_tokens} tokens, a multiple of it is right")
    return rule(tokens, unit_tokens)
