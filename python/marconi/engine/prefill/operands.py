"""The tensors that a recurrent layer's kernels leave, taken while the layer runs (`spans.py`).

Each `keep_*` is given the operands as SGLang lays them out, and writes the states inside the batch to their slots. On
an accelerator they are called by hooks around SGLang's own functions; on the CPU platform, which replaces whole
launchers, by the replacements (`marconi_cpu`). Without a layer that keeps states they do nothing.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from marconi.engine.faults import acts_while, caught
from marconi.engine.prefill.spans import Family, RunningLayer, end, is_running, running, running_any
from sgl_kernel_ext import gated_delta_rule, kda, mamba2, short_conv
from sgl_kernel_ext.checkpoints import tensor_on
from sgl_kernel_ext.state_pool import StateSlots


def keep_windows(x: Tensor, states: StateSlots | None) -> None:
    """Keep the windows of a convolution that is about to run on x (num_channels, num_tokens).

    `states` are the windows (num_channels, width - 1) from which the sequences continue, perhaps in a copy of the
    layer's pool; they are not needed where every span fills its window.
    """
    layer = running_any()
    if layer is not None and not layer.has_windows:
        _keep_windows(layer, x, states)


def _keep_windows(layer: RunningLayer, x: Tensor, states: StateSlots | None) -> None:
    pool = layer.pools.windows
    if pool.shape[1] != x.shape[0]:
        # KDA's pool keeps the window before the channels.
        pool = pool.transpose(-1, -2)
    inside = layer.inside
    short_conv.checkpoint(x.T, states=states if inside.continues_windows else None, spans=inside.windows, pool=pool)
    layer.has_windows = True
    if inside.family is Family.SHORT_CONVOLUTION:
        end(layer)


def keep_gated_delta_rule(k: Tensor, corrected_values: Tensor, decay_sums: Tensor, chunk_states: Tensor) -> None:
    """The states of a prefill by the gated delta rule: operands of `gated_delta_rule.checkpoint`."""
    layer = running(Family.GATED_DELTA_RULE)
    if layer is not None:
        gated_delta_rule.checkpoint(
            k, corrected_values, decay_sums, chunk_states, spans=layer.inside.states, pool=layer.pools.states
        )
        layer.has_states = True


def keep_mamba2(
    x: Tensor, delta: Tensor, decay_sums: Tensor, B: Tensor, chunk_states: Tensor, initial_states: Tensor | None
) -> None:
    """The states of a prefill by Mamba2: operands of `mamba2.checkpoint`."""
    layer = running(Family.MAMBA2)
    if layer is not None:
        mamba2.checkpoint(
            x,
            delta,
            decay_sums,
            B,
            chunk_states,
            initial_states=initial_states,
            chunk_size=delta.shape[-1],
            spans=layer.inside.states,
            pool=layer.pools.states,
        )
        layer.has_states = True


@acts_while(is_running)
def before_convolution(x: Tensor, *_: Any, **kwargs: Any) -> None:
    """Before `causal_conv1d_fn`, SGLang's two of that name, one of which may call the other."""
    layer = running_any()
    if layer is not None and not layer.has_windows:
        states = None
        if layer.inside.continues_windows:
            has_initial_state = kwargs["has_initial_state"]
            if has_initial_state is None:
                has_initial_state = torch.zeros_like(kwargs["cache_indices"], dtype=torch.bool)
            states = StateSlots(kwargs["conv_states"], kwargs["cache_indices"], has_initial_state.bool())
        _keep_windows(layer, x, states)


@acts_while(is_running)
def before_fused_convolution(
    b: Tensor,
    _c: Tensor,
    x: Tensor,
    _weight: Tensor,
    conv_states: Tensor,
    _query_start_loc: Tensor,
    cache_indices: Tensor,
    has_initial_state: Tensor,
    *_: Any,
) -> None:
    """Before `fused_lfm_short_conv_prefill`, whose gated inputs the windows take in."""
    gated = (b * x).T
    before_convolution(gated, conv_states=conv_states, cache_indices=cache_indices, has_initial_state=has_initial_state)


@acts_while(is_running)
def before_cca(
    qk: Tensor,
    hidden_states: Tensor,
    _convolutions: Any,
    conv_state: Tensor,
    _prev_hs_state: Tensor,
    slot_ids: Sequence[int],
    has_prefix: Sequence[bool],
    *_: Any,
) -> None:
    """Before `cca_extend`, ZAYA1's two convolutions: the window before them, and the hidden state of one token."""
    layer = running(Family.SHORT_CONVOLUTION)
    if layer is not None:
        short_conv.checkpoint(hidden_states, states=None, spans=layer.inside.states, pool=layer.pools.states)
        states = None
        if layer.inside.continues_windows:
            slots = tensor_on(slot_ids, conv_state.device)
            states = StateSlots(conv_state, slots, tensor_on(has_prefix, conv_state.device, torch.bool))
        _keep_windows(layer, qk.T, states)


@acts_while(is_running)
def around_chunk_states(prefill: Callable[..., Any], k: Tensor, *args: Any, **given: Any) -> Any:
    """Around `chunk_gated_delta_rule_fwd_h`: of the gated delta rule, or, with a gate a channel, of KDA.

    KDA's carries the state in float32, leaves chunk states in the dtype of its inputs, and copies one of each sequence
    as it is where SGLang tracks it. As nothing is tracked of a prefill that is planned, the copy is that of the state
    that the spans of the sequence start from. If it fails when it is asked, before it has written any (it compiles
    another kernel, and takes memory for the copies), it runs as it was called.
    """
    layer, sums = running_any(), given.get("gk")
    chunks = None if layer is None else layer.inside.snapshots
    if layer is None or layer.keys is None or chunks is None or sums is None:
        result = prefill(k, *args, **given)
        if sums is None and given.get("g") is not None:
            keep_gated_delta_rule(k, result[1], given["g"], result[0])
        return result
    pool = layer.pools.states
    try:
        copies = pool.new_empty(len(given["cu_seqlens"]) - 1, *pool.shape[1:], dtype=torch.float32)
        if len(copies) != len(chunks) or given.get("track_state") is not None:
            raise ValueError(f"sequences must be the {len(chunks)} planned and none tracked, got {len(copies)}")
        result = prefill(k, *args, **given | {"track_state": copies, "track_chunk_idx": chunks})
    except Exception as error:
        caught("KDA's states in float32", error)
        return prefill(k, *args, **given)
    kda.checkpoint(
        layer.keys,
        result[1],
        sums,
        result[0],
        spans=layer.inside.states,
        pool=pool,
        log_base=2.0,
        snapshots=copies,
    )
    layer.has_states = True
    return result


@acts_while(is_running)
def around_flashinfer(
    extend: Callable[..., Any], kernel: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **given: Any
) -> Any:
    """Around `FlashInferGDNKernel.extend`: request the states that spans start from (`interval`); advance from them.

    Where no span starts from one, none is requested. The kernel writes a sequence's final state over its
    initial one, which positions before its first row start from. If it fails on the request, before it has written any
    (it compiles another kernel, and takes memory for the rows), it runs as it was called.
    """
    layer = running(Family.FLASHINFER)
    if layer is None:
        return extend(kernel, q, k, v, g, beta, **given)
    inside, initial_states = layer.inside, None
    if inside.states.has_no_chunk:
        initial_states = given["ssm_states"][given["cache_indices"].clamp(min=0).long()]
    if inside.chunk_ends is None:
        result = extend(kernel, q, k, v, g, beta, **given)
    else:
        asked = given | {
            "state_checkpoint_cu_starts": inside.chunk_ends.before,
            "num_state_checkpoints": inside.chunk_ends.num,
            "state_checkpoint_every_n_tokens": inside.chunk_ends.every,
        }
        try:
            result = extend(kernel, q, k, v, g, beta, **asked)
        except Exception as error:
            caught("FlashInfer's states", error)
            return extend(kernel, q, k, v, g, beta, **given)
    if layer.keys is not None:
        chunk_states = None if result[2] is None else result[2][0]
        gated_delta_rule.advance(
            layer.keys,
            v[0],
            g[0],
            beta[0],
            chunk_states,
            spans=inside.states,
            pool=layer.pools.states,
            initial_states=initial_states,
        )
        layer.has_states = True
    return result


@acts_while(is_running)
def on_flashinfer_inputs(result: Any, *_: Any, **__: Any) -> None:
    """After `gdn_prefill_qkv_prepare_fwd`: the keys that FlashInfer is given, which are of unit length."""
    layer = running(Family.FLASHINFER)
    if layer is not None:
        layer.keys = result[1]


@acts_while(is_running)
def on_kda_intra(_result: Any, q: Tensor, k: Tensor, *_: Any, **__: Any) -> None:
    """After `chunk_kda_fwd_intra`: the keys, which the chunk kernel is given scaled to the chunk's end."""
    layer = running(Family.KDA)
    if layer is not None:
        layer.keys = k


@acts_while(is_running)
def on_varlen_states(
    _result: Any,
    B: Tensor,
    x: Tensor,
    dt: Tensor,
    dA_cumsum: Tensor,
    cu_seqlens: Tensor,
    chunk_states: Tensor,
    initial_states: Tensor | None = None,
) -> None:
    """After `chunk_state_varlen`, whose operands those of a checkpoint are."""
    keep_mamba2(x, dt, dA_cumsum, B, chunk_states, initial_states)
