"""Attention of drafted tokens by torch, which SGLang's `torch_native` has no way for.

    a verify step    a node sees the request's tokens and the nodes above it, by the batch's `custom_mask`: a part of
                     (num_nodes, num_tokens + num_nodes) a request; without one a tree is a chain
    a draft model    decodes one token of each branch in each step: it sees the request's tokens and those of its branch

KV lies where the one pool or the two have put it. Source: `srt/layers/attention/torch_native_backend.py` and
`srt/speculative/draft_utils.py`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from marconi_cpu.joint_pool import places_of
from marconi_cpu.relative_attention import around_forward

_ATTENTION = "torch_native"


def around_forward_extend(
    forward: Callable[..., Any],
    backend: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer: Any,
    forward_batch: Any,
    save_kv_cache: bool = True,
    **kwargs: Any,
) -> Any:
    """Around `TorchNativeAttnBackend.forward_extend`: a verify step has its own."""
    if not forward_batch.forward_mode.is_target_verify():
        return around_forward(forward, backend, q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
    if save_kv_cache:
        _write(backend, k, v, layer, forward_batch)
    spec = forward_batch.spec_info
    num_nodes = spec.draft_token_num
    rows = forward_batch.req_pool_indices.tolist()
    lengths = forward_batch.seq_lens.tolist()
    table = backend.req_to_token_pool.req_to_token
    entries = [table[row, : length + num_nodes] for row, length in zip(rows, lengths, strict=True)]
    masks, start = [], 0
    for length in lengths:
        above = torch.ones(num_nodes, num_nodes, dtype=torch.bool).tril()
        if spec.custom_mask is not None:
            end = start + num_nodes * (length + num_nodes)
            above = spec.custom_mask[start:end].view(num_nodes, -1)[:, length:]
            start = end
        masks.append(torch.cat([above.new_ones(num_nodes, length), above], 1))
    return _attention(backend, q, layer, entries, masks)


def around_create_backend(
    create: Callable[..., Any],
    factory: Any,
    backend_name: str,
    backend_map: dict[str, Callable[[], tuple[str, Any]]],
    error_template: str,
    stamps_children: bool = False,
) -> Any:
    """Around `DraftBackendFactory._create_backend`: a draft model may have this attention."""

    def make() -> tuple[str, Any]:
        runner = factory.draft_model_runner
        if stamps_children:
            return _ATTENTION, DraftSteps(runner, factory.topk, factory.speculative_num_steps)
        return _ATTENTION, TorchNativeAttnBackend(runner)

    return create(factory, backend_name, {**backend_map, _ATTENTION: make}, error_template, stamps_children)


class DraftSteps:
    """The backends of a draft model's steps after its first, as SGLang's other attentions have them."""

    def __init__(self, model_runner: Any, topk: int, num_steps: int) -> None:
        self.attn_backends = [DraftStep(model_runner, topk, num_steps, step) for step in range(num_steps - 1)]
        self.kv_index_translator = model_runner.kv_index_translator
        """From the names of KV to its places, where SGLang looks for it."""

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """There is none: a step reads what it needs of the batch."""


class DraftStep(TorchNativeAttnBackend):
    """One token of each branch; it sees `step` + 1 of its branch, itself among them, in `num_steps` entries."""

    def __init__(self, model_runner: Any, topk: int, num_steps: int, step: int) -> None:
        super().__init__(model_runner)
        self._topk, self._num_steps, self._num_seen = topk, num_steps, step + 1

    def forward_decode(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool = True
    ) -> Tensor:
        """Attention of one layer; q (batch * topk, num_heads * head_dim)."""
        if save_kv_cache:
            _write(self, k, v, layer, forward_batch)
        table, entries = self.req_to_token_pool.req_to_token, []
        rows = zip(forward_batch.req_pool_indices.tolist(), forward_batch.seq_lens.tolist(), strict=True)
        for row, length in rows:
            for branch in range(self._topk):
                start = length + branch * self._num_steps
                entries.append(torch.cat([table[row, :length], table[row, start : start + self._num_seen]]))
        return _attention(self, q, layer, entries, [None] * len(entries))


def _write(backend: Any, k: Tensor, v: Tensor, layer: Any, forward_batch: Any) -> None:
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    backend.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc.for_batch(forward_batch), k, v)


def _attention(
    backend: Any, q: Tensor, layer: Any, entries: Sequence[Tensor], masks: Sequence[Tensor | None]
) -> Tensor:
    """Run several queries per sequence against its KV `entries` in SGLang's table, under its mask."""
    pool = backend.token_to_kv_pool
    keys, values = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
    queries = q.view(len(entries), -1, layer.tp_q_head_num, layer.qk_head_dim)
    outputs = q.new_empty(*queries.shape[:-1], layer.v_head_dim)
    for sequence, (own, mask) in enumerate(zip(entries, masks, strict=True)):
        places = places_of(backend, own)
        outputs[sequence] = scaled_dot_product_attention(
            queries[sequence].movedim(0, 1)[None],
            keys[places].to(q.dtype).movedim(0, 1)[None],
            values[places].to(q.dtype).movedim(0, 1)[None],
            attn_mask=mask,
            scale=layer.scaling,
            enable_gqa=layer.tp_q_head_num != layer.tp_k_head_num,
        )[0].movedim(1, 0)
    return outputs.view(q.shape[0], -1)
