"""A prefill that is cut where a state is kept, inside each recurrent layer.

A recurrent layer's kernel leaves the state at the end of what it is given. So a layer whose batch has checkpoints
runs in passes: the first segment of every sequence, then the second of those that have one, ...; after each pass the
states that were asked for are copied from the request's working slot to their own, exactly as the kernel left them.

    sequence 0   |------- c |---------- end        pass 1: both first segments, copy c and d
    sequence 1   |-- d |---- end                   pass 2: both second segments

All else (attention, projections outside the layer, sampling) sees one batch. Any kernel backend will do: it gets
smaller batches, with the metadata that it makes for them itself. A checkpoint at the end of what is prefilled costs no
pass.
"""

import copy
from collections.abc import Container, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import Any, NamedTuple

import torch

from marconi.engine.faults import Unrecoverable, fails_open
from marconi.engine.prefill.checkpoint import Checkpoint, LayerCall, mark_written, slots_of, working_slots
from sgl_kernel_ext.checkpoints import moved

_INPUTS = ("mixed_qkv", "hidden_states", "q")
"""The names of the arguments with which layers take their tokens."""
_OF_TOKENS = frozenset({*_INPUTS, "k", "v", "a", "b", "output"})
"""Arguments with an entry a token; others may be as wide by chance."""
_Key = tuple[int, int]
"""A row of the batch, and how many tokens from its start."""


@dataclass(frozen=True, slots=True)
class Pass:
    """A part of the batch that runs at once."""

    batch: Any
    """A `ForwardBatch` of the segments, or the whole one."""
    metadata: Any
    """The attention backend's metadata for `batch`."""
    rows: slice | torch.Tensor
    """The tokens of the batch that it covers."""
    kept: tuple[Checkpoint, ...]
    """The checkpoints to copy after this pass."""
    sources: torch.Tensor
    """The slots to copy from, physical indices."""
    destinations: torch.Tensor
    """The slots to copy to, physical indices."""


@dataclass(frozen=True, slots=True)
class Passes:
    """The way of a batch whose layers run one pass after the other."""

    passes: tuple[Pass, ...]

    def run(self, call: LayerCall) -> torch.Tensor:
        """The layer in passes."""
        linear, names = call.linear, dict(call.names)
        # The caller's buffer holds the whole batch; without it a backend returns a tensor of its own.
        names.pop("linear_attn_output", None)
        whole, num_tokens = linear.forward_metadata, _num_tokens(names)
        result: torch.Tensor | None = names.get("output")
        num_run = 0
        try:
            for each in self.passes:
                given = {
                    name: _taken(value, each.rows, num_tokens) if name in _OF_TOKENS else value
                    for name, value in names.items()
                }
                linear.forward_metadata = each.metadata
                made = call.forward(call.backend, **{**given, "forward_batch": each.batch})
                num_run += 1
                result = _put(result, made, each.rows, num_tokens)
                fails_open(_copy_states)(call, each)
        except Exception as error:
            if not num_run:
                raise
            # Working slots stand after what has run: from its start the layer can no longer be run.
            raise Unrecoverable(f"a layer ran {num_run} of its {len(self.passes)} passes") from error
        finally:
            linear.forward_metadata = whole
        assert result is not None
        return result


def prepare(backend: Any, forward_batch: Any, checkpoints: Sequence[Checkpoint]) -> Passes:
    """The passes of `forward_batch`, whose metadata `backend` has just made; all that it sends is one copy."""
    whole = backend.forward_metadata
    starts, lengths = forward_batch.extend_prefix_lens_cpu, forward_batch.extend_seq_lens_cpu
    by_end = {(each.row, each.depth): each for each in checkpoints}
    depths = [{start + length} for start, length in zip(starts, lengths, strict=True)]
    for each in checkpoints:
        depths[each.row].add(each.depth)
    ends = [sorted(row) for row in depths]
    is_cut = any(len(row_ends) > 1 for row_ends in ends)
    parts = [_Part.of(index, starts, ends, by_end) for index in range(max(map(len, ends)))]
    vectors = [part.vectors for part in parts]
    sent = iter(moved([each for listed in vectors for each in listed], whole.mamba_cache_indices.device))
    passes: list[Pass] = []
    try:
        for segments, listed in zip(parts, vectors, strict=True):
            numbers = [*islice(sent, len(listed))]
            part, metadata = forward_batch, whole
            tokens: slice | torch.Tensor = slice(None)
            if is_cut:
                part = _batch_of(forward_batch, segments, numbers)
                backend.init_forward_metadata(part)
                metadata = backend.forward_metadata
                tokens = _tokens(forward_batch, segments.rows, segments.segments)
            keys = segments.keys
            kept = tuple(by_end[key] for key in keys if key in by_end)
            sources = working_slots(metadata, numbers[-1])
            destinations = slots_of(backend, kept) if kept else sources
            passes.append(Pass(part, metadata, tokens, kept, sources, destinations))
    finally:
        backend.forward_metadata = whole
    return Passes(tuple(passes))


class _Part(NamedTuple):
    """A pass as the host knows it: one segment of each of some rows of the batch."""

    rows: list[int]
    segments: list[tuple[int, int]]
    """The first token of each, and the one behind its last, from the start of the sequence."""
    ending: list[int]
    """Which of them end at a checkpoint."""

    @classmethod
    def of(cls, index: int, starts: Sequence[int], ends: Sequence[list[int]], by_end: Container[_Key]) -> "_Part":
        """The `index`-th segments of sequences, cut at `ends`."""
        rows = [row for row, row_ends in enumerate(ends) if index < len(row_ends)]
        segments = [(ends[row][index - 1] if index else starts[row], ends[row][index]) for row in rows]
        part = cls(rows, segments, [])
        return part._replace(ending=[at for at, key in enumerate(part.keys) if key in by_end])

    @property
    def keys(self) -> list[_Key]:
        """Row and end of each segment."""
        return [(row, end) for row, (_, end) in zip(self.rows, self.segments, strict=True)]

    @property
    def prefixes(self) -> list[int]:
        """Tokens of each sequence before its segment."""
        return [start for start, _ in self.segments]

    @property
    def lengths(self) -> list[int]:
        """Tokens of each segment."""
        return [end - start for start, end in self.segments]

    @property
    def vectors(self) -> list[torch.Tensor]:
        """All that a device is sent: ends, rows, prefixes, lengths and offsets of segments, and which are `ending`."""
        ends = [end for _, end in self.segments]
        numbers = (ends, self.rows, self.prefixes, self.lengths, _offsets(self.lengths), self.ending)
        return [torch.tensor(each, dtype=torch.int64) for each in numbers]


def _batch_of(forward_batch: Any, segments: _Part, numbers: Sequence[torch.Tensor]) -> Any:
    """A `ForwardBatch` of `segments`, whose vectors are `numbers` on the device.

    A recurrent layer sees no more of it than is set here.
    """
    ends, rows, prefixes, lengths, offsets, _ = numbers
    host_ends = [end for _, end in segments.segments]
    part = copy.copy(forward_batch)
    part.batch_size = len(segments.rows)
    part.req_pool_indices = forward_batch.req_pool_indices.index_select(0, rows)
    part.seq_lens = ends.to(forward_batch.seq_lens.dtype)
    part.seq_lens_cpu = torch.tensor(host_ends, dtype=torch.int64)
    part.seq_lens_sum = sum(host_ends)
    part.extend_num_tokens = sum(segments.lengths)
    part.extend_prefix_lens = prefixes.to(forward_batch.extend_prefix_lens.dtype)
    part.extend_seq_lens = lengths.to(forward_batch.extend_seq_lens.dtype)
    part.extend_start_loc = offsets.to(forward_batch.extend_start_loc.dtype)
    part.extend_prefix_lens_cpu, part.extend_seq_lens_cpu = segments.prefixes, segments.lengths
    part.sampling_info = None
    part.mamba_track_indices = part.mamba_track_mask = part.mamba_track_seqlens = None
    part.mamba_prefill_track_mask_cpu = part.mamba_track_seqlens_cpu = None
    return part


def _tokens(forward_batch: Any, rows: list[int], segments: list[tuple[int, int]]) -> slice | torch.Tensor:
    """Where the segments' tokens lie among the batch's."""
    starts, offsets = forward_batch.extend_prefix_lens_cpu, _offsets(forward_batch.extend_seq_lens_cpu)
    ranges = []
    for row, (start, end) in zip(rows, segments, strict=True):
        first = offsets[row] - starts[row]
        ranges.append((first + start, first + end))
    if len(ranges) == 1:
        return slice(*ranges[0])
    device = forward_batch.req_pool_indices.device
    return torch.cat([torch.arange(*each, device=device) for each in ranges])


def _offsets(lengths: Sequence[int]) -> list[int]:
    """Where each of the sequences of these lengths begins among the batch's tokens."""
    return [0, *accumulate(lengths)][:-1]


def _num_tokens(names: dict[str, Any]) -> int:
    """Tokens that the layer is given: those of the batch, and perhaps padding behind them."""
    given = next(names[name] for name in _INPUTS if names.get(name) is not None)
    first: torch.Tensor = given[0] if isinstance(given, tuple) else given
    return first.shape[0]


def _token_axis(tensor: torch.Tensor, num_tokens: int) -> int | None:
    """The axis of a layer's input or output that runs over the batch's tokens: the first, or behind one of size 1."""
    if tensor.dim() and tensor.shape[0] == num_tokens:
        return 0
    return 1 if tensor.dim() > 1 and tensor.shape[0] == 1 and tensor.shape[1] == num_tokens else None


def _taken(value: Any, rows: slice | torch.Tensor, num_tokens: int) -> Any:
    """The part of an argument that a pass sees."""
    if isinstance(value, tuple):
        return tuple(_taken(each, rows, num_tokens) for each in value)
    axis = _token_axis(value, num_tokens) if isinstance(value, torch.Tensor) else None
    if axis is None:
        return value
    return value[rows] if axis == 0 else value[:, rows]


def _put(result: torch.Tensor | None, made: torch.Tensor, rows: slice | torch.Tensor, num_tokens: int) -> torch.Tensor:
    """`made` in its place among the whole batch's output."""
    if isinstance(rows, slice) and rows == slice(None):
        return made
    axis = 1 if made.dim() > 2 and made.shape[0] == 1 else 0
    if result is None:
        shape = list(made.shape)
        shape[axis] = num_tokens
        result = made.new_zeros(shape)
    if axis:
        result[:, rows] = made
    else:
        result[rows] = made
    return result


def _copy_states(call: LayerCall, part: Pass) -> None:
    if part.kept:
        pools = call.states
        for pool in (*pools.conv, pools.temporal):
            pool[part.destinations] = pool[part.sources]
        mark_written(part.kept, 1)
