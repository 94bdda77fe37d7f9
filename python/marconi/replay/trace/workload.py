"""Draws workloads like those of the Marconi paper (section 5.1): chats and agent sessions that grow turn by turn.

A session starts with one of the shared system prompts, if there are any. Each turn adds a prompt and an output, and the
next prompt is the whole history and the next addition. In an agent session, additions are observations, and with
`keep_observations` only the newest so many stay in the prompt: an older one is replaced by a short note, so that the
prompt branches off where it stood (SWE-agent keeps five, arXiv 2405.15793). Sessions start as a Poisson process; within
one, the answer is decoded and a pause passes. A session ends with its turns or before it outgrows the context.

Every token has an id of its own: sessions share their system prompt and nothing by chance.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from marconi.policy.request import Request, Trace
from marconi.replay.trace.arrivals import Pace, check_session_rate, session_starts
from marconi.replay.trace.blocks import in_blocks

Tokens = NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class Skewed:
    """Counts with a long tail: `minimum` plus a rounded lognormal, cut at `maximum`. `mean` is that before the cut."""

    mean: float
    sigma: float
    """Standard deviation of the logarithm."""
    minimum: int
    maximum: int

    def __post_init__(self) -> None:
        if not (0 <= self.minimum <= self.mean <= self.maximum and math.isfinite(self.sigma) and self.sigma >= 0):
            raise ValueError(f"counts must have 0 <= minimum <= mean <= maximum and sigma >= 0, got {self}")

    def draw(self, rng: np.random.Generator) -> int:
        """One count."""
        above = self.mean - self.minimum
        if above <= 0:
            return self.minimum
        value = rng.lognormal(math.log(above) - self.sigma**2 / 2, self.sigma)
        return min(self.maximum, self.minimum + round(value))


@dataclass(frozen=True, slots=True)
class SystemPrompts:
    """Prompts that sessions share; each session begins with one of them, equally likely."""

    num_prompts: int
    num_tokens: int

    def __post_init__(self) -> None:
        if self.num_prompts < 0 or self.num_tokens < 0:
            raise ValueError(
                f"num_prompts and num_tokens must be at least 0, got {self.num_prompts} and {self.num_tokens}"
            )


@dataclass(frozen=True, slots=True)
class Workload:
    """The shape of sessions. Lengths are in tokens."""

    name: str
    turns: Skewed
    first_prompt: Skewed
    next_prompt: Skewed
    output: Skewed
    pace: Pace
    system_prompts: SystemPrompts = SystemPrompts(0, 0)
    keep_observations: int | None = None
    """How many of the newest additions after the first prompt stay in the prompt; None: all."""
    note_tokens: int = 12
    """Length of what replaces a dropped observation."""
    max_context_tokens: int = 32768

    def __post_init__(self) -> None:
        if self.keep_observations is not None and self.keep_observations < 1:
            raise ValueError(f"keep_observations must be at least 1, got {self.keep_observations}")
        if self.first_prompt.minimum < 1 or self.turns.minimum < 1:
            raise ValueError(
                f"{self.name}: turns and first_prompt must have a minimum of at least 1, "
                f"got {self.turns.minimum} and {self.first_prompt.minimum}"
            )


@dataclass(frozen=True, slots=True)
class Demand:
    """How many sessions come, and how fast."""

    num_sessions: int
    session_rate: float
    """Sessions a second."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_sessions < 1:
            raise ValueError(f"num_sessions must be at least 1, got {self.num_sessions}")
        check_session_rate(self.session_rate)
        if self.seed < 0:
            raise ValueError(f"seed must be 0 or more, got {self.seed}")


def generate(workload: Workload, demand: Demand, unit_tokens: int = 1) -> Trace:
    """A trace of `workload`, in single tokens or in blocks of `unit_tokens`; equal arguments give equal bytes.

    What a session is does not depend on `session_rate`: the same seed gives the same sessions at every rate.
    """
    seeds = np.random.SeedSequence(demand.seed).spawn(2)
    starts = session_starts(demand.session_rate, np.random.default_rng(seeds[0]))
    rng = np.random.default_rng(seeds[1])
    ids = _FreshIds()
    prompts = [ids.take(workload.system_prompts.num_tokens) for _ in range(workload.system_prompts.num_prompts)]
    requests: list[Request] = []
    for session, start_s in zip(range(demand.num_sessions), starts, strict=False):
        system = prompts[int(rng.integers(len(prompts)))] if prompts else ids.take(0)
        requests += _session(workload, session, start_s, system, ids, rng)
    requests.sort(key=lambda request: request.arrival_s)
    trace = Trace(workload.name, 1, tuple(requests))
    return trace if unit_tokens == 1 else in_blocks(trace, unit_tokens)


class _FreshIds:
    def __init__(self) -> None:
        self._next = 0

    def take(self, count: int) -> Tokens:
        first, self._next = self._next, self._next + count
        if self._next > 2**32:
            raise ValueError(f"more than {2**32} different tokens: ask for fewer or shorter sessions")
        return np.arange(first, self._next, dtype=np.int64).astype(np.uint32)


def _session(
    workload: Workload, session: int, start_s: float, system: Tokens, ids: _FreshIds, rng: np.random.Generator
) -> Iterator[Request]:
    history = [system, ids.take(workload.first_prompt.draw(rng))]
    observations: list[int] = []
    """Where in `history` the observations stand that are still whole, oldest first."""
    arrival_s = start_s
    for turn in range(workload.turns.draw(rng)):
        if turn:
            observations.append(len(history))
            history.append(ids.take(workload.next_prompt.draw(rng)))
            if workload.keep_observations is not None and len(observations) > workload.keep_observations:
                history[observations.pop(0)] = ids.take(workload.note_tokens)
        output = ids.take(workload.output.draw(rng))
        num_prompt = sum(map(len, history))
        num_tokens = num_prompt + len(output)
        if num_tokens > workload.max_context_tokens:
            return
        history.append(output)
        path = np.concatenate(history).astype("<u4", copy=False).tobytes()
        yield Request(path, num_prompt, len(output), num_tokens, arrival_s, session, turn)
        arrival_s += workload.pace.gap_s(len(output), rng)
