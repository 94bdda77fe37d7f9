"""Prefills that are cut where a state is kept, inside each recurrent layer.

A recurrent layer's kernel leaves the state at the end of what it is given. So a layer whose batch has checkpoints
runs in passes: the first segment of every sequence, then the second of those that go on, ...; after each pass the
states that were asked for are copied from the request's working slot to their own, exactly as the kernel left them.

    sequence 0   |------- c |---------- end        pass 1: both first segments, copy c and d
    sequence 1   |-- d |---- end                   pass 2: both second segments

All else (attention, projections outside the layer, sampling) sees one batch. Any kernel backend will do: it gets
smaller batches, with the metadata that it makes for them itself. A checkpoint at the end of what is prefilled costs no
pass. Source: `srt/layers/attention/hybrid_linear_attn_backend.py`.

Owner: the process that runs the model. A runner copies the `ForwardBatch` between the scheduler and the layers, so plan
and passes wait on the backend, known by the one list of lengths that every copy shares.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch

PLAN = "marconi_plan"
"""On a `ScheduleBatch`: a sequence of `Checkpoint`, or nothing. On a linear backend: `_Plan`, for its next batch."""
_PASSES = "marconi_passes"
"""On a linear backend: `_Prepared`, or nothing."""
_INPUTS = ("mixed_qkv", "hidden_states", "q")
"""What layers call their tokens."""
_OF_TOKENS = frozenset({*_INPUTS, "k", "v", "a", "b", "output"})
"""Arguments with an entry a token; others may be as wide by chance."""
_HYBRID = ("q", "k", "v", "layer", "forward_batch", "save_kv_cache")
"""What `HybridLinearAttnBackend.forward` takes by position."""
_MAMBA2 = ("mixer", "hidden_states", "output", "layer_id", "forward_batch", "mup_vector", "use_triton_causal_conv")
"""What `Mamba2AttnBackend.forward` takes by position."""
VERIFIED_BACKENDS = frozenset({"GDNAttnBackend", "KDAAttnBackend", "LightningAttentionBackend", "Mamba2AttnBackend"})
"""Linear backends whose layers all run through the two forwards that are hooked, with all they know in metadata."""


@dataclass(slots=True, eq=False)
class Checkpoint:
    """A state to keep: of the batch's `row`-th sequence, after `depth` tokens from its start, in `slot`."""

    row: int
    depth: int
    slot: torch.Tensor
    """One index of SGLang's state allocator."""
    num_layers: int = 0
    """Recurrent layers that have written their part."""


@dataclass(frozen=True, slots=True)
class Pass:
    """A part of the batch that runs at once."""

    batch: Any
    """A `ForwardBatch` of the segments, or the whole one."""
    metadata: Any
    """What the backend made for it."""
    rows: slice | torch.Tensor
    """Which of the batch's tokens."""
    kept: tuple[Checkpoint, ...]
    """What to copy after it,"""
    sources: torch.Tensor
    destinations: torch.Tensor
    """from and to these slots, physical indices."""


class _Plan(NamedTuple):
    """The checkpoints of the batch with these lengths, which is the same list in every copy of a `ForwardBatch`."""

    lengths: list[int]
    checkpoints: Sequence[Checkpoint]


class _Prepared(NamedTuple):
    """The passes of the batch with these lengths."""

    lengths: list[int]
    passes: tuple[Pass, ...]


def on_init_new(forward_batch: Any, _cls: type, batch: Any, model_runner: Any, *_: Any, **__: Any) -> None:
    """After `ForwardBatch.init_new`: what the scheduler planned is left with the backend for this batch."""
    checkpoints = getattr(batch, PLAN, None)
    # The batch goes on to decode with its plan still on it.
    if checkpoints and batch.forward_mode.is_extend():
        plan = _Plan(forward_batch.extend_seq_lens_cpu, checkpoints)
        setattr(model_runner.attn_backend.linear_attn_backend, PLAN, plan)


def on_init_forward_metadata(_result: None, backend: Any, forward_batch: Any) -> None:
    """After `HybridLinearAttnBackend.init_forward_metadata`: make the passes, once for all layers."""
    linear = backend.linear_attn_backend
    plan: _Plan | None = getattr(linear, PLAN, None)
    prepared = None
    if plan is not None and plan.lengths is forward_batch.extend_seq_lens_cpu:
        setattr(linear, PLAN, None)
        prepared = _Prepared(plan.lengths, prepare(linear, forward_batch, plan.checkpoints))
    setattr(linear, _PASSES, prepared)


def around_hybrid_forward(forward: Callable[..., Any], backend: Any, *args: Any, **kwargs: Any) -> Any:
    """Around `HybridLinearAttnBackend.forward`: a recurrent layer runs in passes, where its batch has any."""
    names = {**dict(zip(_HYBRID, args, strict=False)), **kwargs}
    linear = backend.linear_attn_backend
    passes = _passes_of(linear, names["forward_batch"])
    if passes is None or backend._is_full_attn(names["layer"], names.get("layer_id")):
        return forward(backend, *args, **kwargs)
    # The caller's buffer holds the whole batch; without it a backend returns a tensor of its own.
    names.pop("linear_attn_output", None)
    return _run(passes, forward, backend, linear, names["layer"].layer_id, names)


def around_mamba2_forward(forward: Callable[..., Any], backend: Any, *args: Any, **kwargs: Any) -> Any:
    """Around `Mamba2AttnBackend.forward`, which models call by itself."""
    names = {**dict(zip(_MAMBA2, args, strict=False)), **kwargs}
    passes = _passes_of(backend, names["forward_batch"])
    if passes is None:
        return forward(backend, *args, **kwargs)
    return _run(passes, forward, backend, backend, names["layer_id"], names)


def why_not(model_runner: Any) -> str | None:
    """Why the prefills of this model cannot be cut; None if they can."""
    hybrid = model_runner.attn_backend
    linear = getattr(hybrid, "linear_attn_backend", None)
    if type(hybrid).__name__ != "HybridLinearAttnBackend" or type(linear).__name__ not in VERIFIED_BACKENDS:
        return f"recurrent layers on {type(linear or hybrid).__name__}"
    if getattr(hybrid, "use_captured_forward_metadata_for_breakable_cuda_graph", False):
        return "a prefill graph that captures the recurrent layers"
    pool = model_runner.req_to_token_pool
    if pool.short_conv_pool.enabled or pool.ngram_pool.enabled:
        return "states beside those of the recurrent layers"
    return None


def _passes_of(linear: Any, forward_batch: Any) -> tuple[Pass, ...] | None:
    prepared: _Prepared | None = getattr(linear, _PASSES, None)
    if prepared is None or getattr(forward_batch, "extend_seq_lens_cpu", None) is not prepared.lengths:
        return None
    return prepared.passes


def prepare(backend: Any, forward_batch: Any, checkpoints: Sequence[Checkpoint]) -> tuple[Pass, ...]:
    """The passes of `forward_batch`, whose metadata `backend` has just made."""
    whole = backend.forward_metadata
    starts, lengths = forward_batch.extend_prefix_lens_cpu, forward_batch.extend_seq_lens_cpu
    by_end = {(each.row, each.depth): each for each in checkpoints}
    translate = backend.req_to_token_pool.translate_mamba_indices
    depths = [{start + length} for start, length in zip(starts, lengths, strict=True)]
    for each in checkpoints:
        depths[each.row].add(each.depth)
    ends = [sorted(row) for row in depths]
    passes: list[Pass] = []
    try:
        for index in range(max(map(len, ends))):
            rows = [row for row, row_ends in enumerate(ends) if index < len(row_ends)]
            segments = [(ends[row][index - 1] if index else starts[row], ends[row][index]) for row in rows]
            part, metadata = forward_batch, whole
            tokens: slice | torch.Tensor = slice(None)
            if len(rows) < len(ends) or any(len(row_ends) > 1 for row_ends in ends):
                part = _part(forward_batch, rows, segments)
                backend.init_forward_metadata(part)
                metadata = backend.forward_metadata
                tokens = _tokens(forward_batch, rows, segments)
            keys = [(row, end) for row, (_, end) in zip(rows, segments, strict=True)]
            kept = tuple(by_end[key] for key in keys if key in by_end)
            sources = metadata.mamba_cache_indices[[at for at, key in enumerate(keys) if key in by_end]].long()
            destinations = translate(torch.cat([each.slot.view(1) for each in kept])).long() if kept else sources
            passes.append(Pass(part, metadata, tokens, kept, sources, destinations))
    finally:
        backend.forward_metadata = whole
    return tuple(passes)


def _part(forward_batch: Any, rows: list[int], segments: list[tuple[int, int]]) -> Any:
    """A `ForwardBatch` of one segment of each of `rows`; a recurrent layer sees no more of it than is set here."""
    device = forward_batch.req_pool_indices.device
    prefixes = [start for start, _ in segments]
    lengths = [end - start for start, end in segments]
    ends = [end for _, end in segments]
    offsets = _offsets(lengths)

    def tensor(values: list[int], like: torch.Tensor) -> torch.Tensor:
        return torch.tensor(values, dtype=like.dtype, device=device)

    part = copy.copy(forward_batch)
    part.batch_size = len(rows)
    part.req_pool_indices = forward_batch.req_pool_indices[rows]
    part.seq_lens = tensor(ends, forward_batch.seq_lens)
    part.seq_lens_cpu = torch.tensor(ends, dtype=torch.int64)
    part.seq_lens_sum = sum(ends)
    part.extend_num_tokens = sum(lengths)
    part.extend_prefix_lens = tensor(prefixes, forward_batch.extend_prefix_lens)
    part.extend_seq_lens = tensor(lengths, forward_batch.extend_seq_lens)
    part.extend_start_loc = tensor(offsets, forward_batch.extend_start_loc)
    part.extend_prefix_lens_cpu, part.extend_seq_lens_cpu = prefixes, lengths
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


def _run(
    passes: tuple[Pass, ...],
    forward: Callable[..., Any],
    backend: Any,
    linear: Any,
    layer_id: int,
    names: dict[str, Any],
) -> torch.Tensor:
    """`forward` of `backend` in passes; `linear` holds the metadata, which may be the same."""
    whole, num_tokens = linear.forward_metadata, _num_tokens(names)
    result: torch.Tensor | None = names.get("output")
    try:
        for each in passes:
            given = {
                name: _taken(value, each.rows, num_tokens) if name in _OF_TOKENS else value
                for name, value in names.items()
            }
            linear.forward_metadata = each.metadata
            made = forward(backend, **{**given, "forward_batch": each.batch})
            result = _put(result, made, each.rows, num_tokens)
            _copy_states(linear, layer_id, each)
    finally:
        linear.forward_metadata = whole
    assert result is not None
    return result


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
    """What a pass sees of an argument."""
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


def _copy_states(backend: Any, layer_id: int, part: Pass) -> None:
    if part.kept:
        cache = backend.req_to_token_pool.mamba2_layer_cache(layer_id)
        for states in (*cache.conv, cache.temporal):
            states[part.destinations] = states[part.sources]
        mark_written(part.kept, 1)


def mark_written(checkpoints: Sequence[Checkpoint], num_layers: int) -> None:
    """Count the layers that have written `checkpoints`; a host without a model says so itself.

    Only what every recurrent layer has written is kept: a forward that took another way, a captured graph say, leaves
    no state behind instead of a wrong one.
    """
    for each in checkpoints:
        each.num_layers += num_layers
