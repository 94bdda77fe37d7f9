"""A prefill in one piece, with the states inside it taken from what its kernels leave.

A chunked kernel holds the state at every chunk's start and what each token adds to it; from there one launch of an
operator of `sgl_kernel_ext` writes the states at any tokens, straight into their slots. While a layer runs, `running()`
tells the hooks around its kernels (`operands.py`) what to keep:

    before the convolution   windows, from its inputs and the windows from which the sequences continue
    around the chunk kernel  states, from the chunk states, keys, values and decays that it leaves; KDA's from a chunk
                             state that it is asked to copy in float32, the last of each sequence that any starts from
    after the last layer     states at the end of sequences: copies of the working slots, of all layers at once

A short convolution that is a layer of its own (LFM2, ZAYA1) has windows alone, and its model calls the kernel itself,
so the layer runs from where the model takes its metadata (`begin`) to where its windows are kept (`end`). They are the
last inputs before any token, those at a sequence's end among them.

A layer whose kernels were not met writes no checkpoint; it is not counted on it, so nothing wrong is kept. The
host's time counts in each layer, so what layers share is made once a batch, and is sent to the device in one copy
(`prepare`).

Owner: the process that runs the model.
"""

import math
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import accumulate
from typing import Any, Final, NamedTuple

import torch

from marconi.engine.prefill.checkpoint import (
    Checkpoint,
    CheckpointWriter,
    LayerCall,
    mark_written,
    slots_of,
    working_slots,
)
from sgl_kernel_ext import state_copy
from sgl_kernel_ext.checkpoints import (
    Checkpoints,
    Spans,
    last_chunks,
    moved,
    spans_after_chunks,
    spans_from_start,
    spans_over_batch,
    spans_per_sequence,
    tensor_on,
)

FLA_CHUNK_SIZE: Final = 64
"""Tokens in a chunk of SGLang's kernels for the gated delta rule and KDA, and of FlashInfer's.

FlashInfer's kernel leaves states after every multiple of whole chunks that it is asked for. Sources:
`sglang/kernels/ops/attention/fla/chunk_delta_h.py`; `flashinfer/gdn_prefill.py`, `checkpoint_every_n_tokens`.
"""
MAX_ROWS_BYTES: Final = 64 << 20
"""Bytes of the states that FlashInfer is asked for in one layer. A Hopper card writes the 2 MiB of a row of Qwen3-Next
in the time in which `advance` takes in some three tokens, so about so many rows cost as much as the longer walks
between them.
"""


class Family(StrEnum):
    """Whose kernels leave enough to take states from."""

    GATED_DELTA_RULE = "gated delta rule"
    FLASHINFER = "gated delta rule by FlashInfer"
    """It leaves states after chunks, and no corrected values."""
    KDA = "KDA"
    MAMBA2 = "Mamba2"
    SHORT_CONVOLUTION = "short convolution"
    """Alone, with no recurrence behind it."""


_FAMILIES: Final = {
    ("GDNAttnBackend", "TritonGDNKernel"): Family.GATED_DELTA_RULE,
    ("GDNAttnBackend", "FlashInferGDNKernel"): Family.FLASHINFER,
    ("KDAAttnBackend", "TritonKDAKernel"): Family.KDA,
    ("Mamba2AttnBackend", "NoneType"): Family.MAMBA2,
    ("ShortConvAttnBackend", "NoneType"): Family.SHORT_CONVOLUTION,
}
"""By SGLang's linear backend and the kernel that it prefills with; Mamba2 has one, short convolutions their models'."""


class ChunkEnds(NamedTuple):
    """The multiples of `every` tokens in each sequence, after which FlashInfer is asked for states."""

    before: torch.Tensor
    """(num_sequences + 1,) int64: how many there are in the sequences before each."""
    num: int
    """How many there are in all."""
    every: int
    """A multiple of a chunk."""

    @classmethod
    def of(cls, lengths: Sequence[int], every: int, device: torch.device | str) -> "ChunkEnds":
        """Those of sequences of these lengths."""
        before = [0, *accumulate(length // every for length in lengths)]
        return cls(tensor_on(before, device), before[-1], every)


def interval(positions: Sequence[int], lengths: Sequence[int], row_bytes: int) -> int:
    """Choose how many tokens are between the states that FlashInfer is asked for, rows of `row_bytes` each.

    There is one interval for all sequences. The greatest that has a row at the end of every chunk that a position lies
    behind is the common divisor of those ends: what is left to walk is less than a chunk, and one state in a prefill
    is one row or, where it lies early, one for each time that its prefix fits into the batch. Where so many rows would
    take more than `MAX_ROWS_BYTES`, the interval is the least multiple that does not, and walks are up to as long as
    it: every state is written, whatever the batch.
    """
    every = math.gcd(*(position // FLA_CHUNK_SIZE * FLA_CHUNK_SIZE for position in positions)) or FLA_CHUNK_SIZE
    num_rows = sum(length // every for length in lengths)
    return every * max(-(-num_rows // max(MAX_ROWS_BYTES // row_bytes, 1)), 1)


@dataclass(slots=True, eq=False)
class EndStates:
    """States at the end of sequences, copied in all recurrent layers at once when the last of them has run.

    Nothing writes a layer's working slots between its end and the next forward: a kernel writes its own layer's alone,
    decoding rows of a mixed batch have slots of their own, and what the scheduler has copied or cleared for the batch
    after this is queued on the same stream, behind the copies. SGLang counts on the same where it tracks states
    (`_track_mamba_state_decode`). Verified drafts do change them, and are no prefill that is planned.

    The layers are those of this rank's pool, so that with pipeline parallelism each rank has its own last. If one of
    them ran another way, it is missed, and nothing is copied or counted.
    """

    checkpoints: tuple[Checkpoint, ...]
    pools: tuple[torch.Tensor, ...]
    """SGLang's, each (num_layers, num_slots, *state_shape)."""
    sources: torch.Tensor
    destinations: torch.Tensor
    """Copied from and to these slots, physical indices."""
    num_layers: int
    missing: set[int]
    """Layers that have not run yet."""

    def after(self, layer_id: int) -> None:
        """Note that a layer has run; after the last one, copy."""
        if layer_id not in self.missing:
            return
        self.missing.remove(layer_id)
        if not self.missing:
            for pool in self.pools:
                state_copy.copy(pool, self.sources, self.destinations, slot_dim=1)
            mark_written(self.checkpoints, self.num_layers)


class LayerPools(NamedTuple):
    """Where a layer keeps the states of its sequences, each (num_slots, *state_shape)."""

    windows: torch.Tensor
    states: torch.Tensor
    """Empty for short convolutions alone, but for ZAYA1, where it is the window of one hidden state."""


class _HeldPools(NamedTuple):
    """The layers' parts of two tensors that hold them all."""

    whole: LayerPools
    by_layer: dict[int, LayerPools]


_POOLS: Final = "marconi_pools"
"""On a linear backend: `_HeldPools`, or nothing."""


@dataclass(frozen=True, slots=True)
class Inside:
    """States before the end of what is prefilled of their sequence."""

    family: Family
    checkpoints: tuple[Checkpoint, ...]
    windows: Spans
    """The inputs that the convolution's window at each takes in."""
    continues_windows: bool
    """True if a window continues that of the prefix: its inputs do not fill it."""
    states: Spans
    """The tokens from a chunk's start to each."""
    chunk_ends: ChunkEnds | None
    """Where FlashInfer prefills."""
    snapshots: torch.Tensor | None
    """Where KDA is prefilled: (num_sequences,) int32 on the device, the chunk of each sequence whose start state is
    asked for in float32, as the chunk states have the dtype of the activations."""
    pools: dict[int, LayerPools]
    """By layer."""

    @property
    def vectors(self) -> list[torch.Tensor]:
        """All that a device has to be sent."""
        by_family = self.snapshots if self.chunk_ends is None else self.chunk_ends.before
        return [*self.windows.columns[:4], *self.states.columns[:4], *([] if by_family is None else [by_family])]

    def on(self, vectors: Sequence[torch.Tensor], slots: torch.Tensor) -> "Inside":
        """The same with `vectors`, in their order, and `slots` on the device."""
        return replace(
            self,
            windows=self.windows.on(vectors[:4], slots),
            states=self.states.on(vectors[4:8], slots),
            chunk_ends=self.chunk_ends and self.chunk_ends._replace(before=vectors[8]),
            snapshots=None if self.snapshots is None else vectors[8].to(torch.int32),
        )


@dataclass(frozen=True, slots=True)
class FromChunks:
    """Writes checkpoints from the chunk states that the unchanged kernels leave."""

    inside: Inside | None
    ends: EndStates | None

    def run(self, call: LayerCall) -> torch.Tensor:
        """The layer in one piece."""
        if self.inside is None:
            made: torch.Tensor = call.forward(call.backend, **call.names)
        else:
            layer = RunningLayer(self.inside, self.inside.pools[call.layer_id])
            token = _RUNNING.set(layer)
            try:
                made = call.forward(call.backend, **call.names)
            finally:
                _RUNNING.reset(token)
            if layer.has_windows and layer.has_states:
                mark_written(self.inside.checkpoints, 1)
        if self.ends is not None:
            self.ends.after(call.layer_id)
        return made


@dataclass(slots=True, eq=False)
class RunningLayer:
    """A layer between its start and its end, and what was kept of it."""

    inside: Inside
    pools: LayerPools
    keys: torch.Tensor | None = None
    """([1,] num_tokens, num_heads, key_dim), where the kernel gets others: KDA's scaled, FlashInfer's of any length."""
    has_windows: bool = False
    has_states: bool = False


_RUNNING: ContextVar[RunningLayer | None] = ContextVar("marconi_running_layer", default=None)


def begin(way: CheckpointWriter | None, layer_id: int) -> None:
    """Let the layer whose model calls its kernel next keep the windows that `way` lists; None lists none."""
    inside = way.inside if isinstance(way, FromChunks) else None
    _RUNNING.set(None if inside is None else RunningLayer(inside, inside.pools[layer_id]))


def end(layer: RunningLayer) -> None:
    """Count a layer that `begin` began, whose windows are all kept."""
    mark_written(layer.inside.checkpoints, 1)
    _RUNNING.set(None)


is_running: Final[Callable[[], object]] = _RUNNING.get
"""True while a layer runs that keeps states inside its batch."""


def running(family: Family) -> RunningLayer | None:
    """The layer of `family` that runs now and keeps states inside its batch; None if none does."""
    layer = _RUNNING.get()
    return layer if layer is not None and layer.inside.family is family else None


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
    has_more = len(pools.conv) > 1 and family is not Family.SHORT_CONVOLUTION
    return None if is_mamba1 or has_more else family


def prepare(family: Family, linear: Any, forward_batch: Any, checkpoints: Sequence[Checkpoint]) -> FromChunks:
    """The way of `forward_batch`, whose metadata `linear` has just made; all that it sends is one copy."""
    starts, lengths = forward_batch.extend_prefix_lens_cpu, forward_batch.extend_seq_lens_cpu
    positions = {each: each.depth - starts[each.row] for each in checkpoints}
    are_inside = family is Family.SHORT_CONVOLUTION
    inside = tuple(each for each in checkpoints if are_inside or positions[each] < lengths[each.row])
    ends = tuple(each for each in checkpoints if not are_inside and positions[each] == lengths[each.row])
    if not inside and not ends:
        return FromChunks(None, None)
    metadata = linear.forward_metadata
    device = metadata.mamba_cache_indices.device
    slots = slots_of(linear, (*ends, *inside))
    listed = _listed(family, linear, inside, [positions[each] for each in inside], lengths) if inside else None
    rows = torch.tensor([each.row for each in ends], dtype=torch.int64)
    vectors = moved([rows, *(() if listed is None else listed.vectors)], device)
    return FromChunks(
        None if listed is None else listed.on(vectors[1:], slots[len(ends) :]),
        _end_states(linear, ends, working_slots(metadata, vectors[0]), slots[: len(ends)]) if ends else None,
    )


def _listed(
    family: Family, linear: Any, checkpoints: tuple[Checkpoint, ...], positions: Sequence[int], lengths: Sequence[int]
) -> Inside:
    """The states to keep in sequences of these `lengths`, one checkpoint at each of `positions`; on the host."""
    states = linear.req_to_token_pool.mamba_pool.mamba_cache
    # Where they go is known on the device alone.
    where = Checkpoints([each.row for each in checkpoints], positions, range(len(checkpoints)))
    windows = spans_from_start(where, lengths, "cpu")
    chunk_ends = snapshots = None
    if family is Family.MAMBA2:
        spans = spans_over_batch(where, lengths, linear.forward_metadata.mixed_metadata.chunk_size, "cpu")
    elif family is Family.FLASHINFER:
        row_bytes = torch.float32.itemsize * math.prod(states.temporal.shape[2:])
        every = interval(positions, lengths, row_bytes)
        spans = spans_after_chunks(where, lengths, every, "cpu")
        chunk_ends = ChunkEnds.of(lengths, every, "cpu") if spans.num_chunks else None
    elif family is Family.KDA:
        chunks = last_chunks(where, len(lengths), FLA_CHUNK_SIZE)
        spans = spans_per_sequence(where, lengths, FLA_CHUNK_SIZE, "cpu", chunks)
        snapshots = torch.tensor(chunks, dtype=torch.int64)
    elif family is Family.SHORT_CONVOLUTION:
        spans = windows
    else:
        spans = spans_per_sequence(where, lengths, FLA_CHUNK_SIZE, "cpu")
    return Inside(
        family,
        checkpoints,
        windows,
        # KDA keeps the window before the channels, of which there are more.
        min(positions) < min(states.conv[0].shape[2:]),
        spans,
        chunk_ends,
        snapshots,
        _pools_of(linear),
    )


def _pools_of(linear: Any) -> dict[int, LayerPools]:
    """Where each layer keeps its states: views that stay with `linear` for all batches."""
    pool = linear.req_to_token_pool
    states = pool.mamba_pool.mamba_cache
    whole = LayerPools(states.conv[0], states.conv[1] if len(states.conv) > 1 else states.temporal)
    held: _HeldPools | None = getattr(linear, _POOLS, None)
    if held is None or held.whole.windows is not whole.windows or held.whole.states is not whole.states:
        of_layers = list(map(LayerPools, whole.windows.unbind(), whole.states.unbind()))
        held = _HeldPools(whole, {layer_id: of_layers[index] for layer_id, index in pool.mamba_map.items()})
        setattr(linear, _POOLS, held)
    return held.by_layer


def _end_states(
    linear: Any, checkpoints: tuple[Checkpoint, ...], sources: torch.Tensor, destinations: torch.Tensor
) -> EndStates:
    """The states to copy at the end of sequences, from and to these slots."""
    pool = linear.req_to_token_pool
    states = pool.mamba_pool.mamba_cache
    return EndStates(
        checkpoints,
        (*states.conv, states.temporal),
        sources,
        destinations,
        len(pool.mamba_map),
        set(pool.mamba_map),
    )
