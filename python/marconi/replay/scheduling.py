"""How a server runs a request: the length of a prefill, and the state slots that it works on."""

from dataclasses import dataclass
from typing import Final

from marconi.policy.admission.base import Admission
from marconi.replay.admission.chunk_end import DEFAULT_CHUNK_TOKENS, ExtraBuffer, NoBuffer
from marconi.replay.admission.every_block import EveryBlock

NUM_TRACKING_SLOTS: Final = 2
"""Slots of a request beside its working slot, under `--mamba-radix-cache-strategy extra_buffer` with overlap.

Where this cache keeps states itself nobody reads them, and a request holds none (`engine/cache/scheduler.py`).
"""


@dataclass(frozen=True, slots=True)
class Scheduling:
    """How a server runs a request."""

    chunk_tokens: int = DEFAULT_CHUNK_TOKENS
    """The most that one prefill computes; a multiple of the page."""
    num_working_slots: int = 1
    """Slots that a request holds throughout."""
    num_lent_slots: int = 0
    """Slots beside them that SGLang wants to have for one request alone, and that no request holds."""
    track_tokens: int | None = None
    """The state at a request's end stands at the last multiple of this that decoding passed; None: at the end."""
    max_running: int = 1
    """Requests beside each other: a planned state leaves the slots alone of those that may still start."""

    def __post_init__(self) -> None:
        """Raise `ValueError` for a count below 1."""
        for name in ("chunk_tokens", "num_working_slots", "track_tokens", "max_running"):
            count = getattr(self, name)
            if count is not None and count < 1:
                raise ValueError(f"{name} must be 1 or more, got {count}")

    @classmethod
    def of(cls, admission: Admission, unit_tokens: int = 1) -> "Scheduling":
        """Schedule as SGLang runs a request by `admission`, one at a time; positions are multiples of `unit_tokens`."""
        if isinstance(admission, ExtraBuffer | NoBuffer):
            return cls(admission.chunk_tokens, 1 if isinstance(admission, NoBuffer) else 1 + NUM_TRACKING_SLOTS)
        chunk_tokens = -(-DEFAULT_CHUNK_TOKENS // unit_tokens) * unit_tokens
        return cls(chunk_tokens, num_lent_slots=0 if isinstance(admission, EveryBlock) else NUM_TRACKING_SLOTS)
