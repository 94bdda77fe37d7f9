"""Attention with a bias by distance, in all tokens before one or in a window of them, by torch.

A head adds to its score of a key the bias that the query has for their distance, of `extent` distances:

    score(i, j) = scale q_i k_j + (bias[i, i - j] if i - j < extent else 0)        i - window <= j <= i

SGLang gives the bias to its kernels as the operand of a modification of scores. KV of layers with a window lies in a
pool of its own, or a part of one pool, whose entries SGLang looks up by those of the other; one outside of the window
may have none, and is not read. Source: `srt/models/inkling_common/attn.py`, `srt/mem_cache/swa_memory_pool.py` and
`srt/layers/attention/torch_native_backend.py`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from marconi_cpu import joint_pool


def around_forward(
    forward: Callable[..., Any],
    backend: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer: Any,
    forward_batch: Any,
    save_kv_cache: bool = True,
    score_mod: object = None,
    aux_tensors: Sequence[Tensor] | None = None,
    **kwargs: Any,
) -> Any:
    """Around `TorchNativeAttnBackend.forward_decode`, and of `.forward_extend`: a layer may have biases.

    Not read: `score_mod` is a kernel's code for what this does.
    """
    if aux_tensors is None:
        return joint_pool.around_forward(forward, backend, q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
    (bias,) = aux_tensors
    pool = backend.token_to_kv_pool
    if save_kv_cache:
        from sglang.srt.mem_cache.kv_loc_plan import IdSpaceKind
        from sglang.srt.mem_cache.memory_pool import KVWriteLoc
        from sglang.srt.model_executor.forward_context import get_attn_backend

        own = get_attn_backend().kv_index_translator.write_ids(forward_batch, IdSpaceKind.SLIDING_WINDOW)
        pool.set_kv_buffer(layer, KVWriteLoc.for_batch(forward_batch, swa_loc=own), k, v)
    lengths = forward_batch.seq_lens.tolist()
    is_decode = forward_batch.forward_mode.is_decode()
    num_new = [1] * len(lengths) if is_decode else forward_batch.extend_seq_lens.tolist()
    table, rows = backend.req_to_token_pool.req_to_token, forward_batch.req_pool_indices.tolist()
    keys, values = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
    window = layer.sliding_window_size if layer.sliding_window_size > -1 else None
    queries = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
    outputs, start = q.new_zeros(len(queries), layer.tp_q_head_num, layer.v_head_dim), 0
    for row, length, num in zip(rows, lengths, num_new, strict=True):
        first = 0 if window is None else max(0, length - num - window)
        entries = table[row, first:length].long()
        if window is None or not backend.use_sliding_window_kv_pool:
            places = joint_pool.places_of(backend, entries)
        else:
            places = pool.translate_loc_from_full_to_swa(entries).long()
        new = slice(start, start + num)
        outputs[new] = attention(queries[new], keys[places], values[places], bias[new], layer.scaling, window)
        start += num
    return outputs.view(len(queries), -1)


def attention(queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor, scale: float, window: int | None) -> Tensor:
    """Run one sequence's last tokens, `queries` (num_new, num_heads, head_dim), against its `keys` and `values`.

    Those are (num_seen, num_kv_heads, head_dim), of which the last are the queries' own. `bias` (num_new, num_heads,
    extent); `window` are the tokens that a query sees before itself. Returns (num_new, num_heads, head_dim).
    """
    num_new, num_seen, extent = len(queries), len(keys), bias.shape[-1]
    distance = torch.arange(num_seen - num_new, num_seen)[:, None] - torch.arange(num_seen)
    is_seen = distance >= 0 if window is None else (distance >= 0) & (distance <= window)
    nearest = distance.clamp(0, extent - 1).expand(bias.shape[1], -1, -1)
    by_key = bias.float().movedim(1, 0).gather(2, nearest).masked_fill(distance >= extent, 0.0)
    mask = by_key.masked_fill(~is_seen, -torch.inf).to(queries.dtype)
    return scaled_dot_product_attention(
        queries.movedim(0, 1)[None],
        keys.to(queries.dtype).movedim(0, 1)[None],
        values.to(queries.dtype).movedim(0, 1)[None],
        attn_mask=mask[None],
        scale=scale,
        enable_gqa=queries.shape[1] != keys.shape[1],
    )[0].movedim(1, 0)


def serving_attention_backend(forward_batch: object) -> str:
    """Name the backend whose operands this attention takes, whatever the batch: Inkling's layers know two."""
    return "triton"
