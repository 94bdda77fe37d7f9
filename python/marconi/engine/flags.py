"""The `--marconi-...` flags, one table: option, environment twin, unit, default.

SGLang spawns its processes, and an offline `sglang.Engine` has no command line, so a flag travels as its
environment twin: the parsed command line is written to the environment, and every process reads `from_environ`.
"""

import argparse
import math
import sys
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from enum import StrEnum
from functools import partial
from itertools import pairwise
from typing import Any, NoReturn

from marconi.engine.policies import AdmissionName, EvictionName, PolicyChoice
from marconi.engine.version import Refusal


class Check(StrEnum):
    """When the cache checks its invariants."""

    OFF = "off"
    IDLE = "idle"


@dataclass(frozen=True, slots=True)
class Flags:
    """What the operator asked of the backend."""

    eviction: EvictionName = EvictionName.MARCONI
    alpha: float = 0.0
    admission: AdmissionName = AdmissionName.JUDICIOUS
    ghost_tokens: int = 10_000_000
    check_invariants: Check = Check.OFF
    report_interval_s: float = 60.0

    @property
    def policy(self) -> PolicyChoice:
        """The policies that the flags choose."""
        return PolicyChoice(self.eviction, self.alpha, self.admission, max_ghost_tokens=self.ghost_tokens)


@dataclass(frozen=True, slots=True)
class _Spec:
    """One flag: the field of `Flags` that it fills, how it is spelt, and how its text is read."""

    field: str
    option: str
    metavar: str
    help: str
    read: Callable[[str], Any]

    @property
    def env(self) -> str:
        """The environment twin: `--marconi-a-b` is `MARCONI_A_B`."""
        return self.option.removeprefix("--").replace("-", "_").upper()


def _one_of(names: type[StrEnum], text: str) -> StrEnum:
    try:
        return names(text)
    except ValueError:
        raise ValueError(f"{text!r} is not one of {', '.join(names)}") from None


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not (math.isfinite(seconds) and seconds >= 0):
        raise ValueError(f"{text!r} is not a number of seconds, 0 or more")
    return seconds


def _tokens(text: str) -> int:
    try:
        tokens = int(text)
    except ValueError:
        tokens = -1
    if tokens < 0:
        raise ValueError(f"{text!r} is not a number of tokens, 0 or more")
    return tokens


def _alpha(text: str) -> float:
    try:
        alpha = float(text)
    except ValueError:
        alpha = math.nan
    if not (math.isfinite(alpha) and alpha >= 0):
        raise ValueError(f"{text!r} is not a number, 0 or more")
    return alpha


SPECS = (
    _Spec(
        "eviction",
        "--marconi-eviction",
        f"{{{','.join(EvictionName)}}}",
        "What goes first when KV or states are short; states on probation go before anything.",
        partial(_one_of, EvictionName),
    ),
    _Spec(
        "alpha",
        "--marconi-alpha",
        "ALPHA",
        "Weight of FLOPs saved per byte against recency under --marconi-eviction marconi; 0 is LRU.",
        _alpha,
    ),
    _Spec(
        "admission",
        "--marconi-admission",
        f"{{{','.join(AdmissionName)}}}",
        "Which states are kept: at branch points, before a prompt's last token and at the end, each at its exact "
        "position; or SGLang's own, on the grid of its kernels' chunks.",
        partial(_one_of, AdmissionName),
    ),
    _Spec(
        "ghost_tokens",
        "--marconi-ghost-tokens",
        "TOKENS",
        "Tokens of evicted prefixes that are remembered, so that the next request with one of them is known for its "
        "second or third; 8 bytes of host memory each.",
        _tokens,
    ),
    _Spec(
        "check_invariants",
        "--marconi-check-invariants",
        f"{{{','.join(Check)}}}",
        "When the cache checks that its tree, locks and budgets agree: never, or each time the scheduler falls "
        "idle (costs time in proportion to the tree).",
        partial(_one_of, Check),
    ),
    _Spec(
        "report_interval_s",
        "--marconi-report-interval-s",
        "SECONDS",
        "Least time between two log lines with the hit rate and the use of both budgets; 0 reports never.",
        _seconds,
    ),
)
_DEFAULTS = {field.name: field.default for field in fields(Flags)}


def add_to(parser: argparse.ArgumentParser) -> None:
    """Add the flags to SGLang's own parser, as text: `take_from` reads them, with errors of one line.

    `argparse` answers an error with the usage of all of SGLang's flags, hundreds of lines; where the error is
    about one of ours, or on a command line that asks for this backend, it says its one line alone.
    """
    group = parser.add_argument_group("marconi", "Prefix caching for hybrid models (--radix-cache-backend marconi)")
    for spec in SPECS:
        default = _DEFAULTS[spec.field]
        group.add_argument(
            spec.option,
            metavar=spec.metavar,
            default=None,
            help=f"{spec.help} Default: {default}. Environment: {spec.env}.",
        )
    usage_error = parser.error

    def error(message: str) -> NoReturn:
        if not _is_about_us(message, sys.argv[1:]):
            usage_error(message)
        raise SystemExit(_print_refusal(parser.prog, message))

    parser.error = error  # type: ignore[method-assign]


def _is_about_us(message: str, argv: Sequence[str]) -> bool:
    words = [*message.split(), *argv]
    chosen = "--radix-cache-backend=marconi" in argv or ("--radix-cache-backend", "marconi") in pairwise(argv)
    return chosen or any(word.startswith("--marconi-") for word in words)


def _print_refusal(prog: str, message: str) -> int:
    unknown = [word for word in message.split() if word.startswith("--marconi-")]
    if message.startswith("unrecognized arguments") and unknown:
        known = [spec.option for spec in SPECS]
        near = get_close_matches(unknown[0], known, n=1, cutoff=0.5)
        message += f" (did you mean {near[0]}?)" if near else f" (known: {', '.join(known)})"
    print(f"{prog}: error: {message}", file=sys.stderr)
    return 2


def given(args: argparse.Namespace) -> dict[str, str]:
    """The flags that a parsed command line gives, as text, by option."""
    texts = {spec.option: getattr(args, spec.option.removeprefix("--").replace("-", "_"), None) for spec in SPECS}
    return {option: text for option, text in texts.items() if text is not None}


def take_from(args: argparse.Namespace, environ: MutableMapping[str, str]) -> Flags:
    """Read the flags of a parsed command line into `environ`, and check them.

    A flag given on the command line wins over its environment twin. Raises `Refusal` naming flag and value.
    """
    texts = given(args)
    for spec in SPECS:
        if spec.option in texts:
            _read(spec, texts[spec.option], spec.option)
            environ[spec.env] = texts[spec.option]
    return from_environ(environ)


def from_environ(environ: Mapping[str, str]) -> Flags:
    """The flags as the environment gives them; raises `Refusal` naming variable and value."""
    values = {spec.field: _read(spec, environ[spec.env], spec.env) for spec in SPECS if spec.env in environ}
    return Flags(**values)


def _read(spec: _Spec, text: str, source: str) -> Any:
    try:
        return spec.read(text)
    except ValueError as error:
        raise Refusal(f"{source}: {error}") from None
