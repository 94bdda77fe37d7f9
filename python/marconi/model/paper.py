"""The Marconi paper's layers, counted as its Table 1 counts them.

Source: *Marconi: Prefix Caching for the Era of Hybrid LLMs*, arXiv 2411.19379, appendix A, Table 1. L tokens, hidden
width D, state width N, two bytes a number:

    layer      FLOPs                       bytes  FLOPs a byte
    attention  8 L D^2 + 4 L^2 D           4 L D  L + 2 D
    MLP        16 L D^2                    0      -
    SSM        12 L D^2 + 16 L D N + 10 L  2 D N  L (6 D / N + 8 + 5 / (D N))

Three things differ from `Attention` and `recurrent.mamba1` (the MLP is an `Mlp` of width 4 D without gate), and are
kept as they are so that the paper's figures can be compared: scores are counted over the whole square, not the causal
half; the SSM's FLOPs are those of an inner width of 2 D, its state is one of width D; and the convolution window, which
Table 1 omits and the experiments include (6.1 % of a state of the 7B model), holds K = 4 inputs of 2 D + 2 N channels,
one more than a kernel needs.
"""

from dataclasses import dataclass
from typing import ClassVar, Final

from marconi.model.base import FlopCurve, Layer, Storage
from marconi.model.feed_forward import UNGATED, Mlp
from marconi.model.recurrent import Recurrent, Shards, whole

TABLE_1: Final = (
    ("attention", "8 L D^2 + 4 L^2 D", "4 L D", "L + 2 D"),
    ("mlp", "16 L D^2", "0", "-"),
    ("ssm", "12 L D^2 + 16 L D N + 10 L", "2 D N", "L (6 D / N + 8 + 5 / (D N))"),
)
"""The paper's table in symbols: kind, FLOPs, bytes, FLOPs a byte."""

STORAGE: Final = Storage(kv_dtype="float16", state_dtype="float16", conv_dtype="float16", weight_dtype="float16")
"""Half precision throughout (section 5.1)."""


@dataclass(frozen=True, slots=True)
class PaperAttention(Layer):
    """Multi-head attention of width D."""

    kind: ClassVar[str] = "attention"

    hidden_size: int

    @property
    def num_parameters(self) -> int:
        """Four square projections."""
        return 4 * self.hidden_size**2

    @property
    def flops(self) -> FlopCurve:
        """8 L D^2 + 4 L^2 D."""
        return FlopCurve(linear=8 * self.hidden_size**2, quadratic=4 * self.hidden_size)

    def kv_bytes_per_token(self, storage: Storage) -> int:
        """4 D at two bytes a number."""
        return storage.shard(2 * self.hidden_size, "the KV width") * storage.kv_itemsize


def ssm(hidden_size: int, state_size: int, conv_kernel: int = 4) -> Recurrent:
    """A state-space layer: 12 L D^2 + 16 L D N + 10 L FLOPs, a state of D N and a window of K (2 D + 2 N) numbers.

    Its parameters are the projections into and out of an inner width of 2 D.
    """
    return Recurrent(
        "ssm",
        6 * hidden_size**2,
        FlopCurve(linear=12 * hidden_size**2 + 16 * hidden_size * state_size + 10),
        state=(Shards(hidden_size, state_size, "the hidden width"),),
        inputs=(Shards(2 * hidden_size, conv_kernel, "the inner width"), whole(2 * state_size * conv_kernel)),
    )


def hybrid(
    num_attention: int = 4, num_ssm: int = 24, num_mlp: int = 28, *, hidden_size: int = 4096, state_size: int = 128
) -> tuple[Layer, ...]:
    """The layers of a hybrid of the paper; by default its 7B model (section 5.1)."""
    return (
        *[PaperAttention(hidden_size)] * num_attention,
        *[ssm(hidden_size, state_size)] * num_ssm,
        *[Mlp(hidden_size, 4 * hidden_size, UNGATED)] * num_mlp,
    )
