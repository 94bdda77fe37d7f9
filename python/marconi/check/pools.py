"""Pools of one rank: what they would hold, by SGLang's own rule for dividing memory between KV and states.

    rest = memory x mem_fraction_static - weights      what is left for both, on one card
    states: (rest x r / (1 + r)) / state bytes - 1     r is `--mamba-full-memory-ratio`; one slot more is padding
    KV: (rest - (states + 1) x state bytes) / KV bytes a token, in whole pages

With checkpoints in int8 the states' bytes are divided once more (`policy/int8.py`). In one pool there is no
division: either could take all of it. SGLang still limits the requests that run by the slots that its ratio would give
(`engine/launch/running.py`). Source: `srt/mem_cache/kv_cache_configurator.py`.
"""

from dataclasses import dataclass

from marconi.policy.catalog import SGLANG_MAMBA_RATIO
from marconi.policy.int8 import RUNNING_SLOTS, PerRequest, divide


@dataclass(frozen=True, slots=True)
class Card:
    """The memory of one card, in bytes."""

    memory_bytes: int
    weight_bytes: int
    static_fraction: float
    """`--mem-fraction-static`: the part of it for weights and pools."""

    @property
    def rest_bytes(self) -> int:
        """Memory that is left for KV and states."""
        return int(self.memory_bytes * self.static_fraction) - self.weight_bytes


@dataclass(frozen=True, slots=True)
class RequestSlots:
    """Sizes that the flags ask for; None where they leave it to SGLang."""

    page_tokens: int
    num_tracking_slots: int
    """Slots of a running request beside its working slot, as SGLang gives them."""
    ratio: float = SGLANG_MAMBA_RATIO
    num_slots: int | None = None
    max_tokens: int | None = None
    is_one_pool: bool = False
    lends_tracking_slots: bool = False
    """True if the cache has them in a request's place (`engine/cache/scheduler.py`)."""
    has_checkpoints: bool = False
    """True if states of the tree are in int8."""
    num_checkpoints: int | None = None
    """Number of int8 states; None where the flags leave it to SGLang."""
    max_running: int | None = None
    """Requests that may run at once."""


@dataclass(frozen=True, slots=True)
class Pools:
    """How much there is of each on one rank; None where it is not known."""

    num_working_slots: int
    """State slots that a running request holds."""
    num_slots_per_running: int
    """State slots that count for each running request, by which SGLang limits how many run."""
    is_one_pool: bool
    num_bytes: int | None
    """Bytes of the one pool, or of both."""
    num_slots: int | None
    num_checkpoints: int | None
    """Slots for checkpoints in int8; None without, and where it is not known."""
    num_tokens: int | None
    max_running: int | None
    """Requests that may run at once, as far as states allow."""
    weight_bytes: int | None
    """Beside them on the card."""
    warning: str | None
    """A line for the operator about a division that does not pay; None where it does."""


def pools_of(
    request: RequestSlots, kv_bytes_per_token: int, state_bytes: int, card: Card | None, checkpoint_bytes: int = 0
) -> Pools:
    """The pools of one rank; of no size where a card has no room for any. `checkpoint_bytes` is a state's in int8."""
    num_slots, num_tokens, rest = request.num_slots, request.max_tokens, None
    num_divided = num_slots
    if card is not None:
        rest = max(0, card.rest_bytes)
        if num_divided is None:
            budget = int(rest * request.ratio / (1 + request.ratio))
            num_divided = max(0, (budget - state_bytes) // state_bytes)
        num_slots = rest // state_bytes if request.is_one_pool and num_slots is None else num_divided
        left = rest if request.is_one_pool else rest - (num_slots + 1) * state_bytes
        fitting = max(0, left // max(kv_bytes_per_token, 1))
        num_tokens = min(fitting, fitting if request.max_tokens is None else request.max_tokens)
    if num_tokens is not None:
        num_tokens -= num_tokens % request.page_tokens
    num_tracking_slots = 0 if request.lends_tracking_slots else request.num_tracking_slots
    num_working_slots = 1 + num_tracking_slots
    num_slots_per_running = RUNNING_SLOTS + num_tracking_slots
    num_checkpoints, warning = request.num_checkpoints, None
    if request.has_checkpoints:
        num_slots_per_running = RUNNING_SLOTS + request.num_tracking_slots
    if request.has_checkpoints and num_checkpoints is None and num_slots is not None and num_slots > 1:
        per_request = PerRequest(num_slots_per_running, num_working_slots)
        divided = divide(num_slots, per_request, request.max_running, state_bytes, checkpoint_bytes)
        num_slots = num_divided = divided.num_live
        num_checkpoints, num_slots_per_running = divided.num_checkpoints, per_request.num_live
        warning = divided.warning
    return Pools(
        num_slots=num_slots,
        num_tokens=num_tokens,
        num_bytes=rest,
        weight_bytes=None if card is None else card.weight_bytes,
        is_one_pool=request.is_one_pool,
        num_working_slots=num_working_slots,
        num_slots_per_running=num_slots_per_running,
        max_running=None if num_divided is None else num_divided // num_slots_per_running,
        num_checkpoints=num_checkpoints,
        warning=warning,
    )
