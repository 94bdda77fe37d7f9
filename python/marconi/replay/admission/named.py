"""Admission rules by name, behind the `@` of a policy, with their numbers of tokens, each after a colon.

    judicious[:GRID]                        Marconi's
    every-block[:N[:GRID]]                  a state at every N tokens (default 32, vLLM+ of the paper)
    chunk-end[:INTERVAL[:GRID[:CHUNK]]]     SGLang's `extra_buffer`: tracking interval (default 256), chunk grid (64)
                                            and chunked prefill (8192)
    no-buffer[:CHUNK[:GRID]]                SGLang's `no_buffer`: chunked prefill (default 8192)

GRID cuts positions to its multiples, `exact` to the trace's unit, which is the default but for `chunk-end`. There it is
the gated delta rule's; SGLang takes a Mamba2 model's own chunk size, which a model profile does not hold.

A state cannot stand inside a unit of the trace, so a number that is given must be a multiple of the unit, and a default
is rounded up to one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from marconi.policy.admission.base import Admission
from marconi.policy.admission.plan import Judicious
from marconi.replay.admission.chunk_end import ExtraBuffer, NoBuffer
from marconi.replay.admission.every_block import EveryBlock

EXACT: Final = "exact"


@dataclass(frozen=True, slots=True)
class _Form:
    """The numbers that a rule takes, by name and default, and how it is made from them, in their order."""

    numbers: tuple[tuple[str, int], ...]
    make: Callable[..., Admission]


def _chunk_end(interval_tokens: int, grid_tokens: int, chunk_tokens: int) -> Admission:
    if chunk_tokens < grid_tokens:
        raise ValueError(f"CHUNK must be at least the grid of {grid_tokens} tokens, got {chunk_tokens}")
    return ExtraBuffer(grid_tokens, interval_tokens, chunk_tokens)


_BUFFERED: Final = ExtraBuffer()
ADMISSIONS: Final = MappingProxyType(
    {
        "judicious": _Form((("GRID", 1),), Judicious),
        "every-block": _Form((("N", EveryBlock().block_tokens), ("GRID", 1)), EveryBlock),
        "chunk-end": _Form(
            (
                ("INTERVAL", _BUFFERED.interval_tokens),
                ("GRID", _BUFFERED.grid_tokens),
                ("CHUNK", _BUFFERED.chunk_tokens),
            ),
            _chunk_end,
        ),
        "no-buffer": _Form(
            (("CHUNK", NoBuffer().chunk_tokens), ("GRID", 1)),
            lambda chunk_tokens, grid_tokens: NoBuffer(grid_tokens, chunk_tokens),
        ),
    }
)


def admission_of(text: str, unit_tokens: int) -> Admission:
    """The rule that `text` names, for a trace whose unit is `unit_tokens`; `ValueError` for what cannot be."""
    name, *given = text.split(":")
    form = ADMISSIONS.get(name)
    if form is None:
        raise ValueError(f"an admission must be one of {', '.join(ADMISSIONS)}, got {name!r}")
    if len(given) > len(form.numbers):
        syntax = ":".join((name, *(number for number, _ in form.numbers)))
        raise ValueError(f"the admission must be {syntax} or a beginning of it, got {text!r}")
    defaults = [-(-default // unit_tokens) * unit_tokens for _, default in form.numbers]
    try:
        numbers = [_number(part, number, unit_tokens) for part, (number, _) in zip(given, form.numbers, strict=False)]
        return form.make(*numbers, *defaults[len(numbers) :])
    except ValueError as error:
        raise ValueError(f"admission {text!r}: {error}") from None


def _number(text: str, name: str, unit_tokens: int) -> int:
    if name == "GRID" and text == EXACT:
        return unit_tokens
    tokens = int(text) if text.isascii() and text.isdigit() and len(text) < 20 else 0
    if tokens < 1:
        right = "a whole number of tokens, 1 or more" + (f", or {EXACT}" if name == "GRID" else "")
        raise ValueError(f"{name} must be {right}, got {text!r}")
    if tokens % unit_tokens:
        raise ValueError(f"{name} must be a multiple of the trace's unit, {unit_tokens} tokens, got {tokens}")
    return tokens
