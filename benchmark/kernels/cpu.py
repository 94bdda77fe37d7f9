"""Result rows on a CPU: the references of all operators, on the layers' shapes with few heads, in float32."""

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional

from sgl_kernel_ext import gated_delta_rule, kda, mamba2, short_conv

from .batch import SEED, Batch, batch_of, state_spans, window_spans
from .operands import DeltaOperands, Mamba2Operands, Operands
from .report import ReferenceRow
from .shapes import Family, LayerShape
from .timing import Clock, in_turns

TOKENS = (1 << 10, 1 << 12)
MOST_HEADS = 4

Prefill = Callable[[], object]


def measure(
    layer: LayerShape, tokens: int, num_checkpoints: int, clock: Clock, repetitions: int
) -> Iterator[ReferenceRow]:
    """Measure the layer's recurrence and its convolution, a row each."""
    torch.manual_seed(SEED)
    shape = layer.narrowed(MOST_HEADS)
    batch = batch_of(tokens, 1, num_checkpoints, shape.chunk_size)
    bounds = torch.tensor(batch.bounds)
    prefill, operands = _recurrence(shape, batch, bounds)
    spans = state_spans(shape, batch, "cpu")
    states = torch.zeros(batch.num_slots, *shape.state_shape)

    inputs, weight = torch.randn(tokens, shape.num_channels), torch.randn(shape.num_channels, shape.conv_width)
    windows = torch.zeros(batch.num_slots, shape.num_channels, shape.conv_width - 1)
    window_ends = window_spans(batch, "cpu")

    operators: dict[str, dict[str, Callable[[], object]]] = {
        shape.family.value: {"prefill": prefill, "checkpoint": lambda: operands.checkpoint(spans, states)},
        "short_conv": {
            "prefill": lambda: short_conv.prefill(inputs, weight, None, cu_seqlens=bounds),
            "checkpoint": lambda: short_conv.checkpoint(inputs, states=None, spans=window_ends, pool=windows),
        },
    }
    for operator, runs in operators.items():
        samples = in_turns(clock, runs, repetitions)
        yield ReferenceRow(
            operator, shape.model, shape.num_heads, tokens, num_checkpoints, samples["prefill"], samples["checkpoint"]
        )


def _recurrence(shape: LayerShape, batch: Batch, bounds: Tensor) -> tuple[Prefill, Operands]:
    """Make a prefill of the layer, and take what one leaves."""
    tokens, heads, shared = batch.num_tokens, shape.num_heads, shape.num_shared_heads
    values = torch.randn(tokens, heads, shape.num_rows)
    keys, queries = (functional.normalize(torch.randn(tokens, shared, shape.num_columns), dim=-1) for _ in range(2))
    gate = torch.rand(tokens, heads)

    if shape.family is Family.MAMBA2:

        def scan() -> mamba2.Prefill:
            return mamba2.prefill(
                values, gate, -torch.rand(heads), keys, queries, cu_seqlens=bounds, chunk_size=shape.chunk_size
            )

        left = scan()
        return scan, Mamba2Operands(values, left.delta, left.decay_sums, keys, left.grid_states)

    is_kda = shape.family is Family.KDA
    operator = kda if is_kda else gated_delta_rule
    decays = -torch.rand(tokens, heads, *((shape.num_columns,) if is_kda else ())) / 40

    def prefill() -> gated_delta_rule.Prefill:
        return operator.prefill(queries, keys, values, decays, gate, cu_seqlens=bounds, chunk_size=shape.chunk_size)

    made = prefill()
    log_base = math.e if is_kda else None
    return prefill, DeltaOperands(keys, made.corrected_values, made.decay_sums, made.chunk_states, log_base)
