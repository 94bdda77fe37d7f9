"""Pools of a replayed server, which count what its requests and its tree take: two pools, or the bytes of one.

In one pool what is free is bytes, rounded down to whole pages of KV or whole states. For int8 see `int8.py`.
"""

from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from marconi.lifecycle.pools import Amount
from marconi.policy.base import Need
from marconi.tree import Freed


@dataclass(slots=True)
class TwoPools:
    """Two pools: their sizes and their free parts."""

    num_tokens: int
    num_slots: int
    num_free_tokens: int = 0
    num_free_slots: int = 0

    kv_need: ClassVar[Need] = Need.KV
    state_need: ClassVar[Need] = Need.STATE
    are_slots_shared: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Raise `ValueError` for less than nothing; all is free at first."""
        if self.num_tokens < 0 or self.num_slots < 0:
            raise ValueError(f"each pool must be 0 or more, got {self.num_tokens} tokens and {self.num_slots} slots")
        self.num_free_tokens, self.num_free_slots = self.num_tokens, self.num_slots

    def num_rows(self, num_working_slots: int) -> int:
        """Each has its slots, and two: for the state that it starts from and the one that it leaves."""
        return self.num_slots // (num_working_slots + 2)

    def take(self, num_tokens: int = 0, num_slots: int = 0) -> None:
        """Take free tokens and slots."""
        # A prediction that was not told of every step of decoding gives KV to the tree that nobody took.
        assert num_tokens <= max(self.num_free_tokens, 0), f"{self}: no KV is left to evict for a request that fits"
        assert num_slots <= self.num_free_slots, f"{self}: no slot is left to evict for a request that fits"
        self.num_free_tokens -= num_tokens
        self.num_free_slots -= num_slots

    def give(self, num_tokens: int = 0, num_slots: int = 0) -> None:
        """Return tokens and slots."""
        self.num_free_tokens += num_tokens
        self.num_free_slots += num_slots

    @property
    def has_slot_for_copy(self) -> bool:
        """A slot is evicted for it."""
        return True

    def take_planned(self) -> bool | None:
        """Take a slot for a planned state, like any other; None if none is free."""
        if not self.num_free_slots:
            return None
        self.num_free_slots -= 1
        return True

    def promise(self) -> bool:
        """True if the tree can take the last state of a request: it takes the slot with it."""
        return True

    def hand_over(self, num_states: int, num_kept: int) -> None:
        """Get back the slots of what the tree had."""
        self.num_free_slots += num_states - num_kept

    def collect(self, freed: Freed) -> None:
        """Each to its own."""
        self.num_free_tokens += freed.num_tokens
        self.num_free_slots += freed.num_states

    def holds(self, num_tokens: int, num_slots: int) -> bool:
        """True if it fits, KV and states each in their own pool."""
        return num_tokens <= self.num_tokens and num_slots <= self.num_slots

    def spares(self, evictable: Amount, reserved: Amount) -> bool:
        """Each in its own."""
        has_tokens = self.num_free_tokens + evictable.num_tokens >= reserved.num_tokens
        return has_tokens and self.num_free_slots + evictable.num_states >= reserved.num_states

    def spares_slot(self, evictable: Amount, reserved: Amount) -> bool:
        """KV is in another pool."""
        return self.num_free_slots + evictable.num_states > reserved.num_states

    def check_balance(self, held: Amount) -> None:
        """Raise `AssertionError` unless everything except `held` is free."""
        assert self.num_free_tokens + held.num_tokens == self.num_tokens, f"{self}: KV is lost"
        assert self.num_free_slots + held.num_states == self.num_slots, f"{self}: slots are lost"


@dataclass(slots=True)
class JointPool:
    """One pool of bytes for KV and states: its size and its free part."""

    num_bytes: int
    kv_bytes_per_token: int
    state_bytes: int
    page_tokens: int = 1
    num_free_bytes: int = 0

    kv_need: ClassVar[Need] = Need.BYTES
    """Every victim frees bytes."""
    state_need: ClassVar[Need] = Need.BYTES
    are_slots_shared: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Raise `ValueError` for sizes below 1; all is free at first."""
        for name in ("num_bytes", "kv_bytes_per_token", "state_bytes", "page_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, got {getattr(self, name)}")
        self.num_free_bytes = self.num_bytes

    @property
    def num_tokens(self) -> int:
        """KV tokens, if it held nothing else."""
        return self.num_bytes // (self.kv_bytes_per_token * self.page_tokens) * self.page_tokens

    @property
    def num_slots(self) -> int:
        """State slots, if it held nothing else."""
        return self.num_bytes // self.state_bytes

    def num_rows(self, num_working_slots: int) -> int:
        """Rows of two pools, if it held nothing but states."""
        return self.num_slots // (num_working_slots + 2)

    @property
    def num_free_tokens(self) -> int:
        """KV tokens that may be taken now, if no slot is."""
        return self.num_free_bytes // (self.kv_bytes_per_token * self.page_tokens) * self.page_tokens

    @property
    def num_free_slots(self) -> int:
        """State slots that may be taken now, if no KV is."""
        return self.num_free_bytes // self.state_bytes

    def take(self, num_tokens: int = 0, num_slots: int = 0) -> None:
        """Take free tokens and slots."""
        self.num_free_bytes -= num_tokens * self.kv_bytes_per_token + num_slots * self.state_bytes
        assert self.num_free_bytes >= 0, f"{self}: nothing is left to evict for a request that fits"

    def give(self, num_tokens: int = 0, num_slots: int = 0) -> None:
        """Return tokens and slots."""
        self.num_free_bytes += num_tokens * self.kv_bytes_per_token + num_slots * self.state_bytes

    @property
    def has_slot_for_copy(self) -> bool:
        """A slot is evicted for it."""
        return True

    def take_planned(self) -> bool | None:
        """Take a slot for a planned state, like any other; None if none is free."""
        if self.num_free_bytes < self.state_bytes:
            return None
        self.num_free_bytes -= self.state_bytes
        return True

    def promise(self) -> bool:
        """True if the tree can take the last state of a request: it takes the slot with it."""
        return True

    def hand_over(self, num_states: int, num_kept: int) -> None:
        """Get back the slots of what the tree had."""
        self.num_free_bytes += (num_states - num_kept) * self.state_bytes

    def collect(self, freed: Freed) -> None:
        """KV and states are bytes."""
        self.num_free_bytes += freed.num_tokens * self.kv_bytes_per_token + freed.num_states * self.state_bytes

    def holds(self, num_tokens: int, num_slots: int) -> bool:
        """True if it fits, KV and states side by side."""
        return self._bytes_of(num_tokens, num_slots) <= self.num_bytes

    def spares(self, evictable: Amount, reserved: Amount) -> bool:
        """KV and states count on either side."""
        num_tokens, num_states = evictable.num_tokens - reserved.num_tokens, evictable.num_states - reserved.num_states
        return self.num_free_bytes + num_tokens * self.kv_bytes_per_token + num_states * self.state_bytes >= 0

    def spares_slot(self, evictable: Amount, reserved: Amount) -> bool:
        """A slot is bytes as well."""
        num_tokens, num_states = evictable.num_tokens - reserved.num_tokens, evictable.num_states - reserved.num_states
        return self.num_free_bytes + num_tokens * self.kv_bytes_per_token + (num_states - 1) * self.state_bytes >= 0

    def check_balance(self, held: Amount) -> None:
        """Raise `AssertionError` unless everything except `held` is free."""
        assert self.num_free_bytes + self._bytes_of(*held) == self.num_bytes, f"{self}: bytes are lost"

    def _bytes_of(self, num_tokens: int, num_slots: int) -> int:
        return num_tokens * self.kv_bytes_per_token + num_slots * self.state_bytes


Pool: TypeAlias = TwoPools | JointPool
