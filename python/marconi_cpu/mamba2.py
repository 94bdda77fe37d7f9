"""SGLang's Mamba2 scan on `sgl_kernel_ext.mamba2`.

Upstream: `sglang/kernels/ops/mamba/triton_ops/{ssd_combined,mamba_ssm}.py`. Its chunk states lie on one grid over the
flat batch: row c is the state before token c * chunk_size, of the sequence that owns that token.
"""

import torch
from torch import Tensor
from torch.nn import functional

from marconi.engine.faults import fails_open
from marconi.engine.prefill.operands import keep_mamba2
from marconi_cpu.arguments import require_absent, unsupported
from marconi_cpu.draft_tree import states_along
from sgl_kernel_ext import mamba2
from sgl_kernel_ext.state_pool import StateSlots

PAD_SLOT = -1


def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    chunk_offsets: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    out: Tensor | None = None,
    return_final_states: bool = False,
    return_varlen_states: bool = False,
    return_intermediate_states: bool = False,
    state_dtype: torch.dtype | None = None,
    return_track_states: bool = False,
    track_seq_idx: Tensor | None = None,
    track_end_locs: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Prefill; inputs (1, num_tokens, ...), writes out (1, num_tokens, num_heads, head_dim).

    Returns the states of the grid (1, num_chunks, ...), the final states (num_sequences, ...) and those before the
    tokens track_end_locs[i] of the batch in the sequences track_seq_idx[i] (1, num_tracked, ...), or None. Not read:
    `seq_idx`, `chunk_indices` and `chunk_offsets` repeat what `cu_seqlens` says.
    """
    launcher = "mamba_chunk_scan_combined"
    require_absent(
        launcher,
        z=z,
        return_final_states=return_final_states,
        return_intermediate_states=return_intermediate_states,
    )
    if cu_seqlens is None or out is None or not (return_varlen_states and return_track_states):
        raise unsupported(launcher, "a call without cu_seqlens, out, return_varlen_states and return_track_states")
    if x.shape[0] != 1:
        raise ValueError(f"x must be (1, num_tokens, num_heads, head_dim), got {tuple(x.shape)}")
    delta = _step_size(dt[0], dt_bias, dt_softplus, dt_limit)
    num_sequences = cu_seqlens.shape[0] - 1
    states = None if initial_states is None else StateSlots(initial_states.clone(), torch.arange(num_sequences))
    result = mamba2.prefill(
        x[0], delta, A, B[0], C[0], cu_seqlens=cu_seqlens, chunk_size=chunk_size, D=D, states=states
    )
    out[0] = result.outputs
    fails_open(keep_mamba2)(x[0], result.delta, result.decay_sums, B[0], result.grid_states, initial_states)
    dtype = C.dtype if state_dtype is None else state_dtype
    tracked = None
    if track_seq_idx is not None and track_end_locs is not None and track_end_locs.numel() > 0:
        tracked = _states_before(
            x[0], delta, A, B[0], C[0], chunk_size, cu_seqlens, initial_states, track_seq_idx, track_end_locs
        ).to(dtype)[None]
    return result.grid_states.to(dtype)[None], result.final_states.to(dtype), tracked


def selective_state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: Tensor | None = None,
    pad_slot_id: int = PAD_SLOT,
    out: Tensor | None = None,
    disable_state_update: bool = False,
    intermediate_states_buffer: Tensor | None = None,
    cache_steps: int | None = None,
    retrieve_parent_token: Tensor | None = None,
    intermediate_state_indices: Tensor | None = None,
    enable_stochastic_rounding: bool = False,
    cache_philox_rounds: int = 0,
) -> None:
    """One token of every sequence, x and out (batch, num_heads, head_dim), or its drafts (batch, num_nodes, ...).

    state (num_slots, ..., state_dim). Drafts leave it as it is: the state after each node is kept in its row of
    `intermediate_states_buffer`. Not read: `cache_steps` is num_nodes.
    """
    launcher = "selective_state_update"
    require_absent(
        launcher,
        z=z,
        enable_stochastic_rounding=enable_stochastic_rounding,
        cache_philox_rounds=cache_philox_rounds or None,
    )
    if pad_slot_id != PAD_SLOT:
        raise unsupported(launcher, f"pad_slot_id={pad_slot_id}")
    are_drafts = disable_state_update and intermediate_states_buffer is not None
    if not are_drafts:
        require_absent(
            launcher,
            disable_state_update=disable_state_update,
            intermediate_states_buffer=intermediate_states_buffer,
            cache_steps=cache_steps,
            retrieve_parent_token=retrieve_parent_token,
            intermediate_state_indices=intermediate_state_indices,
        )
    if x.dim() != 3 + are_drafts or out is None:
        raise unsupported(launcher, f"x of shape {tuple(x.shape)} with out={None if out is None else tuple(out.shape)}")
    states = StateSlots(state, torch.arange(x.shape[0]) if state_batch_indices is None else state_batch_indices)
    bias = None if dt_bias is None else _one_per_head("dt_bias", dt_bias, 1)
    delta = _step_size(_one_per_head("dt", dt, 2 + are_drafts), bias, dt_softplus, (0.0, float("inf")))
    decay = _one_per_head("A", A, 1)
    if intermediate_states_buffer is None or intermediate_state_indices is None:
        out.copy_(mamba2.decode(x, delta, decay, B, C, D=D, states=states))
        return

    def step(node: int, states: StateSlots) -> Tensor:
        return mamba2.decode(x[:, node], delta[:, node], decay, B[:, node], C[:, node], D=D, states=states)

    rows = intermediate_state_indices[: x.shape[0]]
    out.copy_(states_along(states.read(state.dtype), intermediate_states_buffer, rows, retrieve_parent_token, step))


def _step_size(dt: Tensor, dt_bias: Tensor | None, softplus: bool, limit: tuple[float, float]) -> Tensor:
    """The step sizes delta (num_tokens, num_heads) in float32."""
    step_size = dt.float() if dt_bias is None else dt.float() + dt_bias.float()
    if softplus:
        step_size = functional.softplus(step_size)
    return step_size.clamp(*limit)


def _one_per_head(name: str, tensor: Tensor, num_dims: int) -> Tensor:
    """`tensor` without its trailing dimensions, along which upstream expands one value of each head."""
    for dim in range(num_dims, tensor.dim()):
        if tensor.shape[dim] > 1 and tensor.stride(dim) != 0:
            raise unsupported("selective_state_update", f"{name} that varies within a head")
    return tensor.flatten(num_dims)[..., 0] if tensor.dim() > num_dims else tensor


def _states_before(
    x: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    cu_seqlens: Tensor,
    initial_states: Tensor | None,
    sequences: Tensor,
    ends: Tensor,
) -> Tensor:
    """(num_tracked, ...): run the tracked sequences again, each up to the token before its end."""
    starts = cu_seqlens[sequences.long()].tolist()
    taken = [torch.arange(start, end) for start, end in zip(starts, ends.tolist(), strict=True)]
    tokens = torch.cat(taken)
    lengths = torch.tensor([0, *(len(own) for own in taken)])
    states = None
    if initial_states is not None:
        states = StateSlots(initial_states[sequences.long()], torch.arange(len(taken)))
    return mamba2.prefill(
        x[tokens],
        delta[tokens],
        A,
        B[tokens],
        C[tokens],
        cu_seqlens=lengths.cumsum(0),
        chunk_size=chunk_size,
        states=states,
    ).final_states
