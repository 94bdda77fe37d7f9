"""The slots of a state pool that the sequences of a batch own.

A pool is (num_slots, *state_shape) with any stride between slots; a sequence owns one slot. A negative slot marks a
padding sequence: no slot is read or written for it and its outputs are zero. Slots of one batch are distinct, as each
is written by its own sequence.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from sgl_kernel_ext.arguments import INTEGERS, require
from sgl_kernel_ext.launch import runs_kernels


@dataclass(frozen=True, slots=True, eq=False)
class StateSlots:
    """Which slot of `pool` each sequence continues from and writes its final state to.

    `pool` (num_slots, *state_shape) of any float dtype; `slots` (num_sequences,) int32 or int64; `has_initial_state`
    (num_sequences,) bool, false where a sequence starts from a zero state whatever its slot holds; absent means that
    every slot holds a state. Raises ValueError where shapes or dtypes are others, on a CPU; what is made for kernels,
    once a layer, they check as far as they must (`launch.py`).
    """

    pool: Tensor
    slots: Tensor
    has_initial_state: Tensor | None = None

    def __post_init__(self) -> None:
        if runs_kernels(self.pool):
            return
        if self.pool.dim() < 2:
            raise ValueError(f"pool must have 2 dimensions or more, got {tuple(self.pool.shape)}")
        require("pool", self.pool, self.pool.shape)
        require("slots", self.slots, ("num_sequences",), dtypes=INTEGERS)
        if self.has_initial_state is not None:
            require("has_initial_state", self.has_initial_state, self.slots.shape, dtypes=(torch.bool,))

    @property
    def is_padding(self) -> Tensor:
        """Which sequences are padding, (num_sequences,) bool."""
        return self.slots < 0

    def require(self, num_sequences: int, state_shape: tuple[int, ...]) -> None:
        """Raise ValueError unless there is a slot for each sequence and a slot holds `state_shape`."""
        if self.slots.shape[0] != num_sequences:
            raise ValueError(f"slots must be {num_sequences}, one a sequence, got {self.slots.shape[0]}")
        if self.has_initial_state is not None and self.has_initial_state.shape != self.slots.shape:
            raise ValueError(f"has_initial_state must be {num_sequences}, got {tuple(self.has_initial_state.shape)}")
        if tuple(self.pool.shape[1:]) != state_shape:
            raise ValueError(f"a slot of pool must hold {state_shape}, got {tuple(self.pool.shape[1:])}")

    def read(self, dtype: torch.dtype) -> Tensor:
        """Read the initial states, (num_sequences, *state_shape) of `dtype`, zero where there is none."""
        held = ~self.is_padding
        if self.has_initial_state is not None:
            held = held & self.has_initial_state
        states = self.pool.new_zeros(self.slots.shape[0], *self.pool.shape[1:], dtype=dtype)
        states[held] = self.pool[self.slots[held].long()].to(dtype)
        return states

    def write(self, states: Tensor) -> None:
        """Round `states` (num_sequences, *state_shape) to the pool's dtype and put each into its slot."""
        owned = ~self.is_padding
        self.pool[self.slots[owned].long()] = states[owned].to(self.pool.dtype)


def initial_states(
    states: StateSlots | None,
    num_sequences: int,
    state_shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Read the initial states of `states`, zero without it: (num_sequences, *state_shape) of `dtype`.

    Raises ValueError as `StateSlots.require` does.
    """
    if states is None:
        return torch.zeros(num_sequences, *state_shape, dtype=dtype, device=device)
    states.require(num_sequences, state_shape)
    return states.read(dtype)
