"""Families whose state is a convolution window: LFM2, LFM2-MoE, Inkling, ZAYA1.

Upstream: SGLang `configs/{lfm2,lfm2_moe,inkling,zaya}.py`, `models/lfm2.py`.
"""

from collections.abc import Iterator

from marconi.model import recurrent
from marconi.model.attention import Attention, SlidingWindowAttention
from marconi.model.base import Layer
from marconi.model.feed_forward import MixtureOfExperts, Mlp
from marconi.model.huggingface.blocks import attention, experts
from marconi.model.huggingface.config import Config


def lfm2(config: Config) -> Iterator[Layer]:
    """LFM2 and LFM2-MoE: convolutions and full attention; the first `num_dense_layers` of LFM2-MoE are dense."""
    hidden_size = config.positive("hidden_size")
    num_dense = config.integer("num_dense_layers", default=0)
    for index, is_attention in enumerate(_lfm2_schedule(config)):
        if is_attention:
            yield attention(config)
        else:
            yield recurrent.short_convolution(hidden_size, config.positive("conv_L_cache"))
        if config.has("num_experts") and index >= num_dense:
            yield experts(config, "num_experts", width=config.positive("moe_intermediate_size"))
        else:
            yield Mlp(hidden_size, _lfm2_intermediate_size(config))


def _lfm2_schedule(config: Config) -> list[bool]:
    if config.has("layer_types"):
        kinds = config.per_layer("layer_types")
        config.require_known("layer_types", kinds, ("conv", "short_conv", "full_attention"))
        return [kind == "full_attention" for kind in kinds]
    full = config.indices("full_attn_idxs")
    return [index in full for index in range(config.positive("num_hidden_layers"))]


def _lfm2_intermediate_size(config: Config) -> int:
    width = config.positive("block_ff_dim", "intermediate_size")
    if config.has("num_experts") or not config.flag("block_auto_adjust_ff_dim", default=True):
        return width
    width = int(2 * width / 3)
    width = int(width * config.number("block_ffn_dim_multiplier", default=1.0))
    multiple = config.positive("block_multiple_of", default=256)
    return -(-width // multiple) * multiple


def inkling(config: Config) -> Iterator[Layer]:
    """Inkling: full attention and sliding windows, with convolutions on keys, values and both residual streams.

    SGLang's pool gives every layer windows for the key and value heads of both kinds, of which a layer uses one: 4
    head streams and 2 of the hidden width. The relative position logits are not counted.
    """
    hidden_size = config.positive("hidden_size")
    full = attention(config)
    local = Attention(
        hidden_size=hidden_size,
        num_heads=config.positive("swa_num_attention_heads", default=full.num_heads),
        num_kv_heads=config.positive("swa_num_key_value_heads", default=full.num_kv_heads),
        head_dim=config.positive("swa_head_dim", default=full.head_dim),
        v_head_dim=config.positive("swa_head_dim", default=full.head_dim),
    )
    streams = ((full.num_kv_heads, full.head_dim),) * 2 + ((local.num_kv_heads, local.head_dim),) * 2
    local_ids = config.indices("local_layer_ids", default=[])
    for index in range(config.positive("num_hidden_layers")):
        if index in local_ids:
            yield SlidingWindowAttention(local, config.positive("sliding_window_size"))
        else:
            yield full
        yield recurrent.convolution_window(streams, 2 * hidden_size, config.positive("sconv_kernel_size"))
        width = config.positive("intermediate_size")
        if index >= config.integer("dense_mlp_idx", default=0) and config.integer("n_routed_experts", default=0):
            shared_width = config.integer("n_shared_experts", default=0) * width
            yield experts(config, "n_routed_experts", width=width, shared_width=shared_width)
        else:
            yield Mlp(hidden_size, config.positive("dense_intermediate_size", default=width))


def zaya(config: Config) -> Iterator[Layer]:
    """ZAYA1: attention with two convolutions over queries and keys, and a window of one hidden vector, then experts.

    The layers alternate between attention and experts (`zaya_layers`, else even and odd). `ffn_hidden_size` is of
    gate and value together. The router's own small network is counted as one matrix.
    """
    hidden_size, num_layers = config.positive("hidden_size"), config.positive("num_hidden_layers")
    kinds = config.sequence("zaya_layers", default=["a", "e"] * num_layers)[:num_layers]
    mixer = attention(config)
    window = config.positive("cca_time0", default=2) + config.positive("cca_time1", default=2) - 2
    for kind in kinds:
        if kind == "a":
            yield mixer
            heads = ((mixer.num_heads, mixer.head_dim), (mixer.num_kv_heads, mixer.head_dim))
            yield recurrent.convolution_window(heads, 0, window + 1)
            yield recurrent.convolution_window((), hidden_size, 2)
        else:
            yield MixtureOfExperts(
                hidden_size=hidden_size,
                num_experts=config.positive("num_experts"),
                num_active_experts=config.positive("moe_router_topk"),
                expert_intermediate_size=config.positive("ffn_hidden_size") // 2,
            )
