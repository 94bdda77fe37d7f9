"""Families of linear attention with simple decay, and RWKV-7: Ling and Ring 2.5 and 3, MiniCPM-SALA, MiniMax-01.

Upstream: SGLang `configs/{bailing_hybrid,minicpm}.py`; MiniMax-01 and RWKV-7 are not served by SGLang 0.5.23 and are
read as transformers and flash-linear-attention spell them.
"""

from collections.abc import Iterator

from marconi.model import recurrent
from marconi.model.base import Layer
from marconi.model.feed_forward import UNGATED, Mlp
from marconi.model.huggingface.blocks import attention, deepseek_feed_forward, experts, latent_attention, mlp
from marconi.model.huggingface.config import Config


def bailing(config: Config) -> Iterator[Layer]:
    """Ling and Ring: latent attention, and lightning attention (2.5) or KDA (3, which has a convolution)."""
    hidden_size, num_heads = config.positive("hidden_size"), config.positive("num_attention_heads")
    head_dim = config.positive("head_dim", default=hidden_size // num_heads)
    for index, is_linear in enumerate(_bailing_schedule(config)):
        if is_linear and config.has("short_conv_kernel_size"):
            yield recurrent.kimi_delta_attention(
                hidden_size, num_heads, head_dim, config.positive("short_conv_kernel_size")
            )
        elif is_linear:
            yield recurrent.lightning_attention(hidden_size, num_heads, head_dim, gate_channels=num_heads * head_dim)
        elif config.has("kv_lora_rank"):
            yield latent_attention(config)
        else:
            yield attention(config)
        yield deepseek_feed_forward(config, index)


def _bailing_schedule(config: Config) -> list[bool]:
    if isinstance(config.fields.get("layer_group_size"), list):
        marks = config.per_layer("layer_group_size")
        return [mark == 1 for mark in marks]
    group_size = config.positive("layer_group_size")
    return [(index + 1) % group_size != 0 for index in range(config.positive("num_hidden_layers"))]


def minicpm_sala(config: Config) -> Iterator[Layer]:
    """MiniCPM-SALA: `mixer_types` repeats to the number of layers. Sparse attention counts as full."""
    num_layers, mixers = config.positive("num_hidden_layers"), config.sequence("mixer_types")
    num_heads = config.positive("lightning_nh", "num_attention_heads")
    head_dim = config.positive(
        "lightning_head_dim",
        "head_dim",
        default=config.positive("hidden_size") // config.positive("num_attention_heads"),
    )
    is_gated = config.flag("use_output_gate", default=False)
    for index in range(num_layers):
        if str(mixers[index % len(mixers)]).startswith("lightning"):
            gate = num_heads * head_dim if is_gated else 0
            yield recurrent.lightning_attention(config.positive("hidden_size"), num_heads, head_dim, gate)
        else:
            yield attention(config, gated=config.flag("attn_use_output_gate", default=False))
        yield mlp(config)


def minimax(config: Config) -> Iterator[Layer]:
    """MiniMax-01: lightning attention, softmax attention where `attn_type_list` is 1 or `layer_types` says so."""
    if config.has("attn_type_list"):
        kinds = config.per_layer("attn_type_list")
        linear = [kind == 0 for kind in kinds]
    else:
        kinds = config.per_layer("layer_types")
        linear = [kind == "linear_attention" for kind in kinds]
    softmax = attention(config)
    channels = softmax.num_heads * softmax.head_dim
    for is_linear in linear:
        if is_linear:
            yield recurrent.lightning_attention(softmax.hidden_size, softmax.num_heads, softmax.head_dim, channels)
        else:
            yield softmax
        shared_width = config.integer("shared_intermediate_size", default=0)
        width = config.positive("intermediate_size")
        yield experts(config, "num_local_experts", width=width, shared_width=shared_width)


def rwkv7(config: Config) -> Iterator[Layer]:
    """RWKV-7: time mixing and channel mixing, no attention."""
    hidden_size = config.positive("hidden_size")
    ranks = ("decay_low_rank_dim", "a_low_rank_dim", "v_low_rank_dim", "gate_low_rank_dim")
    intermediate_size = config.positive("intermediate_size", default=4 * hidden_size)
    for _ in range(config.positive("num_hidden_layers")):
        yield recurrent.rwkv7(hidden_size, config.positive("head_dim"), sum(config.positive(rank) for rank in ranks))
        yield Mlp(hidden_size, intermediate_size, UNGATED)
