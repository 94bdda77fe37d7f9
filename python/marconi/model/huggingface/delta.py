"""Families of the delta rule: Qwen3-Next, Qwen3.5, GigaChat 3.5, Jet-Nemotron (GDN); Kimi Linear, GLM-5 (KDA).

Upstream: SGLang `configs/{qwen3_next,qwen3_5,gigachat35,jet_nemotron,kimi_linear,glm5_next}.py`.
"""

from collections.abc import Iterator

from marconi.model import recurrent
from marconi.model.attention import SlidingWindowAttention
from marconi.model.base import Layer
from marconi.model.huggingface.blocks import (
    FULL,
    attention,
    deepseek_feed_forward,
    experts,
    gated_delta_rule,
    latent_attention,
    mlp,
)
from marconi.model.huggingface.config import Config

_LINEAR = "linear_attention"


def qwen(config: Config) -> Iterator[Layer]:
    """Qwen3-Next and Qwen3.5: full attention has an output gate; experts where the configuration has any."""
    for index, kind in enumerate(_qwen_layer_types(config)):
        if kind == _LINEAR:
            yield gated_delta_rule(config)
        elif kind in FULL:
            yield attention(config, gated=config.flag("attn_output_gate", default=True))
        else:
            raise config.unexpected("layer_types", kind, (_LINEAR, *FULL))
        yield _qwen_feed_forward(config, index)


def _qwen_layer_types(config: Config) -> list[str]:
    if config.has("layer_types"):
        return config.per_layer("layer_types")
    interval = config.positive("full_attention_interval")
    return [_LINEAR if (index + 1) % interval else FULL[0] for index in range(config.positive("num_hidden_layers"))]


def _qwen_feed_forward(config: Config, index: int) -> Layer:
    is_sparse = (index + 1) % config.positive("decoder_sparse_step", default=1) == 0
    is_listed_dense = index in config.indices("mlp_only_layers", default=[])
    if not config.integer("num_experts", default=0) or not is_sparse or is_listed_dense:
        return mlp(config)
    return experts(
        config,
        "num_experts",
        width=config.positive("moe_intermediate_size"),
        shared_width=config.integer("shared_expert_intermediate_size", default=0),
    )


def gigachat(config: Config) -> Iterator[Layer]:
    """GigaChat 3.5: Gated DeltaNet and latent attention, experts as in DeepSeek-V3."""
    num_layers = config.positive("num_hidden_layers")
    if config.has("layer_types"):
        kinds = config.per_layer("layer_types")
        full = {index for index, kind in enumerate(kinds) if kind != _LINEAR}
    else:
        full = config.indices("full_attention_layers")
    for index in range(num_layers):
        is_gated = config.flag("gated_attention", default=True)
        yield latent_attention(config, gated=is_gated) if index in full else gated_delta_rule(config)
        yield deepseek_feed_forward(config, index)


def jet_nemotron(config: Config) -> Iterator[Layer]:
    """Jet-Nemotron: JetBlocks, full attention and sliding windows.

    A JetBlock is counted as the gated delta rule with a static convolution; the generator of its dynamic one, some
    percent of the layer, is left out. SGLang keeps windows for queries, keys and values.
    """
    kinds = config.per_layer("layer_types")
    for kind in kinds:
        if kind == "jet":
            jet = config.part("efficient_attention_config").part("jet")
            head_dim = jet.positive("head_dim")
            yield recurrent.gated_delta_rule(
                hidden_size=config.positive("hidden_size"),
                num_key_heads=jet.positive("num_heads"),
                key_head_dim=head_dim,
                num_value_heads=jet.positive("num_heads"),
                value_head_dim=int(head_dim * jet.number("expand_v", default=1.0)),
                conv_kernel=jet.positive("conv_size"),
            )
        elif kind == "swa":
            swa = config.part("efficient_attention_config").part("swa")
            yield SlidingWindowAttention(attention(config), swa.positive("window_size"))
        elif kind == "attn":
            yield attention(config)
        else:
            raise config.unexpected("layer_types", kind, ("jet", "swa", "attn"))
        yield mlp(config)


def kimi_linear(config: Config) -> Iterator[Layer]:
    """Kimi Linear and Kimi K3: `kda_layers` counts from 1."""
    yield from _kda(config, {index - 1 for index in config.part("linear_attn_config").indices("kda_layers")})


def glm5_next(config: Config) -> Iterator[Layer]:
    """GLM-5-Next: `kda_layers`, or `layer_types`, counts from 0.

    The indexer that picks the keys of sparse attention is not modelled: attention counts as full.
    """
    if config.has("linear_attn_config"):
        yield from _kda(config, config.part("linear_attn_config").indices("kda_layers"))
        return
    kinds = config.per_layer("layer_types")
    yield from _kda(config, {index for index, kind in enumerate(kinds) if kind == _LINEAR})


def _kda(config: Config, kda_layers: set[int]) -> Iterator[Layer]:
    own = config.part("linear_attn_config") if config.has("linear_attn_config") else config
    for index in range(config.positive("num_hidden_layers")):
        if index in kda_layers:
            yield recurrent.kimi_delta_attention(
                hidden_size=config.positive("hidden_size"),
                num_heads=own.positive("num_heads", "linear_num_heads"),
                head_dim=own.positive("head_dim", "linear_head_dim"),
                conv_kernel=own.positive("short_conv_kernel_size", "linear_conv_kernel_dim"),
                has_full_rank_gate=own.flag("use_full_rank_gate", default=False),
            )
        elif config.has("kv_lora_rank"):
            yield latent_attention(config, gated=config.flag("mla_use_output_gate", default=False))
        else:
            yield attention(config)
        yield deepseek_feed_forward(config, index)
