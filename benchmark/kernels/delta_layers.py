"""SGLang's prefill of the gated delta rule and of KDA."""

import importlib

import torch
from torch import Tensor

from .batch import Batch
from .convolution import Convolution, Pools, calls_of
from .operands import DeltaOperands
from .shapes import LayerShape

GATED_DELTA_RULE = "sglang.kernels.ops.attention.fla.chunk"
KDA = "sglang.kernels.ops.attention.fla.kda"


class GatedDeltaLayer(Convolution):
    """A layer as `GDNAttnBackend` and `TritonGDNKernel` run it; queries, keys and values are split already."""

    def __init__(self, shape: LayerShape, batch: Batch, pools: Pools, dtype: torch.dtype) -> None:
        super().__init__(shape, batch, pools, dtype, has_bias=False)
        self._module = importlib.import_module(GATED_DELTA_RULE)
        self._split = [each.contiguous() for each in self.split(self.convolved())]
        gates = (1, batch.num_tokens, shape.num_heads)
        self._g = -torch.rand(gates, dtype=torch.float32, device=self.device) / 40
        self._beta = torch.rand(gates, dtype=torch.float32, device=self.device)
        self._rows = self.numbers(self.chunk_rows())
        self._chunk_states: Tensor | None = None

    def prefill(self) -> object:
        """Run the convolution and the chunk kernels."""
        self.convolved()
        q, k, v = self._split
        return self._module.chunk_gated_delta_rule(
            q=q,
            k=k,
            v=v,
            g=self._g,
            beta=self._beta,
            initial_state=self.pools.states,
            initial_state_indices=self.slots,
            cu_seqlens=self.bounds,
            head_first=False,
            use_qk_l2norm_in_kernel=True,
        )

    def operands(self) -> DeltaOperands:
        """Run a prefill and take what it leaves."""
        with calls_of(self._module, "chunk_gated_delta_rule_fwd_h") as calls:
            self.prefill()
        states, corrected = calls[-1].result
        given = calls[-1].arguments
        self._chunk_states = states[0]
        return DeltaOperands(given["k"][0], corrected[0], given["g"][0], states[0])

    def track(self) -> None:
        """Copy one chunk-aligned position of each sequence."""
        assert self._chunk_states is not None
        self.track_windows()
        states = self.pools.states
        states[self.aligned_slots] = self._chunk_states[self._rows].to(states.dtype, copy=False)


class KdaLayer(Convolution):
    """A layer as `KDAAttnBackend` and `TritonKDAKernel` run it."""

    def __init__(self, shape: LayerShape, batch: Batch, pools: Pools, dtype: torch.dtype) -> None:
        super().__init__(shape, batch, pools, dtype, has_bias=False)
        self._module = importlib.import_module(KDA)
        heads, _, columns = shape.state_shape
        self._gate = self.normal(1, batch.num_tokens, heads, columns)
        self._beta = self.normal(1, batch.num_tokens, heads)
        self._a_log = torch.full((1, 1, heads, 1), -3.0, device=self.device)
        self._dt_bias = torch.zeros(heads * columns, device=self.device)
        self._tracked = torch.empty(len(batch.lengths), *shape.state_shape, device=self.device)
        self._tracked_rows = self.numbers(range(len(batch.lengths)))
        size = shape.chunk_size
        self._chunk_of_sequence = self.numbers((aligned // size for aligned in batch.aligned), torch.int32)

    def prefill(self) -> object:
        """Run the convolution and the chunk kernels."""
        q, k, v = self.split(self.convolved())
        return self._module.chunk_kda(
            q=q,
            k=k,
            v=v,
            g=self._gate,
            beta=self._beta,
            initial_state=self.pools.states,
            initial_state_indices=self.slots,
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=self.bounds,
            A_log=self._a_log,
            dt_bias=self._dt_bias,
            lower_bound=None,
            beta_is_raw=True,
        )

    def operands(self) -> DeltaOperands:
        """Run a prefill and take what it leaves, with the keys before they are scaled for the chunk kernel."""
        chunk, intra = "chunk_gated_delta_rule_fwd_h", "chunk_kda_fwd_intra"
        with calls_of(self._module, chunk) as calls, calls_of(self._module, intra) as intra_calls:
            self.prefill()
        given, (states, corrected) = calls[-1].arguments, calls[-1].result
        function = getattr(self._module, chunk)
        tracking = {"track_state": self._tracked, "track_chunk_idx": self._chunk_of_sequence}
        self.in_kernel = {
            "tracking": lambda: function(**{**given, **tracking}),
            "not_tracking": lambda: function(**given),
        }
        return DeltaOperands(intra_calls[-1].arguments["k"][0], corrected[0], given["gk"][0], states[0], log_base=2.0)

    def track(self) -> None:
        """Copy one chunk-aligned position of each sequence, which the chunk kernel wrote."""
        self.track_windows()
        states = self.pools.states
        states[self.aligned_slots] = self._tracked[self._tracked_rows].to(states.dtype, copy=False)
