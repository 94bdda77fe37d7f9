"""SGLang's linear backends as it builds them for models of the families, with batches, on a card that is not there.

The backends, their metadata, the launchers below them and Mamba2's mixer are SGLang's. Stand-ins are the pools, what is
projected before and after a layer, and what SGLang compiles for CUDA by other means than Triton.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final

from .fake_cuda import CARD

NUM_LAYERS: Final = 2
NUM_SLOTS: Final = 40
NUM_VERIFIED: Final = 9
"""Requests whose drafts are verified at once, and"""
MAX_NODES: Final = 8
"""the drafts of each."""
NUM_HEADS: Final = 32
NUM_KEY_HEADS: Final = 16
HEAD_DIM: Final = 128
NUM_CHANNELS: Final = (2 * NUM_KEY_HEADS + NUM_HEADS) * HEAD_DIM


@dataclass(frozen=True, slots=True)
class DeltaHeads:
    """Heads of a layer of Gated DeltaNet, each of `HEAD_DIM` channels; those of Qwen3-Next if nothing is said."""

    num_heads: int = NUM_HEADS
    num_key_heads: int = NUM_KEY_HEADS
    state_dtype: str = "float32"

    @property
    def num_channels(self) -> int:
        """Channels of the convolution."""
        return (2 * self.num_key_heads + self.num_heads) * HEAD_DIM


@dataclass(frozen=True, slots=True)
class KimiHeads:
    """Heads of a layer of KDA, each of `HEAD_DIM` channels; those of Kimi-Linear if nothing is said."""

    num_heads: int = NUM_HEADS
    state_dtype: str = "float32"

    @property
    def num_channels(self) -> int:
        """Channels of the convolution."""
        return 3 * self.num_heads * HEAD_DIM


@dataclass(frozen=True, slots=True)
class MambaHeads:
    """A layer of Mamba2; one of Nemotron-H-8B if nothing is said."""

    num_heads: int = 128
    head_dim: int = 64
    state_dim: int = 128
    num_groups: int = 8
    hidden: int = 4096
    chunk_size: int = 128
    state_dtype: str = "float32"


@dataclass(frozen=True, slots=True)
class Prefill:
    """A batch, and the states that were planned for it: (row, depth) each."""

    lengths: tuple[int, ...] = (300, 70, 20)
    prefixes: tuple[int, ...] = (0, 128, 0)
    planned: tuple[tuple[int, int], ...] = ((0, 100), (0, 256), (0, 300), (1, 192), (2, 7))
    num_padding: int = 0
    """Tokens behind the last, as in a captured graph's bucket."""


Layer = Callable[[Any, Any, Any, int, int], Any]
"""(hybrid backend, linear backend, forward batch, layer, tokens) of one recurrent layer: runs it."""


@dataclass(frozen=True, slots=True)
class Model:
    """A family's backend, as SGLang builds it, with pools of its shapes."""

    linear: Callable[[], Any]
    layer: Layer
    chunk_size: int = 64


def empty(*shape: int, dtype: str = "bfloat16") -> Any:
    """A tensor on the card."""
    import torch

    return torch.empty(shape, dtype=getattr(torch, dtype), device=CARD)


def stand_in() -> None:
    """Stand in for what SGLang compiles for CUDA by other means than Triton, and for what it reads of its arguments."""
    import sglang.srt.layers.attention.hybrid_linear_attn_backend as hybrid
    import sglang.srt.layers.attention.linear.gdn_backend as gdn
    from sglang.srt.layers.attention.mamba.mamba2_metadata import Mamba2Metadata
    from sglang.srt.platforms import current_platform

    def split(mixed: Any, *sizes: int) -> tuple[Any, ...]:
        num_q, num_k, num_v, *_ = sizes
        parts = mixed.split([num_q * HEAD_DIM, num_k * HEAD_DIM, num_v * HEAD_DIM], -1)
        return tuple(each.unflatten(-1, (-1, HEAD_DIM))[None] for each in parts)

    gdn.fused_qkv_split_gdn_prefill = split
    gdn.fused_gdn_gating = lambda _A, a, _b, _bias: (empty(1, *a.shape, dtype="float32"), empty(1, *a.shape))
    current_platform.is_pin_memory_available = lambda *_: True
    hybrid.get_memory = lambda: SimpleNamespace(enable_page_major_kv_layout=False)
    # As many logical chunks as the batch of `Prefill` has: 4 of the grid, and 2 that begin inside one.
    rows: Any = staticmethod(lambda *_: (empty(6, dtype="int32"), empty(6, dtype="int32")))
    Mamba2Metadata._query_start_loc_to_chunk_indices_offsets = rows


@contextlib.contextmanager
def chunks_of(lengths: tuple[int, ...]) -> Iterator[None]:
    """SGLang reads from the card how many chunks a batch has, once a batch: here they are those of these lengths."""

    def indices(_offsets: Any, chunk_size: int, *_: Any, **__: Any) -> Any:
        return empty(sum(-(-length // chunk_size) for length in lengths), 2, dtype="int64")

    with replaced("prepare_chunk_indices", indices):
        yield


@contextlib.contextmanager
def replaced(name: str, stand_in: Any) -> Iterator[None]:
    """`name` of SGLang's operators is `stand_in`, wherever it was imported to."""
    modules = [
        each for key, each in [*sys.modules.items()] if key.startswith("sglang.kernels.ops.") and name in vars(each)
    ]
    before = [getattr(each, name) for each in modules]
    for each in modules:
        setattr(each, name, stand_in)
    try:
        yield
    finally:
        for each, value in zip(modules, before, strict=True):
            setattr(each, name, value)


def hybrid_backend(model: Model) -> tuple[Any, Any]:
    """SGLang's hybrid backend and the linear one below it; a batch's rows have slots of the pool."""
    from sglang.srt.layers.attention.hybrid_linear_attn_backend import HybridLinearAttnBackend

    linear = model.linear()
    linear.device, linear.pad_slot_id, linear.topk = CARD, -1, 0
    linear.enable_mis = linear.enable_unified_memory = linear._use_strided_target_verify_qkv = False
    linear.mis_metadata = linear.prefill_graph_metadata = linear.accept_lens_pool = None
    linear._mamba_chunk_size, linear._fused_state_indices_ok = model.chunk_size, True
    hybrid = HybridLinearAttnBackend.__new__(HybridLinearAttnBackend)
    hybrid.linear_attn_backend = linear
    hybrid.full_attn_layers = []
    hybrid.full_attn_backend = SimpleNamespace(
        init_forward_metadata=lambda _: None, init_forward_metadata_out_graph=lambda *_, **__: None
    )
    hybrid.attn_backend_list = [hybrid.full_attn_backend, linear]
    return hybrid, linear


def with_pool(backend: Any, conv: Any, temporal: Any, kernel: Any, decode: Any = None) -> Any:
    """A linear backend whose layers have states in `conv` and `temporal`, and prefill by `kernel`.

    They decode by `decode`; Mamba2's by themselves.
    """
    from sglang.srt.mem_cache.memory_pool import MambaPool

    linear = backend.__new__(backend)
    states = MambaPool.SpeculativeState(
        conv=[conv],
        temporal=temporal,
        intermediate_ssm=temporal.new_empty(NUM_VERIFIED, MAX_NODES, *temporal.shape[1:]),
        intermediate_conv_window=[conv.new_empty(NUM_VERIFIED, MAX_NODES, *conv.shape[1:])],
    )
    conv_of_layers, temporal_of_layers = (each.new_empty(NUM_LAYERS, *each.shape) for each in (conv, temporal))
    every_layer = SimpleNamespace(
        conv=[conv_of_layers], temporal=temporal_of_layers, replayssm_rawv=None, replayssm_d=None
    )
    linear.req_to_token_pool = SimpleNamespace(
        mamba2_layer_cache=lambda _: states,
        translate_mamba_indices=lambda slots: slots,
        get_mamba_indices=lambda rows: empty(rows.shape[0], dtype="int32"),
        mamba_pool=SimpleNamespace(mamba_cache=every_layer, replayssm_is_kda=False, enable_linear_replayssm=False),
        mamba_map={layer: layer for layer in range(NUM_LAYERS)},
    )
    linear.kernel_dispatcher = kernel and SimpleNamespace(
        extend_kernel=kernel,
        extend=lambda *args, **kwargs: kernel.extend(*args, **kwargs),
        extend_uses_state_checkpoints=False,
        supports_packed_decode=True,
        packed_decode=decode and decode.packed_decode,
        target_verify=decode and decode.target_verify,
        target_verify_supports_strided_qkv=lambda _: True,
        effective_extend_kernel=lambda *_: kernel,
    )
    return linear


def forward_batch_of(batch: Prefill) -> Any:
    """The `ForwardBatch` of a prefill."""
    import torch
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    num, num_tokens = len(batch.lengths), sum(batch.lengths)
    lengths = [prefix + length for prefix, length in zip(batch.prefixes, batch.lengths, strict=True)]
    return SimpleNamespace(
        batch_size=num,
        forward_mode=ForwardMode.EXTEND,
        logical_forward_mode=ForwardMode.EXTEND,
        req_pool_indices=empty(num, dtype="int64"),
        seq_lens=empty(num, dtype="int64"),
        seq_lens_cpu=torch.tensor(lengths),
        mamba_track_indices=empty(num, dtype="int64"),
        mamba_track_mask=empty(num, dtype="bool"),
        mamba_track_seqlens=empty(num, dtype="int64"),
        mamba_prefill_track_mask_cpu=[False] * num,
        mamba_track_seqlens_cpu=[-1] * num,
        extend_start_loc=empty(num, dtype="int32"),
        extend_seq_lens=empty(num, dtype="int32"),
        extend_prefix_lens=empty(num, dtype="int32"),
        extend_seq_lens_cpu=[*batch.lengths],
        extend_prefix_lens_cpu=[*batch.prefixes],
        extend_num_tokens=num_tokens,
        input_ids=empty(num_tokens, dtype="int64"),
        global_num_token_non_padded_cpu=num_tokens,
        tbo_parent_token_range=None,
        spec_info=None,
        multi_item_delimiter_indices=None,
        sampling_info=object(),
        out_cache_loc=empty(num_tokens + batch.num_padding, dtype="int64"),
    )


def linear_layer(num_key_heads: int, layer: int, num_heads: int = NUM_HEADS) -> Any:
    """A `RadixLinearAttention` of Gated DeltaNet or of KDA."""
    key_dim = num_key_heads * HEAD_DIM
    return SimpleNamespace(
        layer_id=layer,
        num_q_heads=num_key_heads,
        num_k_heads=num_key_heads,
        num_v_heads=num_heads,
        head_q_dim=HEAD_DIM,
        head_k_dim=HEAD_DIM,
        head_v_dim=HEAD_DIM,
        q_dim=key_dim,
        k_dim=key_dim,
        v_dim=num_heads * HEAD_DIM,
        conv_weights=empty(2 * key_dim + num_heads * HEAD_DIM, 4),
        bias=None,
        activation="silu",
        A_log=empty(num_heads, dtype="float32"),
        dt_bias=empty(num_heads),
        lower_bound=None,
    )


def gated_delta_net(kernel: str, heads: DeltaHeads = DeltaHeads()) -> Model:
    """Qwen3-Next, or what has other heads, whose layers prefill by the kernel of that name."""
    from sglang.srt.layers.attention.linear.gdn_backend import GDNAttnBackend
    from sglang.srt.layers.attention.linear.kernels.gdn_flashinfer import FlashInferGDNKernel
    from sglang.srt.layers.attention.linear.kernels.gdn_triton import TritonGDNKernel

    def kernel_of() -> Any:
        if kernel == "TritonGDNKernel":
            return TritonGDNKernel()
        if kernel != "FlashInferGDNKernel":
            return type(kernel, (TritonGDNKernel,), {})()
        found = FlashInferGDNKernel.__new__(FlashInferGDNKernel)
        found.use_state_pool = found._prefill_needs_fp32_state = False
        found._prefill_fn = lambda **given: (given["v"].new_empty(given["v"].shape), given["output_state"])
        return found

    def linear() -> Any:
        states = empty(NUM_SLOTS, heads.num_heads, HEAD_DIM, HEAD_DIM, dtype=heads.state_dtype)
        return with_pool(
            GDNAttnBackend, empty(NUM_SLOTS, heads.num_channels, 3), states, kernel_of(), TritonGDNKernel()
        )

    def layer(hybrid: Any, _linear: Any, forward_batch: Any, number: int, num_tokens: int) -> Any:
        return hybrid.forward(
            layer=linear_layer(heads.num_key_heads, number, heads.num_heads),
            forward_batch=forward_batch,
            mixed_qkv=empty(num_tokens, heads.num_channels),
            a=empty(num_tokens, heads.num_heads),
            b=empty(num_tokens, heads.num_heads),
            linear_attn_output=empty(1, num_tokens, heads.num_heads, HEAD_DIM),
        )

    return Model(linear, layer)


def kimi_delta_attention(heads: KimiHeads = KimiHeads()) -> Model:
    """Kimi-Linear, or what has other heads."""
    from sglang.srt.layers.attention.linear.kda_backend import KDAAttnBackend
    from sglang.srt.layers.attention.linear.kernels.kda_triton import TritonKDAKernel

    num_heads, num_channels = heads.num_heads, heads.num_channels

    def linear() -> Any:
        states = empty(NUM_SLOTS, num_heads, HEAD_DIM, HEAD_DIM, dtype=heads.state_dtype)
        kernel = TritonKDAKernel()
        return with_pool(KDAAttnBackend, empty(NUM_SLOTS, 3, num_channels), states, kernel, kernel)

    def layer(hybrid: Any, _linear: Any, forward_batch: Any, number: int, num_tokens: int) -> Any:
        attention = linear_layer(num_heads, number, num_heads)
        attention.dt_bias = empty(num_heads * HEAD_DIM, dtype="float32")
        attention.A_log = empty(1, 1, num_heads, 1, dtype="float32")
        return hybrid.forward(
            layer=attention,
            forward_batch=forward_batch,
            mixed_qkv=empty(num_tokens, num_channels),
            a=empty(1, num_tokens, num_heads * HEAD_DIM),
            b=empty(1, num_tokens, num_heads),
            linear_attn_output=empty(1, num_tokens, num_heads, HEAD_DIM),
        )

    return Model(linear, layer)


def mamba2(heads: MambaHeads = MambaHeads()) -> Model:
    """Nemotron-H: the forward of SGLang's mixer, without its projections."""
    from sglang.srt.layers.attention.hybrid_linear_attn_backend import Mamba2AttnBackend
    from sglang.srt.layers.attention.mamba.mamba import MambaMixer2

    num_heads, head_dim, state_dim = heads.num_heads, heads.head_dim, heads.state_dim
    num_groups, hidden = heads.num_groups, heads.hidden
    inner, groups = num_heads * head_dim, num_groups * state_dim
    num_channels = inner + 2 * groups

    def linear() -> Any:
        states = empty(NUM_SLOTS, num_heads, head_dim, state_dim, dtype=heads.state_dtype)
        return with_pool(Mamba2AttnBackend, empty(NUM_SLOTS, num_channels, 3), states, None)

    def mixer() -> Any:
        found = SimpleNamespace(
            in_proj=lambda given: (empty(given.shape[0], inner + num_channels + num_heads), None),
            out_proj=lambda given: (empty(given.shape[0], hidden), None),
            norm=lambda given, _gate: given,
            conv1d=SimpleNamespace(weight=empty(num_channels, 1, 4), bias=None),
            intermediate_size=inner,
            conv_dim=num_channels,
            num_heads=num_heads,
            head_dim=head_dim,
            n_groups=num_groups,
            groups_ssm_state_size=groups,
            ssm_state_size=state_dim,
            tp_size=1,
            activation="silu",
            **{name: empty(num_heads, dtype="float32") for name in ("A", "D", "dt_bias")},
        )
        found.forward = lambda **given: MambaMixer2.forward(found, **given)
        return found

    def layer(_hybrid: Any, linear: Any, forward_batch: Any, number: int, num_tokens: int) -> Any:
        return linear.forward(
            mixer=mixer(),
            hidden_states=empty(num_tokens, hidden),
            output=None,
            layer_id=number,
            forward_batch=forward_batch,
            use_triton_causal_conv=True,
        )

    return Model(linear, layer, chunk_size=heads.chunk_size)


@contextlib.contextmanager
def instead(owner: Any, name: str, value: Any) -> Iterator[None]:
    """`value` in place of an attribute."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
