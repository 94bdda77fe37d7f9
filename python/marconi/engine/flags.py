"""The `--marconi-...` flags, one table: option, environment twin, unit, default.

SGLang spawns its processes, and an offline `sglang.Engine` has no command line, so a flag travels as its
environment twin: the parsed command line is written to the environment, and every process reads `from_environ`.
"""

import argparse
import math
from collections.abc import Callable, Collection, Mapping, MutableMapping
from dataclasses import dataclass, fields
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any, Final

from marconi.engine.policies import ADMISSIONS, JUDICIOUS, PolicyChoice
from marconi.engine.version import Refusal
from marconi.events.address import Keys, TcpAddress, require_private
from marconi.policy.catalog import SERVED
from marconi.policy.eviction.utility import ALPHA

BACKEND: Final = "marconi"
"""What `--radix-cache-backend` is given to have this cache."""


class Check(StrEnum):
    """When the cache checks its invariants."""

    OFF = "off"
    IDLE = "idle"


class Time(StrEnum):
    """What ages the cache's contents."""

    SECONDS = "seconds"
    REQUESTS = "requests"
    """A quarter of a second for each request that has begun."""


@dataclass(frozen=True, slots=True)
class Flags:
    """The backend's flags, as the operator gave them."""

    eviction: str = "best"
    alpha: float = ALPHA
    ttft_budget_ms: float | None = None
    admission: str = JUDICIOUS
    ghost_tokens: int = 10_000_000
    check_invariants: Check = Check.OFF
    report_interval_s: float = 60.0
    time: Time = Time.SECONDS
    events: TcpAddress | None = None
    """Where the first rank tells; None where none does."""
    events_keys: Keys | None = None
    events_tokens: bool = False

    @property
    def policy(self) -> PolicyChoice:
        """The policies that the flags choose."""
        return PolicyChoice(
            self.eviction,
            self.alpha,
            None if self.ttft_budget_ms is None else self.ttft_budget_ms / 1000,
            self.admission,
            max_ghost_tokens=self.ghost_tokens,
        )


@dataclass(frozen=True, slots=True)
class _Spec:
    """One flag: the field of `Flags` that it fills, how it is spelt, and how its text is read."""

    field: str
    option: str
    metavar: str
    help: str
    read: Callable[[str], Any]
    default: str = ""
    """Default in words, where the field's own does not say it."""
    bare: str | None = None
    """What the option alone, without a value, stands for; None where it needs one."""

    @property
    def env(self) -> str:
        """The environment twin: `--marconi-a-b` is `MARCONI_A_B`."""
        return self.option.removeprefix("--").replace("-", "_").upper()


def _one_of(names: Collection[str], text: str) -> str:
    if text not in names:
        raise ValueError(f"{text!r} is not one of {', '.join(names)}")
    return text


def _eviction(text: str) -> str:
    if text not in SERVED:
        raise ValueError(f"{text!r} is not one of {', '.join(SERVED)}; what others there are runs in marconi replay")
    return text


def _check(text: str) -> Check:
    return Check(_one_of([*Check], text))


def _time(text: str) -> Time:
    return Time(_one_of([*Time], text))


def _finite(kind: type[int] | type[float], text: str) -> float:
    """The number that `text` spells; NaN, which no comparison holds for, where it spells none."""
    try:
        number = kind(text)
    except ValueError:
        return math.nan
    return number if -math.inf < number < math.inf else math.nan


def _seconds(text: str) -> float:
    seconds = _finite(float, text)
    if not seconds >= 0:
        raise ValueError(f"{text!r} is not a number of seconds, 0 or more")
    return seconds


def _tokens(text: str) -> int:
    tokens = _finite(int, text)
    if not tokens >= 0:
        raise ValueError(f"{text!r} is not a number of tokens, 0 or more")
    return int(tokens)


def _milliseconds(text: str) -> float:
    milliseconds = _finite(float, text)
    if not milliseconds > 0:
        raise ValueError(f"{text!r} is not a number of milliseconds above 0")
    return milliseconds


def _alpha(text: str) -> float:
    alpha = _finite(float, text)
    if not alpha >= 0:
        raise ValueError(f"{text!r} is not a number, 0 or more")
    return alpha


def _keys(text: str) -> Keys:
    return Keys.read(Path(text))


def _switch(text: str) -> bool:
    if text not in _SWITCH:
        raise ValueError(f"{text!r} is not one of {', '.join(_SWITCH)}")
    return _SWITCH[text]


_SWITCH: Final = {"off": False, "on": True}
SPECS = (
    _Spec(
        "eviction",
        "--marconi-eviction",
        f"{{{','.join(SERVED)}}}",
        "What is evicted first when KV or states are short.",
        _eviction,
        "best; marconi where an alpha is given",
    ),
    _Spec(
        "alpha",
        "--marconi-alpha",
        "NUMBER",
        "Weight of FLOPs saved per byte against recency under --marconi-eviction marconi: how many times the age at "
        "which states are evicted the dearest one outlives the cheapest; 0 is LRU.",
        _alpha,
    ),
    _Spec(
        "ttft_budget_ms",
        "--marconi-ttft-budget-ms",
        "MS",
        "Time to first token, in milliseconds, that is good enough: --marconi-eviction tail keeps as many "
        "conversations within it as it can.",
        _milliseconds,
    ),
    _Spec(
        "admission",
        "--marconi-admission",
        f"{{{','.join(ADMISSIONS)}}}",
        "Which states are kept: at branch points, before a prompt's last token and at the end, each at its exact "
        "position; or SGLang's own, on the grid of its kernels' chunks.",
        partial(_one_of, ADMISSIONS),
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
        _check,
    ),
    _Spec(
        "report_interval_s",
        "--marconi-report-interval-s",
        "SECONDS",
        "Least time between two log lines with the hit rate and the use of both budgets; 0 reports never.",
        _seconds,
    ),
    _Spec(
        "time",
        "--marconi-time",
        f"{{{','.join(Time)}}}",
        "What ages the cache's contents: seconds, or a quarter of one for each request that has begun. The same "
        "requests then hit the same in every run, however busy the machine is: for demonstrations and tests.",
        _time,
    ),
    _Spec(
        "events",
        "--marconi-events",
        "ENDPOINT",
        "Where to tell a router what the cache holds, KV and states, such as tcp://127.0.0.1:5557: events on this "
        "port, replays and snapshots on the next; two for each replica of --dp-size.",
        TcpAddress.parse,
        "nothing is told",
    ),
    _Spec(
        "events_keys",
        "--marconi-events-keys",
        "FILE",
        "The fleet's pair of CURVE keys, a .key_secret of pyzmq: needed where other hosts can reach the events.",
        _keys,
        "none",
    ),
    _Spec(
        "events_tokens",
        "--marconi-events-tokens",
        f"{{{','.join(_SWITCH)}}}",
        "Whether events tell tokens and salts beside hashes, for consumers that hash them anew: what users wrote.",
        _switch,
        "off; on where no value is given",
        bare="on",
    ),
)
_DEFAULTS = {field.name: field.default for field in fields(Flags)}


def add_to(parser: argparse.ArgumentParser) -> None:
    """Add the flags to SGLang's own parser, as text: `take_from` reads them, with errors of one line."""
    group = parser.add_argument_group("marconi", "Prefix caching for hybrid models (--radix-cache-backend marconi)")
    for spec in SPECS:
        default = spec.default or _DEFAULTS[spec.field]
        group.add_argument(
            spec.option,
            metavar=spec.metavar,
            default=None,
            nargs=None if spec.bare is None else "?",
            const=spec.bare,
            help=f"{spec.help} Default: {default}. Environment: {spec.env}.",
        )


def given(args: argparse.Namespace) -> dict[str, str]:
    """The flags that a parsed command line gives, as text, by option."""
    texts = {spec.option: getattr(args, spec.option.removeprefix("--").replace("-", "_"), None) for spec in SPECS}
    return {option: text for option, text in texts.items() if text is not None}


def texts_of(environ: Mapping[str, str]) -> dict[str, str]:
    """The flags that `environ` gives, as text, by option."""
    return {spec.option: environ[spec.env] for spec in SPECS if spec.env in environ}


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
    if "alpha" in values and "eviction" not in values:
        values["eviction"] = "marconi"
    read = Flags(**values)
    _require_consistent(read, values.keys())
    return read


def _require_consistent(flags: Flags, given: Collection[str]) -> None:
    """Raise `Refusal` for a flag that would do nothing, or that lacks another."""
    if "alpha" in given and flags.eviction != "marconi":
        raise Refusal(f"--marconi-alpha: --marconi-eviction must be marconi, got {flags.eviction}")
    if flags.eviction == "tail" and flags.ttft_budget_ms is None:
        raise Refusal("--marconi-eviction tail: give its budget, --marconi-ttft-budget-ms")
    if flags.ttft_budget_ms is not None and flags.eviction != "tail":
        raise Refusal(f"--marconi-ttft-budget-ms: --marconi-eviction must be tail, got {flags.eviction}")
    _require_events(flags)


def _require_events(flags: Flags) -> None:
    """Raise `Refusal` for events that others could read, or for what would do nothing without any."""
    if flags.events is not None:
        try:
            require_private(str(flags.events), flags.events_keys)
        except ValueError as error:
            raise Refusal(f"--marconi-events {error} (--marconi-events-keys)") from None
        return
    for option, is_given in (("keys", flags.events_keys is not None), ("tokens", flags.events_tokens)):
        if is_given:
            raise Refusal(f"--marconi-events-{option}: nothing is told; give --marconi-events tcp://127.0.0.1:5557")


def _read(spec: _Spec, text: str, source: str) -> Any:
    try:
        return spec.read(text)
    except ValueError as error:
        raise Refusal(f"{source}: {error}") from None
