"""Memory for states, divided between requests and checkpoints in int8.

    bytes          (N + 1) S, what SGLang would give N slots of full precision; one slot of a pool is padding
    live slots     A = R (held + 1) + min(4, N / 3), of S bytes each: what R running requests hold, and for each of
                   them, and up to four more, a slot in which a prefill leaves a state until it is rounded
    checkpoints    C = (N - A) S / s, of s bytes each

SGLang itself adds a pool of 2 N checkpoints to its N slots, in memory that it does not count. Where
`--int8-mamba-ckpt-size` is given, both sizes are the operator's, as in SGLang.

    s = numbers + one scale for each channel of a head, in the state's dtype + convolution windows

so a state in float32 takes about a quarter, and one in bfloat16 about half. R is `--max-running-requests`, or as many
as SGLang would run with N slots. A server divides its memory so (`engine/int8/division.py`), and so does a replay
(`replay/int8.py`). Source: `srt/mem_cache/kv_cache_configurator.py:_handle_max_mamba_cache`.
"""

from dataclasses import dataclass
from typing import Final

RUNNING_SLOTS: Final = 3
"""State slots for each running request that SGLang counts on beside those that track."""
MAX_SPARE: Final = 4
"""Slots for states of a prefill, beside one for each running request."""
SLOTS_A_SPARE: Final = 3
"""Slots in all for each that is spare: where there are few, checkpoints are worth more."""
_PADDING: Final = 1


@dataclass(frozen=True, slots=True)
class Division:
    """Slots of both pools."""

    num_live: int
    num_checkpoints: int
    num_exact: int
    """States that the same slots would keep in full precision while as many requests run."""

    @property
    def warning(self) -> str | None:
        """A line for the operator where there are no more checkpoints than states in full precision; else None."""
        if self.num_checkpoints > self.num_exact:
            return None
        return (
            f"--enable-int8-mamba-checkpoint keeps {self.num_checkpoints} states, where full precision would keep "
            f"{self.num_exact}: leave it out, or give states more memory (--mamba-full-memory-ratio)"
        )


@dataclass(frozen=True, slots=True)
class PerRequest:
    """State slots of one running request."""

    num_counted: int
    """By which SGLang limits how many run, in full precision."""
    num_held: int
    """Those that it holds."""

    @property
    def num_live(self) -> int:
        """Those that it holds, and one for a state that is not rounded yet."""
        return self.num_held + 1


def divide(
    num_slots: int, per_request: PerRequest, max_running: int | None, state_bytes: int, checkpoint_bytes: int
) -> Division:
    """Divide the bytes of `num_slots` slots of full precision, two or more; one at least becomes checkpoints."""
    num_running = max(1, num_slots // per_request.num_counted)
    if max_running is not None:
        num_running = min(num_running, max(1, max_running))
    num_spare = min(MAX_SPARE, num_slots // SLOTS_A_SPARE)
    num_live = max(1, min(num_running * per_request.num_live + num_spare, num_slots - 1))
    rest_bytes = (num_slots - num_live) * state_bytes
    num_exact = num_slots - num_running * per_request.num_held
    return Division(num_live, max(1, rest_bytes // checkpoint_bytes - _PADDING), num_exact)
