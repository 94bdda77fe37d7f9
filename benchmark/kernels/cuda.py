"""Result rows on a CUDA device: every layer shape at every length, one sequence and a batch of them.

What SGLang cannot do on this machine is said in the row and left out: where it gives no operands, ours are measured on
random ones of the same shapes and dtypes. A device's row of too many tokens for its memory says so.
"""

import gc
from collections.abc import Callable, Iterator, Sequence

import torch

from sgl_kernel_ext import short_conv
from sgl_kernel_ext.state_pool import StateSlots

from . import traffic, upstream
from .batch import Batch, batch_of, state_spans, window_spans
from .operands import stand_in
from .report import Row
from .shapes import LayerShape
from .timing import Clock, Sample, in_turns
from .upstream import Layer, Pools

TOKENS = (1 << 10, 1 << 12, 1 << 14, 1 << 16, 1 << 17)
NUM_SEQUENCES = (1, 16)
MOST_TOKENS = 1 << 17
"""Tokens of the largest batch."""
DTYPE, STATE_DTYPE, WINDOW_DTYPE = torch.bfloat16, torch.float32, torch.bfloat16
"""SGLang's defaults for activations, states and windows of these models."""

LayerOf = Callable[[LayerShape, Batch, Pools, torch.dtype], Layer]


def cases(tokens: Sequence[int]) -> Iterator[tuple[int, int]]:
    """List (tokens of a sequence, sequences) of each row."""
    for num_sequences in NUM_SEQUENCES:
        for each in tokens:
            if num_sequences == 1 or each * num_sequences <= MOST_TOKENS:
                yield each, num_sequences


def measure(
    shape: LayerShape,
    case: tuple[int, int],
    num_checkpoints: int,
    clock: Clock,
    repetitions: int,
    device: torch.device,
    layer_of: LayerOf | str,
) -> Row:
    """Measure a row; `layer_of` makes SGLang's layer, or says why there is none."""
    tokens, num_sequences = case
    batch = batch_of(tokens, num_sequences, num_checkpoints, shape.chunk_size)
    row = Row(shape.model, shape.family, tokens, num_sequences, len(batch.positions))
    try:
        return _measure(row, shape, batch, clock, repetitions, device, layer_of)
    except torch.OutOfMemoryError:
        return row.without("any figure", "the device's memory is too small")
    finally:
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _measure(
    row: Row,
    shape: LayerShape,
    batch: Batch,
    clock: Clock,
    repetitions: int,
    device: torch.device,
    layer_of: LayerOf | str,
) -> Row:
    pools = Pools(
        torch.zeros(batch.num_slots, *shape.state_shape, dtype=STATE_DTYPE, device=device),
        torch.zeros(batch.num_slots, shape.num_channels, shape.conv_width - 1, dtype=WINDOW_DTYPE, device=device),
    )
    layer = None
    if isinstance(layer_of, str):
        row = row.without("prefill and aligned", layer_of)
    else:
        try:
            layer = layer_of(shape, batch, pools, DTYPE)
            operands, inputs = layer.operands(), layer.inputs
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # Upstream's, of any kind: ours is measured all the same.
            layer, row = None, row.without("prefill and aligned", upstream.first_line(error))
    if layer is None:
        operands = stand_in(shape, batch, DTYPE, device)
        inputs = torch.randn(batch.num_tokens, shape.num_channels, dtype=DTYPE, device=device)

    states, windows = state_spans(shape, batch, device), window_spans(batch, device)
    starts_anew = torch.zeros(len(batch.lengths), dtype=torch.bool, device=device)
    own = StateSlots(pools.windows, torch.arange(len(batch.lengths), device=device), starts_anew)

    def checkpoint() -> None:
        short_conv.checkpoint(inputs, states=own, spans=windows, pool=pools.windows)
        operands.checkpoint(states, pools.states)

    runs: dict[str, Callable[[], object]] = {"checkpoint": checkpoint}
    if layer is not None:
        runs["prefill"] = layer.prefill
        tracking = {"aligned": layer.track, **layer.in_kernel}
        try:
            for run in tracking.values():
                run()
            runs |= tracking
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            row = row.without("aligned", upstream.first_line(error))
    samples = in_turns(clock, runs, repetitions)
    moved = traffic.of_states(operands, states, pools.states)
    moved += traffic.of_windows(len(batch.positions), inputs, pools.windows)
    return row.measured(samples["checkpoint"], samples.get("prefill"), _aligned(samples), moved)


def _aligned(samples: dict[str, Sample]) -> Sample | None:
    """Time of SGLang's tracking: its copies, and what the chunk kernel takes more for it."""
    copies = samples.get("aligned")
    if copies is None or "tracking" not in samples:
        return copies
    return copies.plus_difference(samples["tracking"], samples["not_tracking"])
