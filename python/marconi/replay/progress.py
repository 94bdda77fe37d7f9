"""A progress bar on the terminal: on stderr, cleared when the work is done, and absent where stderr is no terminal."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn

_REFRESH_S = 0.1


class Meter:
    """Counts one kind of work; draws at most every tenth of a second."""

    def __init__(self, bar: Progress | None, task: TaskID) -> None:
        self._bar = bar
        self._task = task
        self._num_done = 0
        self._drawn_s = 0.0

    def advance(self, num_done: int) -> None:
        """Advance by this many."""
        self.reach(self._num_done + num_done, None)

    def reach(self, num_done: int, num_total: int | None) -> None:
        """Set the progress, and the total if it is known."""
        self._num_done = num_done
        now_s = time.monotonic()
        if self._bar is not None and now_s - self._drawn_s >= _REFRESH_S:
            self._drawn_s = now_s
            self._bar.update(self._task, completed=num_done, total=num_total, refresh=True)


@contextmanager
def metered(what: str, num_total: int | None = None) -> Iterator[Meter]:
    """A meter for `what`, of `num_total` steps if that is known."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield Meter(None, TaskID(0))
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    # No thread of its own: processes are forked while the bar stands.
    with Progress(*columns, console=console, transient=True, auto_refresh=False) as bar:
        yield Meter(bar, bar.add_task(what, total=num_total))
