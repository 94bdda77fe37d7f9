"""States on trial: where memory is idle, the second prompt that shares a beginning hits already.

Nobody knows where a prompt will be left before it was left once, and the rule of `plan.py` keeps a state only from then
on. A prompt that continues no conversation therefore leaves states on the way, at chunk ends, evenly spread over what
no prompt before it had:

    0 ---- known ----|---- t ---- t ---- t ---- t ---- t -|- end of the prompt
                      at most `MAX_TRIALS`, `CHUNK_TOKENS` or a multiple of it apart

They take nothing from other states:

- one gets a slot only while as much memory is free, or on trial, as all else takes        (`lifecycle/running.py`)
- it is evicted before everything else, unless prompts part right there: a request that resumes from it and parts from
  others further on leaves a state of its own, of which it would take the worth            (`eviction/order.py`)
- the host copies it where there is room, and none is left while the host is half full     (`host_tier.py`)

and little bandwidth: how many a server may leave is an *allowance*, which those that are used earn.

    allowance = 48 + 8 each that was resumed from + 1/4 each other state - 1 each that was left - 1 each evicted

Traffic whose prompts share nothing spends it within a few prompts. Owner: `HybridCache`.
"""

from typing import Final

CHUNK_TOKENS: Final = 64
"""A chunk of the gated delta rule's kernels, at whose ends stock keeps states of prefills."""
MAX_TRIALS: Final = 16
MIN_STRETCH_TOKENS: Final = 2 * CHUNK_TOKENS
"""Shorter stretches have the states near the prompt's end."""
_FIRST, _PER_RESUMED, _PER_OTHER = 48.0, 8.0, 1 / 4


class Trials:
    """The states that a server may still leave on trial."""

    __slots__ = ("_allowance",)

    def __init__(self) -> None:
        self._allowance = _FIRST

    @property
    def num_allowed(self) -> int:
        """Those of the next prompt."""
        return min(max(int(self._allowance), 0), MAX_TRIALS)

    def left(self, num_trials: int, num_others: int) -> None:
        """A request has left states that were not there."""
        self._allowance += _PER_OTHER * num_others - num_trials

    def resumed(self) -> None:
        """A request has resumed from one."""
        self._allowance += _PER_RESUMED

    def evicted(self) -> None:
        """One was evicted."""
        self._allowance -= 1


def trial_depths(num_known_tokens: int, next_turn: int, num_allowed: int) -> range:
    """Where a prompt leaves states on trial, the deepest first, beyond its first `num_known_tokens`.

    The deepest is the last chunk end before `next_turn`, the first of the states near the prompt's end.
    """
    start, end = num_known_tokens // CHUNK_TOKENS * CHUNK_TOKENS, (next_turn - 1) // CHUNK_TOKENS * CHUNK_TOKENS
    if not num_allowed or end - start < MIN_STRETCH_TOKENS:
        return range(0)
    spacing = -(-(end - start) // (num_allowed * CHUNK_TOKENS)) * CHUNK_TOKENS
    return range(end, start, -spacing)
