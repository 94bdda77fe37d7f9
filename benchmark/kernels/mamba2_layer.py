"""SGLang's prefill of Mamba2."""

import importlib
from collections.abc import Mapping

import torch
from torch import Tensor

from .batch import Batch
from .convolution import Convolution, Pools, calls_of
from .operands import Mamba2Operands
from .shapes import LayerShape

MODULE = "sglang.kernels.ops.mamba.triton_ops.ssd_combined"


class Mamba2Layer(Convolution):
    """A layer as `MambaMixer2` and `Mamba2AttnBackend` run it."""

    def __init__(self, shape: LayerShape, batch: Batch, pools: Pools, dtype: torch.dtype) -> None:
        super().__init__(shape, batch, pools, dtype, has_bias=True)
        self._module = importlib.import_module(MODULE)
        heads, device = shape.num_heads, self.device
        self._dt = self.normal(1, batch.num_tokens, heads)
        self._a = -torch.rand(heads, dtype=torch.float32, device=device) / 40
        self._d, self._dt_bias = self.normal(heads), self.normal(heads)
        self._out = torch.empty(1, batch.num_tokens, heads, shape.num_rows, dtype=dtype, device=device)
        lengths = self.numbers(batch.lengths)
        owners = torch.arange(len(batch.lengths), dtype=torch.int32, device=device)
        self._owner = torch.repeat_interleave(owners, lengths, output_size=batch.num_tokens)[None]
        size, ends = shape.chunk_size, self.ends
        on_grid = [sequence for sequence, end in enumerate(ends) if end % size == 0]
        off_grid = [sequence for sequence, end in enumerate(ends) if end % size]
        self._rows = self.numbers(ends[sequence] // size for sequence in on_grid)
        self._row_slots = self.aligned_slots[self.numbers(on_grid)]
        self._anew = self.numbers(off_grid)
        self._anew_ends = self.numbers(ends[sequence] for sequence in off_grid)
        self._anew_slots = self.aligned_slots[self._anew]
        self._left: Mapping[str, Tensor] = {}

    def prefill(self) -> object:
        """Run the convolution and the chunk kernels."""
        shape = self.shape
        heads, rows, columns = shape.state_shape
        inflow = shape.num_shared_heads * columns
        x, B, C = self.convolved().split([heads * rows, inflow, inflow], -1)
        tokens = self.batch.num_tokens
        _, final, _ = self._module.mamba_chunk_scan_combined(
            x.view(1, tokens, heads, rows),
            self._dt,
            self._a,
            B.view(1, tokens, shape.num_shared_heads, columns),
            C.view(1, tokens, shape.num_shared_heads, columns),
            chunk_size=shape.chunk_size,
            D=self._d,
            z=None,
            dt_bias=self._dt_bias,
            seq_idx=self._owner,
            chunk_indices=None,
            chunk_offsets=None,
            cu_seqlens=self.bounds,
            initial_states=None,
            return_varlen_states=True,
            return_final_states=False,
            return_track_states=True,
            track_seq_idx=None,
            track_end_locs=None,
            dt_softplus=True,
            dt_limit=(0.0, float("inf")),
            out=self._out,
            state_dtype=self.pools.states.dtype,
        )
        self.pools.states[self.slots] = final
        return final

    def operands(self) -> Mamba2Operands:
        """Run a prefill and take what it leaves."""
        with calls_of(self._module, "chunk_state_varlen") as calls:
            self.prefill()
        self._left = left = calls[-1].arguments
        return Mamba2Operands(left["x"], left["dt"], left["dA_cumsum"], left["B"], left["chunk_states"])

    def track(self) -> None:
        """Copy one chunk-aligned position of each sequence."""
        self.track_windows()
        left, states = self._left, self.pools.states
        if len(self._rows):
            states[self._row_slots] = left["chunk_states"][self._rows].to(states.dtype, copy=False)
        if len(self._anew):
            given = (left[name][None] for name in ("B", "x", "dt", "dA_cumsum", "chunk_states"))
            tracked = self._module._track_states_at(*given, self.bounds, None, self._anew, self._anew_ends)
            states[self._anew_slots] = tracked.squeeze(0).to(states.dtype, copy=False)
