"""A prefill in one piece, with the states inside it taken from what its kernels leave.

A chunked kernel holds the state at every chunk's start and what each token adds to it; from there one launch of an
operator of `sgl_kernel_ext` writes the states at any tokens, straight into their slots. While a layer runs, `running()`
tells the hooks around its kernels (`operands.py`) what to keep:

    before the convolution   windows, from its inputs and the windows that the sequences go on from
    after the chunk kernel   states, from the chunk states, keys, values and decays that it leaves
    after the layer          states at the end of a sequence: copies of the working slots, as the kernel left them

A layer whose kernels were not met writes no checkpoint; it is not counted on it, so nothing wrong is kept.

Owner: the process that runs the model.
"""

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate
from typing import Any, Final, NamedTuple

import torch

from marconi.engine.prefill.checkpoint import Checkpoint, LayerCall, mark_written, slots_of, working_slots
from sgl_kernel_ext import state_copy
from sgl_kernel_ext.checkpoints import (
    Checkpoints,
    Spans,
    spans_after_chunks,
    spans_from_start,
    spans_over_batch,
    spans_per_sequence,
    tensor_on,
)

FLA_CHUNK_SIZE: Final = 64
"""Tokens in a chunk of SGLang's kernels for the gated delta rule and KDA (`fla/chunk_delta_h.py`), and between the
states that FlashInfer is asked for."""


class Family(StrEnum):
    """Whose kernels leave enough to take states from."""

    GATED_DELTA_RULE = "gated delta rule"
    FLASHINFER = "gated delta rule by FlashInfer"
    """It leaves states after chunks, and no corrected values."""
    KDA = "KDA"
    MAMBA2 = "Mamba2"


_FAMILIES: Final = {
    ("GDNAttnBackend", "TritonGDNKernel"): Family.GATED_DELTA_RULE,
    ("GDNAttnBackend", "FlashInferGDNKernel"): Family.FLASHINFER,
    ("KDAAttnBackend", "TritonKDAKernel"): Family.KDA,
    ("Mamba2AttnBackend", "NoneType"): Family.MAMBA2,
}
"""By SGLang's linear backend and the kernel that it prefills with; Mamba2 has one."""


class ChunkEnds(NamedTuple):
    """The chunks that end in each sequence, after which FlashInfer is asked for states."""

    before: torch.Tensor
    """(num_sequences + 1,) int64: how many end in the sequences before each."""
    num: int
    """How many there are in all."""

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device | str) -> "ChunkEnds":
        """Those of sequences of these lengths."""
        before = [0, *accumulate(length // FLA_CHUNK_SIZE for length in lengths)]
        return cls(tensor_on(before, device), before[-1])


@dataclass(frozen=True, slots=True)
class SpansWay:
    """The way of a batch whose layers run as they are."""

    family: Family
    inside: tuple[Checkpoint, ...]
    """Checkpoints before the end of what is prefilled of their sequence,"""
    windows: Spans
    """with the inputs that the convolution's window at each takes in,"""
    states: Spans
    """and the tokens from a chunk's start to each."""
    chunk_ends: ChunkEnds | None
    """Where FlashInfer prefills."""
    ends: tuple[Checkpoint, ...]
    """Checkpoints at the end,"""
    sources: torch.Tensor
    destinations: torch.Tensor
    """copied from and to these slots, physical indices."""

    def run(self, call: LayerCall) -> torch.Tensor:
        """The layer in one piece."""
        if self.inside:
            layer = RunningLayer(self, call.states)
            token = _RUNNING.set(layer)
            try:
                made: torch.Tensor = call()
            finally:
                _RUNNING.reset(token)
            if layer.has_windows and layer.has_states:
                mark_written(self.inside, 1)
        else:
            made = call()
        if self.ends:
            for pool in (*call.states.conv, call.states.temporal):
                state_copy.copy(pool, self.sources, self.destinations)
            mark_written(self.ends, 1)
        return made


@dataclass(slots=True, eq=False)
class RunningLayer:
    """A layer between its start and its end, and what was kept of it."""

    way: SpansWay
    pools: Any
    """SGLang's: `conv`, a list of one, and `temporal`."""
    keys: torch.Tensor | None = None
    """(num_tokens, num_heads, key_dim), where the kernel is given others: KDA's scaled, FlashInfer's of any length."""
    has_windows: bool = False
    has_states: bool = False


_RUNNING: ContextVar[RunningLayer | None] = ContextVar("marconi_running_layer", default=None)


def running(family: Family) -> RunningLayer | None:
    """The layer of `family` that runs now and keeps states inside its batch; None if none does."""
    layer = _RUNNING.get()
    return layer if layer is not None and layer.way.family is family else None


def running_any() -> RunningLayer | None:
    """The layer of any family that runs now and keeps states inside its batch."""
    return _RUNNING.get()


def family_of(linear: Any) -> Family | None:
    """Whose kernels `linear` runs its prefills by; None where they leave too little, so that they have to be cut."""
    dispatcher = getattr(linear, "kernel_dispatcher", None)
    kernel = type(getattr(dispatcher, "extend_kernel", None)).__name__
    family = _FAMILIES.get((type(linear).__name__, kernel))
    if family is None:
        return None
    pools = linear.req_to_token_pool.mamba_pool.mamba_cache
    # Mamba1 runs on Mamba2's backend with heads of one channel, and its scan leaves nothing.
    is_mamba1 = family is Family.MAMBA2 and pools.temporal.shape[-2] == 1
    return None if is_mamba1 or len(pools.conv) != 1 else family


def prepare(family: Family, linear: Any, forward_batch: Any, checkpoints: Sequence[Checkpoint]) -> SpansWay:
    """The way of `forward_batch`, whose metadata `linear` has just made."""
    starts, lengths = forward_batch.extend_prefix_lens_cpu, forward_batch.extend_seq_lens_cpu
    positions = {each: each.depth - starts[each.row] for each in checkpoints}
    inside = tuple(each for each in checkpoints if positions[each] < lengths[each.row])
    ends = tuple(each for each in checkpoints if positions[each] == lengths[each.row])
    metadata = linear.forward_metadata
    indices = metadata.mamba_cache_indices
    device = indices.device

    slots = slots_of(linear, inside) if inside else indices.new_empty(0)
    where = Checkpoints([each.row for each in inside], [positions[each] for each in inside], slots)
    if family is Family.MAMBA2:
        states = spans_over_batch(where, lengths, metadata.mixed_metadata.chunk_size, device)
    elif family is Family.FLASHINFER:
        states = spans_after_chunks(where, lengths, FLA_CHUNK_SIZE, device)
    else:
        states = spans_per_sequence(where, lengths, FLA_CHUNK_SIZE, device)
    return SpansWay(
        family,
        inside,
        spans_from_start(where, lengths, device),
        states,
        ends=ends,
        chunk_ends=ChunkEnds.of(lengths, device) if family is Family.FLASHINFER else None,
        sources=working_slots(metadata, [each.row for each in ends]),
        destinations=slots_of(linear, ends) if ends else indices.new_empty(0).long(),
    )
