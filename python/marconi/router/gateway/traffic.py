"""The fleet's prompt tokens over time: those that its workers were expected to have cached, and those that they had.

    steps of `STEP_S` seconds, the latest `NUM_STEPS` that had a request
    expected hit rate  =  num_expected_tokens / num_prompt_tokens
    seen hit rate      =  num_cached_tokens / num_reported_tokens        prompts whose answers report what was cached

Time is passed in, in seconds of the Unix clock. Owner: `Metrics`.
"""

from collections import deque
from dataclasses import asdict, dataclass
from typing import Any, Final

STEP_S: Final = 60
NUM_STEPS: Final = 60


@dataclass(slots=True)
class Step:
    """The requests that workers accepted in one step, and whose tokens the router knows."""

    at_s: int
    """Its beginning."""
    num_requests: int = 0
    num_prompt_tokens: int = 0
    num_expected_tokens: int = 0
    """Tokens of the prompts that the chosen workers were expected to have cached."""
    num_reported_tokens: int = 0
    """Tokens of the prompts whose answers report what was cached."""
    num_cached_tokens: int = 0
    """Tokens that were cached, as these answers report."""


class FleetTraffic:
    """The latest steps."""

    def __init__(self) -> None:
        self._steps: deque[Step] = deque(maxlen=NUM_STEPS)

    def add(self, now_s: float, num_prompt: int, num_expected: int, num_cached: int | None) -> None:
        """Count a request; `num_cached` is None where its answer does not report it."""
        at_s = int(now_s // STEP_S) * STEP_S
        # A clock that was set back adds to the latest step until it has caught up.
        if not self._steps or self._steps[-1].at_s < at_s:
            self._steps.append(Step(at_s))
        step = self._steps[-1]
        step.num_requests += 1
        step.num_prompt_tokens += num_prompt
        step.num_expected_tokens += num_expected
        if num_cached is not None:
            step.num_reported_tokens += num_prompt
            step.num_cached_tokens += num_cached

    def state(self) -> dict[str, Any]:
        """The steps that had a request, oldest first, as `GET /router` shows them."""
        return {"step_s": STEP_S, "num_steps": NUM_STEPS, "steps": [asdict(step) for step in self._steps]}
