"""The contract of a trace reader: a source of documents in, a `Trace` out, and what is said of a bad record.

A reader first checks a record (a line, or a whole document where a document is a session) and then takes it, so that a
bad one leaves nothing behind. An error is raised as `BadRecord` without a place; `ReadProgress` adds the place and
either ends the reading or, where the caller asked for it, reports the record and continues.

Times: `arrival_s` counts from the start of the trace. A format with clock times (Azure, real text) starts at its first
request; one whose times are already relative keeps them.
"""

import dataclasses
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Literal

import numpy as np

from marconi.policy.request import Request, Trace, pack
from marconi.replay.trace.arrivals import check_session_rate, session_starts
from marconi.replay.trace.source import FileHeader, Source

Progress = Callable[[int, int | None], None]
"""Called with the number of records done and, where it is known, their total."""


class BadRecord(ValueError):
    """A fault of a record, without its place in the file."""


class UnusedOption(ValueError):
    """An option that does nothing for the format it was given with."""

    def __init__(self, option: str, why: str) -> None:
        super().__init__(f"{option}: {why}")
        self.option = option
        self.why = why


class Half(StrEnum):
    """Which sessions to read: parameters are tuned on one half and figures reported on the other."""

    ALL = "all"
    TUNING = "tuning"
    """The first, third, fifth ... session; of a trace without sessions, the earlier half of its requests."""
    REPORTING = "reporting"
    """The second, fourth, sixth ... session; of a trace without sessions, the later half of its requests."""

    def keeps(self, index: int) -> bool:
        """True if the session at `index`, from 0, belongs to this half."""
        return self is Half.ALL or (index % 2 == 0) == (self is Half.TUNING)


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """Options for what a file does not say. `ValueError` for a value that no reader can use."""

    block_tokens: int | None = None
    """Tokens a block; None: the format's own (Mooncake 512, Bailian 16, Azure 16, the coding agent's from the file)."""
    session_rate: float | None = None
    """Sessions a second, a Poisson process, where sessions have relative times or none; None: the format's own."""
    think_time_s: float = 30.0
    """Mean pause between an answer and the next prompt, exponential, where a format has no times at all (ShareGPT)."""
    seed: int = 0
    half: Half = Half.ALL
    max_sessions: int | None = None
    """Read no more than so many of the sessions kept by `half`."""
    system_prompts: Literal["shared", "own"] = "shared"
    """Coding agent: whether equal (tool_tokens, system_tokens) mean equal text across sessions."""
    models: Literal["one", "separate"] = "one"
    """Coding agent: requests of a session to several models as one prefix space, or a namespace for each model."""
    tokenizer: Path | None = None
    """For formats of text: a Hugging Face `tokenizer.json`, a model's folder or hub name; None: an estimate."""
    time_unit: Literal["s", "ms", "us"] | None = None
    """Logs of an API: the unit of times that are numbers; None: told from their values."""
    model_folder: Path | None = None
    """Logs of an API: the model's folder, whose tokenizer and chat template are taken without `tokenizer`."""

    def __post_init__(self) -> None:
        for name, value in (("block_tokens", self.block_tokens), ("max_sessions", self.max_sessions)):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.session_rate is not None:
            check_session_rate(self.session_rate)
        if not (math.isfinite(self.think_time_s) and self.think_time_s >= 0):
            raise ValueError(f"think_time_s must be 0 or more seconds, got {self.think_time_s}")
        if self.seed < 0:
            raise ValueError(f"seed must be 0 or more, got {self.seed}")


class ReadProgress:
    """Follows a reading: its position, its progress, and the handling of bad records.

    `with watch.at(name, index): ...` guards the reading of one record. `BadRecord` in it becomes a `ValueError` with
    the place in front or, with `on_bad`, one call of `on_bad` with that message, and the record is left out.
    """

    STEP = 256
    """Records between two calls of `progress`, where a record is a part of a file."""
    NAMED = 3
    """The most records that are named of those noted alike."""

    def __init__(
        self,
        progress: Progress | None = None,
        on_bad: Callable[[str], None] | None = None,
        on_remark: Callable[[str], None] | None = None,
    ) -> None:
        self.num_total: int | None = None
        self.remark = on_remark or (lambda _: None)
        """Called with one line of what makes the trace approximate."""
        self._noted: dict[str, tuple[int, list[str]]] = {}
        self._progress = progress
        self._on_bad = on_bad
        self._num_done = 0
        self._name = ""
        self._index: int | None = None
        self._kind = "line"

    def at(self, name: str, index: int | None = None, kind: str = "line") -> "ReadProgress":
        """Names the record that the `with` block is about to read: the whole file `name`, or a part of it."""
        self._name, self._index, self._kind = name, index, kind
        return self

    def lines(self, source: Source) -> Iterator[bytes]:
        """The lines of the documents that are not blank, each to be read in a `with watch:` block."""
        for document in source.documents():
            for number, line in document.lines():
                self.at(document.name, number)
                yield line

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> bool:
        if kind is None:
            self._step()
            return False
        if not isinstance(error, BadRecord):
            return False
        place = self._place
        if self._on_bad is None:
            raise ValueError(f"{place}: {error}") from None
        self._on_bad(f"{place}: {error}")
        self._step()
        return True

    @property
    def _place(self) -> str:
        return self._name if self._index is None else f"{self._name}, {self._kind} {self._index}"

    def note(self, what: str) -> None:
        """Counts the present record as `what`, which `say_noted` says."""
        number, places = self._noted.get(what, (0, []))
        self._noted[what] = number + 1, places if len(places) == self.NAMED else [*places, self._place]

    def say_noted(self) -> None:
        """Remarks how many records were noted as what, and where the first of them are."""
        for what, (number, places) in self._noted.items():
            more = ", ..." if number > len(places) else ""
            self.remark(f"{what}: {number} record{'' if number == 1 else 's'} ({'; '.join(places)}{more})")

    def _step(self) -> None:
        self._num_done += 1
        step = self.STEP if self._index is not None else 1
        if self._progress is not None and self._num_done % step == 0:
            self._progress(self._num_done, self.num_total)

    def finish(self) -> None:
        """Reports the end, so that the last call has equal counts."""
        if self._progress is not None:
            self._progress(self._num_done, self._num_done)


@dataclass(frozen=True, slots=True)
class Reader:
    """One format."""

    name: str
    """On the command line."""
    recognises: Callable[[FileHeader], bool]
    """Whether a file that begins so is of this format."""
    read: Callable[[Source, ReadOptions, ReadProgress], Trace]
    """Every request of a source; `ValueError`, in one line, for input that is not of the format."""
    uses: frozenset[str] = frozenset()
    """The names of those of `ReadOptions` that mean something for it, `seed` and `half` aside."""
    is_of_lines: bool = True
    """Whether a file has one JSON object a line."""


_UNUSED = {
    "session_rate": "has its own times",
    "think_time_s": "has its own times",
    "max_sessions": "names no sessions",
    "system_prompts": "does not name its system prompts",
    "models": "does not name its models",
    "tokenizer": "holds no text",
    "time_unit": "has its own unit of time",
}
"""Why an option does nothing. Blocks are cut of any trace (`in_blocks`), so `block_tokens` is not among them."""


def check_used(reader: Reader, options: ReadOptions) -> None:
    """`UnusedOption` for an option that is not as it is without saying, and of which `reader` makes nothing."""
    default = ReadOptions()
    for option, why in _UNUSED.items():
        if option not in reader.uses and getattr(options, option) != getattr(default, option):
            article = "an" if reader.name[0] in "aeiou" else "a"
            raise UnusedOption(option, f"{article} {reader.name} trace {why}")


class SessionNumbers:
    """Numbers the sessions that `options` keeps, from 0, in the order of their first appearance."""

    def __init__(self, options: ReadOptions) -> None:
        self._half = options.half
        self._max = options.max_sessions
        self._numbers: dict[Hashable, int | None] = {}
        self._num_kept = 0

    def number(self, key: Hashable) -> int | None:
        """The number of session `key`, or None for one that is not to be read."""
        if key in self._numbers:
            return self._numbers[key]
        kept = self._half.keeps(len(self._numbers)) and not self.full
        self._numbers[key] = self._num_kept if kept else None
        self._num_kept += kept
        return self._numbers[key]

    @property
    def full(self) -> bool:
        """True if no further session will be kept."""
        return self._max is not None and self._num_kept >= self._max


def arranged(source: Source, unit_tokens: int, requests: Iterable[Request]) -> Trace:
    """The trace of `requests`, sorted by arrival, in the order given where they arrive together."""
    ordered = tuple(sorted(requests, key=lambda request: request.arrival_s))
    if not ordered:
        raise ValueError(f"{source.place}: holds no request that was asked for")
    return Trace(source.name, unit_tokens, ordered)


def request_of(
    prompt: Sequence[int], output: Sequence[int], arrival_s: float, session: int = -1, turn: int = 0, namespace: int = 0
) -> Request:
    """A request of token ids, all of them known."""
    num_prompt, num_output = len(prompt), len(output)
    path = pack(prompt) + pack(output)
    return Request(path, num_prompt, num_output, num_prompt + num_output, arrival_s, session, turn, namespace)


def placed(requests: Sequence[Request], options: ReadOptions) -> list[Request]:
    """The requests, each session's in order of time, in the trace's time.

    It counts from the first request on; with a session rate, sessions start at drawn times and keep their own pauses.
    """
    if options.session_rate is None:
        start_s = min((request.arrival_s for request in requests), default=0.0)
        return [dataclasses.replace(request, arrival_s=request.arrival_s - start_s) for request in requests]
    firsts_s: dict[int, float] = {}
    for request in requests:
        firsts_s.setdefault(request.session, request.arrival_s)
    drawn = session_starts(options.session_rate, np.random.default_rng(options.seed))
    starts_s = dict(zip(firsts_s, drawn, strict=False))
    return [
        dataclasses.replace(
            request, arrival_s=starts_s[request.session] + (request.arrival_s - firsts_s[request.session])
        )
        for request in requests
    ]
