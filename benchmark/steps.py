"""Steps of a check: each a process group with a time limit, ended whole.

    step ----> leader of a session of its own ----> children, theirs, ...: one process group
       at its limit, or on Ctrl-C: SIGTERM to the group, `GRACE_S` later SIGKILL; and SIGKILL to what a leader left

So nothing that a step started goes on using the card beside the next one. A server under test has a session of its own;
its guard (`marconi.process`) kills it once the step's processes are gone.

What a step prints goes to a file of its name. Its outcome is the word of its own process: status 0 is green, 77
skipped, all else wrong, and a run of pytest of which no test passed is no better than skipped. A step that was ended at
its limit is late, whatever it says as it ends: that is no word on what it was to check.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from types import FrameType
from typing import NoReturn

GRACE_S = 10.0
NUM_LINES_OF_A_TAIL = 40
_POLL_S = 0.05


class Outcome(IntEnum):
    """What became of a step, or of several; the value is the exit status."""

    GREEN = 0
    WRONG = 1
    LATE = 3
    SKIPPED = 77

    @property
    def words(self) -> str:
        """As a table says it."""
        return {0: "green", 1: "WRONG", 3: "not ended in time", 77: "skipped"}[self.value]


WORST_FIRST = (Outcome.WRONG, Outcome.LATE, Outcome.SKIPPED, Outcome.GREEN)


@dataclass(frozen=True, slots=True)
class Step:
    """One process: the arguments of this Python, and how long it may take."""

    name: str
    arguments: tuple[str, ...]
    limit_s: float
    needs_server: bool = False

    @property
    def is_pytest(self) -> bool:
        """True if its last lines count tests."""
        return self.arguments[:2] == ("-m", "pytest")


@dataclass(frozen=True, slots=True)
class Done:
    """A step that was run or skipped; `why` is the reason of the latter."""

    step: Step
    outcome: Outcome
    seconds: float = 0.0
    log: Path | None = None
    why: str = ""


def run(
    step: Step,
    log: Path,
    *,
    cwd: Path,
    environment: Mapping[str, str],
    grace_s: float = GRACE_S,
    stop: threading.Event | None = None,
) -> Done:
    """Run a step until it ends, its limit does or `stop` is set; leaves none of its processes, also where it raises."""
    start_s = time.monotonic()
    with log.open("wb") as output:
        leader = subprocess.Popen(  # noqa: S603 - this Python
            [sys.executable, *step.arguments],
            cwd=cwd,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            is_late = not _wait(lambda: leader.poll() is not None or (stop is not None and stop.is_set()), step.limit_s)
        finally:
            _end(leader, grace_s)
    outcome = Outcome.LATE if is_late else outcome_of(step, leader.returncode, log)
    return Done(step, outcome, time.monotonic() - start_s, log)


def outcome_of(step: Step, status: int, log: Path) -> Outcome:
    """The outcome of a step that ended by itself."""
    if status == Outcome.SKIPPED:
        return Outcome.SKIPPED
    if status != 0:
        return Outcome.WRONG
    if step.is_pytest and not re.search(r"\b[1-9]\d* passed\b", "\n".join(tail(log))):
        return Outcome.SKIPPED
    return Outcome.GREEN


def worst(outcomes: Sequence[Outcome]) -> Outcome:
    """The outcome of several steps: what is wrong outweighs what is late, that what did not run."""
    return next((each for each in WORST_FIRST if each in outcomes), Outcome.SKIPPED)


def tail(log: Path) -> list[str]:
    """The last lines of a log."""
    return log.read_text(encoding="utf-8", errors="replace").splitlines()[-NUM_LINES_OF_A_TAIL:]


def table(done: Sequence[Done]) -> str:
    """A line a step: outcome, seconds, limit, log file or the reason why it did not run."""
    width = max((len(each.step.name) for each in done), default=0)
    return "\n".join(
        f"  {each.step.name:<{width}}  {each.outcome.words:<17}  {each.seconds:6.1f} s of {each.step.limit_s:4.0f} s  "
        f"{each.why or each.log or ''}"
        for each in done
    )


@contextlib.contextmanager
def termination_as_interrupt() -> Iterator[None]:
    """For a while, SIGTERM raises KeyboardInterrupt as Ctrl-C does: whoever ends the check ends its step."""

    def interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _end(leader: subprocess.Popen[bytes], grace_s: float) -> None:
    """End all of a process group; a leader that is still there has `grace_s` to put things in order."""
    try:
        if leader.poll() is None:
            _signal(leader.pid, signal.SIGTERM)
            _wait(lambda: leader.poll() is not None and not _signal(leader.pid, 0), grace_s)
    finally:
        # Also on a second Ctrl-C.
        _signal(leader.pid, signal.SIGKILL)
        leader.wait()
    _wait(lambda: not _signal(leader.pid, 0), grace_s)


def _signal(group: int, number: int) -> bool:
    """Send a signal to a process group; False if it has no process."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _wait(is_over: Callable[[], bool], limit_s: float) -> bool:
    """Wait, `limit_s` at most; False if it is not over by then."""
    give_up_s = time.monotonic() + limit_s
    while not is_over():
        if time.monotonic() >= give_up_s:
            return False
        time.sleep(_POLL_S)
    return True
