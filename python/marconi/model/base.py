"""The contract of a layer: what a prefix costs to compute, and what it leaves behind.

A *prefix* is the first L tokens of a sequence. A layer says

- the FLOPs of computing it, exactly, as a `FlopCurve`. A multiplication and an addition count one each, so a
  multiply-add is 2. Elementwise work outside the recurrence (norms, activations, rotary embeddings, softmax) is left
  out, as are the embedding and the head, which prefill computes for one position;
- the bytes that stay in memory, on *one* worker of a tensor-parallel group: KV of every token (full attention), KV
  of the last W tokens (sliding window), or one state of fixed size (a recurrence and the window of the short
  convolution before it). FLOPs are of the whole model, over all workers;
- its parameters: all, and those of routed experts, of which a token uses some.

A causal layer lets token t see t keys, so its scores cost `per_key * L (L + 1) / 2`: half of the square that the
Marconi paper counts (`marconi.model.paper` keeps the paper's count).
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

DTYPE_BYTES: Final = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
}
"""Bytes of one number, by the name that configurations and SGLang's flags use."""


def dtype_bytes(name: str) -> int:
    """Bytes of one number of the type `name`; `ValueError` if it is unknown."""
    try:
        return DTYPE_BYTES[name.removeprefix("torch.")]
    except KeyError:
        raise ValueError(f"a dtype must be one of {', '.join(DTYPE_BYTES)}, got {name!r}") from None


class Precision(NamedTuple):
    """Dtypes that take the place of a model's own; `None` leaves them."""

    kv_dtype: str | None = None
    state_dtype: str | None = None
    conv_dtype: str | None = None
    weight_dtype: str | None = None


@dataclass(frozen=True, slots=True)
class Storage:
    """How a model's memory is stored and spread.

    SGLang 0.5.23 keeps convolution windows in bfloat16 (`SGLANG_MAMBA_CONV_DTYPE`) and recurrent states in float32
    unless the model's `mamba_ssm_dtype` or `SGLANG_MAMBA_SSM_DTYPE` says otherwise (`configs/mamba_utils.py`).
    `ValueError` for an unknown dtype or a degree below 1.
    """

    kv_dtype: str = "bfloat16"
    state_dtype: str = "float32"
    conv_dtype: str = "bfloat16"
    weight_dtype: str = "bfloat16"
    tensor_parallel: int = 1
    """Workers that share every layer."""

    def __post_init__(self) -> None:
        for name in (self.kv_dtype, self.state_dtype, self.conv_dtype, self.weight_dtype):
            dtype_bytes(name)
        if self.tensor_parallel < 1:
            raise ValueError(f"tensor_parallel must be at least 1, got {self.tensor_parallel}")

    def over(self, precision: Precision | None, tensor_parallel: int) -> "Storage":
        """Return this storage in the dtypes of `precision`, over `tensor_parallel` workers."""
        given = {key: dtype for key, dtype in (precision or Precision())._asdict().items() if dtype is not None}
        return replace(self, tensor_parallel=tensor_parallel, **given)

    @property
    def kv_itemsize(self) -> int:
        """Bytes of one number of a key or value."""
        return dtype_bytes(self.kv_dtype)

    @property
    def state_itemsize(self) -> int:
        """Bytes of one number of a recurrent state."""
        return dtype_bytes(self.state_dtype)

    @property
    def conv_itemsize(self) -> int:
        """Bytes of one number of a convolution window."""
        return dtype_bytes(self.conv_dtype)

    @property
    def weight_itemsize(self) -> int:
        """Bytes of one parameter."""
        return dtype_bytes(self.weight_dtype)

    def shard(self, count: int, what: str) -> int:
        """`count` things split evenly over the workers; `ValueError`, naming `what`, if that leaves a rest."""
        if count % self.tensor_parallel:
            raise ValueError(f"tensor_parallel must divide {what} ({count}), got {self.tensor_parallel}")
        return count // self.tensor_parallel

    def shard_or_replicate(self, count: int, what: str) -> int:
        """Shard like `shard`, with one copy a worker where there are fewer things than workers."""
        if count < self.tensor_parallel:
            if self.tensor_parallel % count:
                raise ValueError(
                    f"tensor_parallel must divide {what} ({count}) or be a multiple of it, got {self.tensor_parallel}"
                )
            return 1
        return self.shard(count, what)


@dataclass(frozen=True, slots=True)
class FlopCurve:
    """FLOPs of a prefix of L tokens: `linear L + quadratic L^2 + sum of per_key S_W(L)`.

    S_W(L) = sum over t of min(t, W) is the number of (query, key) pairs of a causal window of W tokens:
    L (L + 1) / 2 up to L = W, and W (W + 1) / 2 + (L - W) W beyond.
    """

    linear: int = 0
    quadratic: int = 0
    windows: tuple[tuple[int, int], ...] = ()
    """(W, FLOPs per pair), one entry a window size."""

    def at(self, num_tokens: int) -> int:
        """FLOPs of the first `num_tokens` tokens."""
        flops = (self.linear + self.quadratic * num_tokens) * num_tokens
        return flops + sum(per_key * window_pairs(window, num_tokens) for window, per_key in self.windows)

    def __add__(self, other: "FlopCurve") -> "FlopCurve":
        windows = dict(self.windows)
        for window, per_key in other.windows:
            windows[window] = windows.get(window, 0) + per_key
        return FlopCurve(self.linear + other.linear, self.quadratic + other.quadratic, tuple(sorted(windows.items())))


def window_pairs(window: int, num_tokens: int) -> int:
    """(Query, key) pairs among `num_tokens` tokens of which each sees itself and the `window - 1` before it."""
    inside = min(num_tokens, window)
    return inside * (inside + 1) // 2 + (num_tokens - inside) * window


def causal(per_token: int, per_key: int) -> FlopCurve:
    """The curve of `per_token` FLOPs a token and `per_key`, an even number, for each key that a token sees."""
    return FlopCurve(linear=per_token + per_key // 2, quadratic=per_key // 2)


class Layer(ABC):
    """One layer, described by its dimensions. What a kind does not have, it inherits as 0."""

    __slots__ = ()

    @property
    @abstractmethod
    def kind(self) -> str:
        """The row under which costs of such layers are summed."""

    @property
    @abstractmethod
    def flops(self) -> FlopCurve:
        """FLOPs of a prefix, whole model."""

    @property
    @abstractmethod
    def num_parameters(self) -> int:
        """Weights of the layer's matrices and convolutions; biases and norms are left out."""

    @property
    def num_expert_parameters(self) -> int:
        """Those of them in routed experts."""
        return 0

    @property
    def num_active_parameters(self) -> int:
        """Those that one token uses."""
        return self.num_parameters

    def kv_bytes_per_token(self, storage: Storage) -> int:
        """KV bytes of each token of the prefix, one worker."""
        return 0

    def window(self, storage: Storage) -> tuple[int, int]:
        """(W, KV bytes a token, one worker) of a sliding window: a checkpoint keeps those of its last W tokens."""
        return (0, 0)

    def recurrent_bytes(self, storage: Storage) -> int:
        """Bytes of the recurrent state, one worker, whatever the prefix."""
        return 0

    def int8_bytes(self, storage: Storage) -> int:
        """Bytes of the recurrent state in a checkpoint in int8, its scales included."""
        return 0

    def convolution_bytes(self, storage: Storage) -> int:
        """Bytes of its convolution window."""
        return 0
