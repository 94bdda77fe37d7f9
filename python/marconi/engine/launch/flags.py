"""The `--marconi-...` flags and the variables beside them, one table: option, environment twin, unit, default.

SGLang spawns its processes, and an offline `sglang.Engine` has no command line, so flags are passed by the
environment: the parsed command line is written to it, and every process reads `from_environ`. What only tests,
demonstrations and consumers of their own set is a variable alone.
"""

import argparse
import math
import os
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping
from dataclasses import dataclass, fields
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any, Final

from marconi.engine.launch.policies import ADMISSIONS, JUDICIOUS, PolicyChoice
from marconi.engine.version import Refusal
from marconi.events.address import Keys, TcpAddress, require_private
from marconi.policy.catalog import SERVED, PolicySpec
from marconi.policy.eviction.utility import ALPHA

BACKEND: Final = "marconi"
"""The value of `--radix-cache-backend` that selects this cache."""


class Explain(StrEnum):
    """Whether the cache notes why requests missed."""

    OFF = "off"
    ON = "on"
    TEXT = "text"
    """With tokens where a prompt diverges."""


class Time(StrEnum):
    """The clock by which the cache's contents age."""

    SECONDS = "seconds"
    REQUESTS = "requests"
    """A quarter of a second for each request that has begun."""


@dataclass(frozen=True, slots=True)
class Flags:
    """The backend's flags, as the operator gave them."""

    eviction: PolicySpec = PolicySpec("best")  # noqa: RUF009 - frozen
    admission: str = JUDICIOUS
    ghost_tokens: int = 10_000_000
    report_interval_s: float = 60.0
    time: Time = Time.SECONDS
    events: TcpAddress | None = None
    """Where the first rank publishes; None for no events."""
    events_keys: Keys | None = None
    events_tokens: bool = False
    explanations: Explain = Explain.ON
    record: Path | None = None
    """Where the first rank records what was served; None for nowhere."""

    @property
    def policy(self) -> PolicyChoice:
        """The policies chosen by the flags."""
        name, number = self.eviction.name, SERVED[self.eviction.name].number(self.eviction)
        return PolicyChoice(
            name,
            number if name == "marconi" else ALPHA,
            number if name == "tail" else None,
            self.admission,
            max_ghost_tokens=self.ghost_tokens,
        )

    @property
    def explain(self) -> bool:
        """Whether it is noted why requests missed."""
        return self.explanations is not Explain.OFF

    @property
    def explain_text(self) -> bool:
        """Whether tokens are shown where a prompt diverges."""
        return self.explanations is Explain.TEXT


@dataclass(frozen=True, slots=True)
class _Spec:
    """One flag: the field of `Flags` that it fills, its spelling, and the reader of its text; or a variable alone."""

    field: str
    metavar: str
    read: Callable[[str], Any]
    help: str
    default: str = ""
    """The default in words, if the field's own is not enough."""
    bare: str | None = None
    """The value of the option given without one; None if it requires a value."""
    is_flag: bool = True
    """False for a variable that no flag sets."""
    name: str = ""
    """Its name, where that is not the field's."""

    @property
    def option(self) -> str:
        """The flag: `a_b` is `--marconi-a-b`."""
        return f"--marconi-{(self.name or self.field).replace('_', '-')}"

    @property
    def env(self) -> str:
        """The environment twin: `--marconi-a-b` is `MARCONI_A_B`."""
        return _env(self.option)


def _env(option: str) -> str:
    return option.removeprefix("--").replace("-", "_").upper()


def _choice(values: Iterable[str]) -> tuple[str, Callable[[str], Any]]:
    """The metavar and the reader of one of `values`; the reader gives what a mapping holds for it, or itself."""
    known = values if isinstance(values, Mapping) else {each: each for each in values}

    def read(text: str) -> Any:
        if text not in known:
            raise ValueError(f"must be one of {', '.join(known)}, got {text!r}")
        return known[text]

    return f"{{{','.join(known)}}}", read


_EVICTIONS: Final = {"lru": "lru", "marconi": "marconi[:ALPHA]", "tail": "tail:SECONDS", "best": "best"}
_NUMBERS: Final = {"marconi": ", a number, 0 or more", "tail": ", a number above 0"}


def _eviction(text: str) -> PolicySpec:
    name, colon, number = text.partition(":")
    if name not in SERVED:
        forms = ", ".join(_EVICTIONS.values())
        raise ValueError(f"must be one of {forms}, got {text!r}; all others run only in marconi replay")
    spec = PolicySpec(name, number if colon else None)
    try:
        chosen = SERVED[name].number(spec)
    except ValueError:
        chosen = -1.0
    if chosen < 0 or (name == "tail" and not chosen > 0):
        raise ValueError(f"must be {_EVICTIONS[name]}{_NUMBERS.get(name, '')}, got {text!r}")
    return spec


def _at_least_0(kind: type[int] | type[float], unit: str, text: str) -> float:
    try:
        number = kind(text)
    except ValueError:
        number = -1
    # No comparison holds for what is no number.
    if not 0 <= number < math.inf:
        raise ValueError(f"must be a number of {unit}, at least 0, got {text!r}")
    return number


def _keys(text: str) -> Keys:
    return Keys.read(Path(text))


def _file(text: str) -> Path:
    path = Path(text)
    folder = path.absolute().parent
    is_new = path.is_file() or not os.path.lexists(path)
    if not path.name or not is_new or not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(f"must be a file in a folder that the server can write to, got {text!r}")
    return path


SPECS = (
    _Spec(
        "eviction",
        "NAME[:NUMBER]",
        _eviction,
        "Which states to evict first when KV or state slots run short: best, lru, marconi[:ALPHA] (how many times the "
        "age at which states are evicted the dearest one outlives the cheapest; 4, and 0 is LRU), or tail:SECONDS (as "
        "many conversations as it can keep within this time to first token).",
        "best",
    ),
    _Spec(
        "admission",
        *_choice(ADMISSIONS),
        "Which states to keep: at branch points, before a prompt's last token and at the end, each at its exact "
        "position; or SGLang's own, on the grid of its kernels' chunks.",
    ),
    _Spec(
        "ghost_tokens",
        "TOKENS",
        partial(_at_least_0, int, "tokens"),
        "How many tokens of evicted prefixes to remember, so that a prefix that returns counts as seen before; 4 bytes "
        "of host memory each, and 0.8 KB for each prefix.",
    ),
    _Spec(
        "report_interval_s",
        "SECONDS",
        partial(_at_least_0, float, "seconds"),
        "Least time between two log lines with the hit rate and the use of both pools; 0 disables them.",
        is_flag=False,
    ),
    _Spec(
        "time",
        *_choice(Time),
        "The clock by which the cache's contents age: seconds, or a quarter of one for each request that has begun. "
        "The same requests then give the same hits in every run, however busy the machine is: for demonstrations and "
        "tests.",
        is_flag=False,
    ),
    _Spec(
        "events",
        "ENDPOINT",
        TcpAddress.parse,
        "Where to publish the cache's KV and states to a router, such as tcp://127.0.0.1:5557: events on this port, "
        "replays and snapshots on the next; two ports for each replica of --dp-size.",
        "no events",
    ),
    _Spec(
        "events_keys",
        "FILE",
        _keys,
        "The fleet's pair of CURVE keys, a .key_secret of pyzmq: required if other hosts can reach the events.",
        "none",
    ),
    _Spec(
        "events_tokens",
        *_choice({"off": False, "on": True}),
        "Whether events carry tokens, salts and adapters beside hashes, for consumers that compute their own hashes: "
        "this exposes users' texts.",
        "off",
        is_flag=False,
    ),
    _Spec(
        "explanations",
        *_choice(Explain),
        "Whether to note why each request missed: for the answer to one that asks, GET /marconi/requests and the "
        "metrics by cause; or also to show tokens there, where a prompt diverges from what its name space knows: this "
        "exposes users' texts to others of the same name space.",
        bare="on",
        name="explain",
    ),
    _Spec(
        "record",
        "FILE",
        _file,
        "Where to record each served request, for marconi plan and marconi replay: time, lengths and hashes of blocks, "
        "no tokens; at 64 MiB the file becomes FILE.1.",
        "none",
    ),
)
FLAGS: Final = tuple(spec for spec in SPECS if spec.is_flag)
REPLACED: Final = {
    "--marconi-advice": "--marconi-record FILE, and `marconi plan FILE` of what it has recorded",
    "--marconi-alpha": "--marconi-eviction marconi:ALPHA",
    "--marconi-ttft-budget-ms": "--marconi-eviction tail:SECONDS",
    "--marconi-explain-text": "--marconi-explain text",
    "--marconi-save-dir": "--enable-hierarchical-cache --hicache-storage-backend file --file-storage-path FOLDER",
    **{spec.option: f"the environment variable {spec.env}" for spec in SPECS if not spec.is_flag},
}
"""Flags of earlier versions, and their successors."""
_DEFAULTS = {field.name: field.default for field in fields(Flags)}


def add_to(parser: argparse.ArgumentParser) -> None:
    """Add the flags to SGLang's own parser as text, for `take_from` to read with one-line errors."""
    group = parser.add_argument_group("marconi", "Prefix caching for hybrid models (--radix-cache-backend marconi)")
    for spec in FLAGS:
        default = spec.default or _DEFAULTS[spec.field]
        group.add_argument(
            spec.option,
            metavar=spec.metavar,
            default=None,
            nargs=None if spec.bare is None else "?",
            const=spec.bare,
            help=f"{spec.help} Default: {default}. Environment: {spec.env}.",
        )
    for option in REPLACED:
        group.add_argument(option, nargs="?", default=None, const="on", help=argparse.SUPPRESS)


def given(args: argparse.Namespace) -> dict[str, str]:
    """The text of each flag on a parsed command line, by option."""
    options = (*(spec.option for spec in FLAGS), *REPLACED)
    texts = {option: getattr(args, option.removeprefix("--").replace("-", "_"), None) for option in options}
    return {option: text for option, text in texts.items() if text is not None}


def texts_of(environ: Mapping[str, str]) -> dict[str, str]:
    """The text of each flag and variable in `environ`, by option or name."""
    return {spec.option if spec.is_flag else spec.env: environ[spec.env] for spec in SPECS if spec.env in environ}


def take_from(args: argparse.Namespace, environ: MutableMapping[str, str]) -> Flags:
    """Read the flags of a parsed command line into `environ`, and check them.

    A flag given on the command line wins over its environment twin. Raises `Refusal` naming flag and value.
    """
    texts = given(args)
    _require_current(texts)
    for spec in FLAGS:
        if spec.option in texts:
            _read(spec, texts[spec.option], spec.option)
            environ[spec.env] = texts[spec.option]
    return from_environ(environ)


def from_environ(environ: Mapping[str, str]) -> Flags:
    """Read the flags from the environment; raises `Refusal` naming variable and value."""
    current = {spec.env for spec in SPECS}
    _require_current([option for option in REPLACED if (env := _env(option)) in environ and env not in current])
    values = {spec.field: _read(spec, environ[spec.env], spec.env) for spec in SPECS if spec.env in environ}
    read = Flags(**values)
    _require_events(read)
    return read


def of_process() -> Flags:
    """Read the flags of this process; raises `Refusal` naming variable and value."""
    return from_environ(os.environ)


def _require_current(options: Collection[str]) -> None:
    """Raise `Refusal` for a flag of an earlier version."""
    for option, used in REPLACED.items():
        if option in options:
            raise Refusal(f"{option} is gone: use {used}")


def _require_events(flags: Flags) -> None:
    """Raise `Refusal` for events that other hosts could read, or for flags of events without events."""
    if flags.events is not None:
        try:
            require_private(str(flags.events), flags.events_keys)
        except ValueError as error:
            raise Refusal(f"--marconi-events {error} (--marconi-events-keys)") from None
        return
    if flags.events_keys is not None:
        raise Refusal("--marconi-events-keys has no effect without --marconi-events: give it, or leave this out")


def _read(spec: _Spec, text: str, source: str) -> Any:
    try:
        return spec.read(text)
    except ValueError as error:
        raise Refusal(f"{source}: {error}") from None
