"""A server whose checkpoints are in int8 (`--enable-int8-mamba-checkpoint`): slots of two kinds (`policy/int8.py`).

    live slots     what running requests hold; a planned state from its prefill on, until it is rounded
    checkpoints    the tree's states, and those that are promised to planned states

A state is rounded as it joins the tree, and its live slot is free. Live slots are the tree's neither to hold nor to
evict: a planned state without one is not kept, and a hit without one is a miss. The engine's cache does the same, in
the same order (`engine/int8/pools.py`).
"""

from dataclasses import dataclass
from typing import ClassVar, Final

from marconi.lifecycle.pools import Amount
from marconi.policy.int8 import RUNNING_SLOTS, PerRequest, divide
from marconi.replay.pools import TwoPools
from marconi.replay.scheduling import NUM_TRACKING_SLOTS
from marconi.tree import Freed

PER_REQUEST: Final = PerRequest(num_counted=RUNNING_SLOTS + NUM_TRACKING_SLOTS, num_held=1)
"""Under `--mamba-radix-cache-strategy extra_buffer` with overlap; nobody reads what would be tracked."""


@dataclass(slots=True)
class Int8Pools(TwoPools):
    """KV, live slots and checkpoints: their sizes and their free parts. The slots that a request takes are live."""

    num_checkpoints: int = 0
    num_free_checkpoints: int = 0

    def __post_init__(self) -> None:
        """Raise `ValueError` for less than nothing; all is free at first."""
        # `super()` does not know the class that `slots=True` makes.
        TwoPools.__post_init__(self)
        if self.num_checkpoints < 0:
            raise ValueError(f"num_checkpoints must be 0 or more, got {self.num_checkpoints}")
        self.num_free_checkpoints = self.num_checkpoints

    def num_rows(self, num_working_slots: int) -> int:
        """Each has its slots, and one for a state that is not rounded yet."""
        return self.num_slots // PerRequest(RUNNING_SLOTS, num_working_slots).num_live

    are_slots_shared: ClassVar[bool] = False

    @property
    def has_slot_for_copy(self) -> bool:
        """No live slot is evicted for it."""
        return self.num_free_slots > 0

    def promise(self) -> bool:
        """Promise a free checkpoint to a state; False if there is none."""
        if not self.num_free_checkpoints:
            return False
        self.num_free_checkpoints -= 1
        return True

    def spares(self, evictable: Amount, reserved: Amount) -> bool:
        """Live slots are freed by no eviction."""
        return TwoPools.spares(self, Amount(evictable.num_tokens, 0), reserved)

    def spares_slot(self, evictable: Amount, reserved: Amount) -> bool:
        """A live slot is free beyond `reserved`, and a checkpoint."""
        return self.num_free_slots > reserved.num_states and self.num_free_checkpoints + evictable.num_states > 0

    def take_planned(self) -> bool | None:
        """Take a live slot, and the promise of a checkpoint."""
        if not self.promise():
            return None
        self.num_free_slots -= 1
        return True

    def hand_over(self, num_states: int, num_kept: int) -> None:
        """States are rounded: their live slots are free, and the checkpoints of what the tree had."""
        self.num_free_slots += num_states
        self.num_free_checkpoints += num_states - num_kept

    def collect(self, freed: Freed) -> None:
        """The tree's states are checkpoints."""
        self.num_free_tokens += freed.num_tokens
        self.num_free_checkpoints += freed.num_states

    def check_balance(self, held: Amount) -> None:
        """Raise `AssertionError` unless everything except `held` is free, all live slots included."""
        TwoPools.check_balance(self, Amount(held.num_tokens, 0))
        assert self.num_free_checkpoints + held.num_states == self.num_checkpoints, f"{self}: checkpoints are lost"


@dataclass(frozen=True, slots=True)
class Int8:
    """Inputs of a server's division of its memory for states, beside the bytes of a checkpoint."""

    state_bytes: int
    """Bytes of a state in full precision."""
    max_running: int
    """`--max-running-requests`."""

    def pools(self, num_tokens: int, state_pool_bytes: int, checkpoint_bytes: int) -> Int8Pools:
        """Pools of `num_tokens`, and of what `state_pool_bytes` hold; no slots where SGLang would give fewer than 2."""
        num_slots = state_pool_bytes // self.state_bytes
        if num_slots < 2:
            return Int8Pools(num_tokens, 0)
        divided = divide(num_slots, PER_REQUEST, self.max_running, self.state_bytes, checkpoint_bytes)
        return Int8Pools(num_tokens, divided.num_live, num_checkpoints=divided.num_checkpoints)
