"""A model's costs, summed over its layers and ready to be asked for every request.

    FLOPs(L) = linear L + quadratic L^2 + sum over window sizes W of per_key S_W(L)      (see `base.FlopCurve`)

Coefficients are summed once, in whole numbers; answers are floats, exact to rounding. FLOPs are of the whole model,
bytes of one worker of a tensor-parallel group, which is what SGLang's pools and memory budgets count.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from marconi.model.base import FlopCurve, Layer, Storage
from marconi.model.serving import SERVED, WINDOWED, Serving


@dataclass(frozen=True, slots=True)
class KindCost:
    """The layers of one kind, summed."""

    kind: str
    num_layers: int
    flops: FlopCurve
    kv_bytes_per_token: int
    recurrent_bytes: int
    int8_bytes: int
    """The recurrent states in a checkpoint in int8."""
    convolution_bytes: int
    windows: tuple[tuple[int, int], ...]
    """(W, KV bytes a token) of sliding windows."""
    num_parameters: int
    num_active_parameters: int
    num_expert_parameters: int

    def bytes_of(self, num_tokens: int) -> int:
        """Bytes of a prefix with a checkpoint at its end."""
        fixed = self.recurrent_bytes + self.convolution_bytes
        windows = sum(min(num_tokens, window) * per_token for window, per_token in self.windows)
        return self.kv_bytes_per_token * num_tokens + fixed + windows


@dataclass(frozen=True, slots=True)
class ModelProfile:
    """The cost of computing and of keeping a model's prefixes. Made by `profile_of` or `marconi.model.load`."""

    name: str
    kinds: tuple[KindCost, ...]
    """Kinds of layers, in order of first appearance."""
    storage: Storage
    num_embedding_parameters: int
    """The table that tokens are looked up in; 0 where it is the head's matrix."""
    num_head_parameters: int
    flops: FlopCurve
    """Coefficients of the whole model."""
    kv_bytes_per_token: int
    """KV of full attention, for each token of a prefix."""
    state_bytes: int
    """One checkpoint's recurrent states and convolution windows, all layers."""
    checkpoint_bytes: int
    """`state_bytes` and the KV of full sliding windows: what one checkpoint may hold beyond the prefix's KV."""
    windows: tuple[tuple[int, int], ...]
    """(W, KV bytes a token, all layers) of sliding windows, the smallest first."""
    serving: Serving = SERVED

    def prefix_flops(self, num_tokens: int) -> float:
        """FLOPs of computing the first `num_tokens` tokens from nothing."""
        return float(self.flops.at(num_tokens))

    def flops_between(self, start: int, end: int) -> float:
        """FLOPs of computing tokens `start` to `end` on top of a state at `start` and the KV before it."""
        curve = self.flops
        flops = (curve.linear + curve.quadratic * (start + end)) * (end - start)
        if curve.windows:
            flops = curve.at(end) - curve.at(start)
        return float(flops)

    def prefix_flops_of(self, num_tokens: ArrayLike) -> NDArray[np.float64]:
        """`prefix_flops` of many lengths at once."""
        lengths = np.asarray(num_tokens, dtype=np.float64)
        flops = (self.flops.linear + self.flops.quadratic * lengths) * lengths
        for window, per_key in self.flops.windows:
            inside = np.minimum(lengths, window)
            flops += per_key * (inside * (inside + 1) / 2 + (lengths - inside) * window)
        return flops

    def window_bytes(self, num_tokens: int) -> int:
        """KV of sliding windows that a checkpoint at `num_tokens` tokens needs, in bytes."""
        return sum(min(num_tokens, window) * per_token for window, per_token in self.windows)

    @property
    def int8_state_bytes(self) -> int:
        """`state_bytes` in a checkpoint in int8: numbers of one byte, their scales, and the windows as they are."""
        return sum(kind.int8_bytes + kind.convolution_bytes for kind in self.kinds)

    @property
    def is_hybrid(self) -> bool:
        """True if a hit needs a checkpoint."""
        return self.checkpoint_bytes > 0

    @property
    def num_parameters(self) -> int:
        """All weights, embedding and head included."""
        return self._num_vocabulary_parameters + sum(kind.num_parameters for kind in self.kinds)

    @property
    def weight_bytes(self) -> int:
        """Of all weights, over all workers."""
        return self.num_parameters * self.storage.weight_itemsize

    @property
    def num_active_parameters(self) -> int:
        """Weights that one token uses, embedding and head included."""
        return self._num_vocabulary_parameters + sum(kind.num_active_parameters for kind in self.kinds)

    @property
    def num_expert_parameters(self) -> int:
        """Weights of routed experts, of which a token uses some."""
        return sum(kind.num_expert_parameters for kind in self.kinds)

    @property
    def _num_vocabulary_parameters(self) -> int:
        return self.num_embedding_parameters + self.num_head_parameters

    @property
    def tensor_parallel(self) -> int:
        """Workers that share every layer."""
        return self.storage.tensor_parallel


def profile_of(
    name: str,
    layers: Sequence[Layer],
    storage: Storage,
    *,
    num_embedding_parameters: int = 0,
    num_head_parameters: int = 0,
    serving: Serving = SERVED,
) -> ModelProfile:
    """Sum the costs of `layers`; `ValueError` if they cannot be split over the workers that `storage` names."""
    by_kind: dict[str, list[Layer]] = {}
    for layer in layers:
        by_kind.setdefault(layer.kind, []).append(layer)
    kinds = tuple(_sum_kind(kind, members, storage) for kind, members in by_kind.items())
    windows = _merge(window for kind in kinds for window in kind.windows)
    state_bytes = sum(kind.recurrent_bytes + kind.convolution_bytes for kind in kinds)
    return ModelProfile(
        name=name,
        kinds=kinds,
        storage=storage,
        num_embedding_parameters=num_embedding_parameters,
        num_head_parameters=num_head_parameters,
        flops=sum((kind.flops for kind in kinds), FlopCurve()),
        kv_bytes_per_token=sum(kind.kv_bytes_per_token for kind in kinds),
        state_bytes=state_bytes,
        checkpoint_bytes=state_bytes + sum(window * per_token for window, per_token in windows),
        windows=windows,
        serving=WINDOWED if state_bytes and windows else serving,
    )


def _sum_kind(kind: str, layers: Sequence[Layer], storage: Storage) -> KindCost:
    return KindCost(
        kind=kind,
        num_layers=len(layers),
        flops=sum((layer.flops for layer in layers), FlopCurve()),
        kv_bytes_per_token=sum(layer.kv_bytes_per_token(storage) for layer in layers),
        recurrent_bytes=sum(layer.recurrent_bytes(storage) for layer in layers),
        int8_bytes=sum(layer.int8_bytes(storage) for layer in layers),
        convolution_bytes=sum(layer.convolution_bytes(storage) for layer in layers),
        windows=_merge(layer.window(storage) for layer in layers),
        num_parameters=sum(layer.num_parameters for layer in layers),
        num_active_parameters=sum(layer.num_active_parameters for layer in layers),
        num_expert_parameters=sum(layer.num_expert_parameters for layer in layers),
    )


def _merge(windows: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    merged: dict[int, int] = {}
    for window, per_token in windows:
        if window:
            merged[window] = merged.get(window, 0) + per_token
    return tuple(sorted(merged.items()))
