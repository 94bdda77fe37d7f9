"""Recurrent layers: a state of fixed size in the place of keys and values, whatever the length of the prefix.

A layer costs the same FLOPs for every token: 2 for each parameter of its matrices and convolutions, and those of the
recurrence, so many for each number of its state. Kernels that compute a recurrence in chunks spend more FLOPs,
depending on the chunk, for fewer memory accesses; a device's FLOP rate is of the FLOPs counted here, not of theirs.

Beside its state a layer keeps the last K - 1 inputs of the short convolution before the recurrence, K its width.
Each function below builds the layers of one kind. D is the hidden width throughout.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from marconi.model.base import FlopCurve, Layer, Storage


class Shards(NamedTuple):
    """Numbers in equal parts (heads, groups, channels) that the workers of a tensor-parallel group split."""

    num_parts: int
    part_size: int
    """Numbers of each part."""
    what: str
    """A name for the parts, for the error where the workers cannot split them."""
    may_replicate: bool = False
    """Whether parts fewer than workers are replicated."""

    def numbers(self, storage: Storage) -> int:
        """Numbers that one worker holds; `ValueError` if the parts cannot be split."""
        split = storage.shard_or_replicate if self.may_replicate else storage.shard
        return split(self.num_parts, self.what) * self.part_size


def whole(num_numbers: int) -> Shards:
    """Numbers of which every worker holds a copy."""
    return Shards(1, num_numbers, "the whole", may_replicate=True)


@dataclass(frozen=True, slots=True)
class Recurrent(Layer):
    """A layer that keeps a recurrent state, a convolution window, or both."""

    # `field()` keeps the dataclass from taking the contract's property for a default.
    kind: str = field()
    num_parameters: int = field()
    flops: FlopCurve = field()
    state: tuple[Shards, ...] = ()
    """The recurrent state; empty for none."""
    scales: tuple[Shards, ...] = ()
    """Its columns, which have a scale each in a checkpoint in int8."""
    inputs: tuple[Shards, ...] = ()
    """The window of the convolution; empty for none."""

    def recurrent_bytes(self, storage: Storage) -> int:
        """One worker's share of the state."""
        return _numbers(self.state, storage) * storage.state_itemsize

    def int8_bytes(self, storage: Storage) -> int:
        """One worker's share of the state in int8; a scale is of the state's dtype, as in SGLang."""
        return _numbers(self.state, storage) + _numbers(self.scales, storage) * storage.state_itemsize

    def convolution_bytes(self, storage: Storage) -> int:
        """One worker's share of the convolution window."""
        return _numbers(self.inputs, storage) * storage.conv_itemsize


def _numbers(parts: Iterable[Shards], storage: Storage) -> int:
    return sum(each.numbers(storage) for each in parts)


def _per_token(num_parameters: int, recurrence: int = 0) -> FlopCurve:
    """A multiply-add for each parameter, and the FLOPs of the recurrence."""
    return FlopCurve(linear=2 * num_parameters + recurrence)


def mamba1(hidden_size: int, inner_size: int, state_size: int, step_rank: int, conv_kernel: int) -> Recurrent:
    """Mamba: a selective state space with a state of N numbers for each of its I inner channels.

        per token  2 D 2I + 2 I D (in, out) + 2 I (R + 2N) + 2 R I (step and B, C) + 2 K I (convolution) + 8 I N (scan)
        state      I N numbers, and a window of (K - 1) I

    R is the step's rank. The scan's 8 a number of the state: dt A and exp (2), dt B (1), decay, write with x, add (3),
    read with C (2). With I = 2 D the projections are 12 L D^2 and the scan 16 L D N, the two terms that the Marconi
    paper counts. The decay of every number of the state is a parameter, but no matrix. Channels are split over the
    workers. Source: arXiv 2312.00752, section 3; SGLang `Mamba2StateShape.create_full_rank`.
    """
    projections = 3 * hidden_size * inner_size
    selection = inner_size * (2 * step_rank + 2 * state_size)
    matrices = projections + selection + inner_size * conv_kernel
    num_states = inner_size * state_size
    return Recurrent(
        "mamba1",
        matrices + num_states,
        _per_token(matrices, 8 * num_states),
        state=(Shards(inner_size, state_size, "the inner width"),),
        scales=(Shards(inner_size, state_size, "the inner width"),),
        inputs=(Shards(inner_size, conv_kernel - 1, "the inner width"),),
    )


def mamba2(
    hidden_size: int, num_heads: int, head_dim: int, num_groups: int, state_size: int, conv_kernel: int
) -> Recurrent:
    """Mamba-2: H heads with a state of P x N numbers and one decay each; B and C are shared by the heads of a group.

        per token  2 D (2 H P + 2 G N + H) + 2 H P D (in, out) + 2 K (H P + 2 G N) (convolution) + 5 H P N (recurrence)
        state      H P N numbers, and a window of (K - 1) (H P + 2 G N)

    The recurrence's 5 a number of the state: decay (1), write (2), read (2). Heads are split over the workers, and
    groups fewer than workers are replicated. Source: arXiv 2405.21060, section 7; SGLang `Mamba2StateShape.create`.
    """
    inner_size = num_heads * head_dim
    channels = inner_size + 2 * num_groups * state_size
    into = hidden_size * (inner_size + channels + num_heads)
    num_parameters = into + hidden_size * inner_size + channels * conv_kernel
    heads, groups, past = "the number of Mamba heads", "the number of Mamba groups", conv_kernel - 1
    return Recurrent(
        "mamba2",
        num_parameters,
        _per_token(num_parameters, 5 * inner_size * state_size),
        state=(Shards(num_heads, head_dim * state_size, heads),),
        scales=(Shards(num_heads, state_size, heads),),
        inputs=(
            Shards(num_heads, head_dim * past, heads),
            Shards(num_groups, 2 * state_size * past, groups, may_replicate=True),
        ),
    )


def gated_delta_rule(
    hidden_size: int,
    num_key_heads: int,
    key_head_dim: int,
    num_value_heads: int,
    value_head_dim: int,
    conv_kernel: int,
) -> Recurrent:
    """Gated DeltaNet: a value head has a state of dk x dv numbers, a decay and a write strength.

        per token  2 D (2 Hk dk + 2 Hv dv + 2 Hv) + 2 Hv dv D (in, out) + 2 K (2 Hk dk + Hv dv) (convolution)
                   + 7 Hv dk dv (recurrence)
        state      Hv dk dv numbers, and a window of (K - 1) (2 Hk dk + Hv dv)

    The recurrence's 7 a number of the state: decay (1), recall what the key holds (2), correct it (2), read with the
    query (2). Projected in are queries, keys, values, output gate, decay and write strength. Heads are split over the
    workers, and key heads fewer than workers are replicated. Source: arXiv 2412.06464, section 3; SGLang
    `configs/qwen3_next.py`.
    """
    keys, values = num_key_heads * key_head_dim, num_value_heads * value_head_dim
    into = hidden_size * (2 * keys + 2 * values + 2 * num_value_heads)
    num_parameters = into + hidden_size * values + (2 * keys + values) * conv_kernel
    value_heads, past = "the number of value heads", conv_kernel - 1
    return Recurrent(
        "gated delta rule",
        num_parameters,
        _per_token(num_parameters, 7 * values * key_head_dim),
        state=(Shards(num_value_heads, key_head_dim * value_head_dim, value_heads),),
        scales=(Shards(num_value_heads, key_head_dim, value_heads),),
        inputs=(
            Shards(num_value_heads, value_head_dim * past, value_heads),
            Shards(num_key_heads, 2 * key_head_dim * past, "the number of key heads", may_replicate=True),
        ),
    )


def kimi_delta_attention(
    hidden_size: int, num_heads: int, head_dim: int, conv_kernel: int, *, has_full_rank_gate: bool = False
) -> Recurrent:
    """Kimi delta attention (KDA): the gated delta rule with a decay for every channel of a key.

        per token  2 D (3 H d + H) + 2 (D r + r H d) 2 (low-rank decay and output gate) + 2 H d D (out) + 2 K 3 H d
                   + 7 H d^2 (recurrence, as in `gated_delta_rule`)
        state      H d^2 numbers, and a window of (K - 1) 3 H d

    r is the rank of the decay's and gate's projections, the width d of a head; a gate of full rank takes 2 D H d in the
    place of its half (Kimi K3). Heads are split over the workers. Source: arXiv 2510.26692, section 3; SGLang
    `KimiLinearStateShape.create`, `configs/kimi_k3.py`.
    """
    channels = num_heads * head_dim
    low_rank = head_dim * (hidden_size + channels)
    gates = low_rank + (hidden_size * channels if has_full_rank_gate else low_rank)
    num_parameters = hidden_size * (4 * channels + num_heads) + gates + 3 * channels * conv_kernel
    return Recurrent(
        "kda",
        num_parameters,
        _per_token(num_parameters, 7 * channels * head_dim),
        state=(Shards(num_heads, head_dim**2, "the number of KDA heads"),),
        scales=(Shards(num_heads, head_dim, "the number of KDA heads"),),
        inputs=(Shards(num_heads, 3 * head_dim * (conv_kernel - 1), "the number of KDA heads"),),
    )


def lightning_attention(hidden_size: int, num_heads: int, head_dim: int, gate_channels: int = 0) -> Recurrent:
    """Linear attention with a fixed decay a head (lightning attention, simple gated linear attention).

        per token  2 D (3 H d + gate) + 2 H d D + 5 H d^2 (decay 1, write 2, read 2)
        state      H d^2 numbers; there is no convolution

    `gate_channels` is the width of a projected output gate, 0 for none. Heads are split over the workers.
    Source: arXiv 2401.04658; SGLang `configs/bailing_hybrid.py` and `configs/minicpm.py`.
    """
    num_parameters = hidden_size * (4 * num_heads * head_dim + gate_channels)
    return Recurrent(
        "lightning",
        num_parameters,
        _per_token(num_parameters, 5 * num_heads * head_dim**2),
        state=(Shards(num_heads, head_dim**2, "the number of linear attention heads"),),
        scales=(Shards(num_heads, head_dim, "the number of linear attention heads"),),
    )


def rwkv7(hidden_size: int, head_dim: int, total_low_rank: int) -> Recurrent:
    """The time mixing of one RWKV-7 block: the generalised delta rule, with token shift in the place of a convolution.

        per token  4 x 2 D^2 (receptance, key, value, output) + 2 x 2 D (rw + ra + rv + rg) (low-rank decay, learning
                   rate, value mix and gate) + 9 D d (recurrence)
        state      D d numbers, and the last input of the time mixing and of the channel mixing, 2 D

    `total_low_rank` is rw + ra + rv + rg. The recurrence's 9 a number of the state: decay (1), recall (2), remove (2),
    write (2), read (2). The channel mixing's matrices are an `Mlp` without gate. Heads are split over the workers;
    every worker needs the last inputs whole. Source: arXiv 2503.14456, section 3.
    """
    num_parameters = 4 * hidden_size**2 + 2 * hidden_size * total_low_rank
    return Recurrent(
        "rwkv7",
        num_parameters,
        _per_token(num_parameters, 9 * hidden_size * head_dim),
        state=(Shards(hidden_size // head_dim, head_dim**2, "the number of RWKV heads"),),
        scales=(Shards(hidden_size // head_dim, head_dim, "the number of RWKV heads"),),
        inputs=(whole(2 * hidden_size),),
    )


def short_convolution(hidden_size: int, conv_kernel: int) -> Recurrent:
    """A gated short convolution over the hidden width, as a layer of its own (LFM2).

        per token  2 D 3D + 2 D D (in, out) + 2 K D (convolution)
        state      a window of (K - 1) D; there is no recurrence

    Two gates and the input are projected in. Channels are split over the workers.
    Source: SGLang `configs/lfm2.py` and `models/lfm2.py`.
    """
    num_parameters = 4 * hidden_size**2 + hidden_size * conv_kernel
    return Recurrent(
        "short convolution",
        num_parameters,
        _per_token(num_parameters),
        inputs=(Shards(hidden_size, conv_kernel - 1, "the hidden width"),),
    )


def convolution_window(head_channels: tuple[tuple[int, int], ...], whole_channels: int, conv_kernel: int) -> Recurrent:
    """Convolutions along the streams of an attention layer (Inkling, ZAYA1): no matrices, a window of their own.

        per token  2 K a channel
        state      a window of K - 1 a channel; there is no recurrence

    `head_channels` holds (heads, channels of a head) of streams that are split by head, fewer heads than workers being
    replicated; `whole_channels` counts those that every worker keeps whole.
    """
    split = sum(num_heads * channels for num_heads, channels in head_channels)
    num_parameters = (split + whole_channels) * conv_kernel
    what, past = "the number of heads of a convolved stream", conv_kernel - 1
    streams = tuple(
        Shards(num_heads, channels * past, what, may_replicate=True) for num_heads, channels in head_channels
    )
    return Recurrent(
        "short convolution",
        num_parameters,
        _per_token(num_parameters),
        inputs=(*streams, whole(whole_channels * past)),
    )
