"""SGLang's causal convolution on `sgl_kernel_ext.short_conv`.

Upstream: `sglang/kernels/ops/mamba/causal_conv1d_triton.py`. It keeps channels first, (dim, num_tokens), as a view of
token-major memory; a state may be wider than the width - 1 inputs that it holds at its front.
"""

import torch
from torch import Tensor

from marconi.engine.faults import fails_open
from marconi.engine.prefill.operands import keep_windows
from marconi_cpu.arguments import require_absent, unsupported
from marconi_cpu.draft_tree import parents_of, states_along
from sgl_kernel_ext import short_conv
from sgl_kernel_ext.short_conv import Activation
from sgl_kernel_ext.state_pool import StateSlots

PAD_SLOT = -1


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_states: Tensor | None,
    query_start_loc: Tensor,
    seq_lens_cpu: list[int] | None = None,
    cache_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    activation: str | bool | None = "silu",
    pad_slot_id: int = PAD_SLOT,
    validate_data: bool = False,
    block_table: Tensor | None = None,
    **unknown: object,
) -> Tensor:
    """Prefill; x (dim, num_tokens), returns the same, zero past the last sequence.

    Not read: `seq_lens_cpu` and `block_table` size a launch grid, `validate_data` asks for checks that are always made.
    """
    require_absent("causal_conv1d_fn", **unknown)
    _require_pad_slot("causal_conv1d_fn", pad_slot_id)
    num_sequences = query_start_loc.shape[0] - 1
    num_tokens = int(query_start_loc[-1])
    states = None
    if conv_states is not None:
        if has_initial_state is None:
            has_initial_state = torch.zeros(num_sequences, dtype=torch.bool)
        states = _slots(conv_states, weight, cache_indices, num_sequences, has_initial_state.bool())
        fails_open(keep_windows)(x, states)
    outputs = torch.zeros_like(x)
    outputs[:, :num_tokens] = short_conv.prefill(
        x[:, :num_tokens].T, weight, bias, cu_seqlens=query_start_loc, states=states, activation=_activation(activation)
    ).T
    return outputs


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | bool | None = None,
    cache_seqlens: Tensor | None = None,
    conv_state_indices: Tensor | None = None,
    num_accept_tokens: Tensor | None = None,
    intermediate_conv_window: Tensor | None = None,
    intermediate_state_indices: Tensor | None = None,
    retrieve_next_token: Tensor | None = None,
    retrieve_next_sibling: Tensor | None = None,
    retrieve_parent_token: Tensor | None = None,
    pad_slot_id: int = PAD_SLOT,
    metadata: object = None,
    validate_data: bool = False,
) -> Tensor:
    """One token of every sequence, x (batch, dim), or its drafts, x (batch, dim, num_nodes); returns the same.

    Drafts leave the states as they are: the window after each node is kept in its row of `intermediate_conv_window`.
    Of a tree, `retrieve_parent_token` is written from the other two. Not read: `validate_data` asks for checks that are
    always made.
    """
    launcher = "causal_conv1d_update"
    require_absent(launcher, cache_seqlens=cache_seqlens, num_accept_tokens=num_accept_tokens, metadata=metadata)
    _require_pad_slot(launcher, pad_slot_id)
    states = _slots(conv_state, weight, conv_state_indices, x.shape[0])
    if x.dim() == 2:
        require_absent(
            launcher,
            intermediate_conv_window=intermediate_conv_window,
            intermediate_state_indices=intermediate_state_indices,
            retrieve_next_token=retrieve_next_token,
            retrieve_next_sibling=retrieve_next_sibling,
            retrieve_parent_token=retrieve_parent_token,
        )
        return short_conv.decode(x, weight, bias, states=states, activation=_activation(activation))
    if intermediate_conv_window is None or intermediate_state_indices is None:
        raise unsupported(launcher, f"x of shape {tuple(x.shape)} without intermediate_conv_window")
    parents = None
    if retrieve_next_token is not None and retrieve_next_sibling is not None and retrieve_parent_token is not None:
        parents = retrieve_parent_token.copy_(parents_of(retrieve_next_token, retrieve_next_sibling))

    def step(node: int, windows: StateSlots) -> Tensor:
        return short_conv.decode(x[..., node], weight, bias, states=windows, activation=_activation(activation))

    rows = intermediate_state_indices[: x.shape[0]]
    return states_along(states.read(conv_state.dtype), intermediate_conv_window, rows, parents, step).movedim(1, 2)


def _slots(
    conv_states: Tensor,
    weight: Tensor,
    cache_indices: Tensor | None,
    num_sequences: int,
    has_initial_state: Tensor | None = None,
) -> StateSlots:
    slots = torch.arange(num_sequences) if cache_indices is None else cache_indices
    return StateSlots(conv_states[..., : weight.shape[1] - 1], slots, has_initial_state)


def _activation(activation: str | bool | None) -> Activation:
    if activation in ("silu", "swish", True):
        return Activation.SILU
    if activation in (None, False):
        return Activation.NONE
    raise unsupported("causal_conv1d", f"activation={activation!r}")


def _require_pad_slot(launcher: str, pad_slot_id: int) -> None:
    if pad_slot_id != PAD_SLOT:
        raise unsupported(launcher, f"pad_slot_id={pad_slot_id}")
