"""Memory for KV and states, which requests and the tree share: two pools, the bytes of one, or a third for int8.

Two pools are SGLang's `--mamba-full-memory-ratio`, one is its `--enable-unified-memory`, and with checkpoints in int8
(`--enable-int8-mamba-checkpoint`) the tree's states have slots that no request works in. Who is short says which `Need`
a victim is asked for: in one pool any victim helps either side.
"""

from typing import Final, NamedTuple, Protocol, TypeVar

from marconi.policy.base import Need


class Amount(NamedTuple):
    """Tokens of KV, and states."""

    num_tokens: int
    num_states: int

    def without(self, other: "Amount") -> "Amount":
        """The rest."""
        return Amount(self.num_tokens - other.num_tokens, self.num_states - other.num_states)


NOTHING: Final = Amount(0, 0)
SlotT_co = TypeVar("SlotT_co", covariant=True)


class Pool(Protocol[SlotT_co]):
    """A division of memory, in SGLang's allocators or counted."""

    @property
    def state_need(self) -> Need:
        """The kind of memory that a victim must free when a planned state lacks a slot."""
        ...

    @property
    def are_slots_shared(self) -> bool:
        """Whether the tree's states take slots of those that requests work in; not so in int8."""
        ...

    def spares_slot(self, evictable: Amount, reserved: Amount) -> bool:
        """True if a slot beyond `reserved` is free once everything `evictable` is evicted."""
        ...

    def take_planned(self) -> SlotT_co | None:
        """Take a free slot for a planned state; None if there is none."""
        ...

    def promise(self) -> bool:
        """True if the tree can take the last state of a request: most pools take the slot with it."""
        ...
