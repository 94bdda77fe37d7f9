"""The last hour of a cache in small figures, which its page shows from the moment it is opened (`picture.py`).

    step    `STEP_S` seconds of the Unix clock, the latest `NUM_STEPS` in which the cache reported at all
    num_*   counts since the server started, at the step's first report: a step's traffic is the next one's less its own
    held    bytes of device memory at that time: KV, states, in use, free

A report is the status that metrics are set from: at the start of a prefill, at the end of a request, and while the
scheduler is idle. All but the first of a step cost a comparison. The clock is for the page: no decision reads it.
Owner: the scheduler's thread.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from marconi.engine.reports.status import Status

STEP_S: Final = 10
NUM_STEPS: Final = 361
"""The edges of an hour's steps."""


class Edge(NamedTuple):
    """The figures at the beginning of a step."""

    at_s: int
    num_prompt_tokens: int
    num_hit_tokens: int
    num_evictions: int
    held: dict[str, int]


class History:
    """The latest steps of one cache."""

    def __init__(self, status: Callable[[], Status], clock: Callable[[], float] = time.time) -> None:
        """`status` is that of the cache, `clock` the Unix time in seconds."""
        self._status, self._clock = status, clock
        self._edges: deque[Edge] = deque(maxlen=NUM_STEPS)
        self._due_s = 0.0

    def report(self) -> None:
        """Note the figures if a step has begun since the last report."""
        now_s = self._clock()
        # A clock that was set back is awaited, but for an hour at most.
        if self._due_s - NUM_STEPS * STEP_S < now_s < self._due_s:
            return
        at_s = int(now_s // STEP_S) * STEP_S
        if now_s < self._due_s:
            self._edges.clear()
        self._due_s = at_s + STEP_S
        self._edges.append(_edge(at_s, self._status()))

    def state(self) -> dict[str, Any]:
        """The values for JSON: the figures of now, and a column of each figure of the steps, oldest first."""
        status = self._status()
        now_s = self._clock()
        since = [each for each in self._edges if each.at_s >= now_s - NUM_STEPS * STEP_S]
        edges = [*since, _edge(round(now_s), status)]
        return {
            "step_s": STEP_S,
            "saved_s": status.saved_s,
            **{name: [getattr(each, name) for each in edges] for name in Edge._fields[:-1]},
            "held": {kind: [each.held[kind] for each in edges] for kind in edges[-1].held},
        }


def _edge(at_s: int, status: Status) -> Edge:
    evicted = sum(num for need, num in status.evictions.items() if need != "unused")
    return Edge(at_s, status.num_prompt_tokens, status.num_hit_tokens, evicted, status.held_bytes)
