"""Layers that many families spell alike."""

from marconi.model import recurrent
from marconi.model.attention import Attention
from marconi.model.base import Layer
from marconi.model.feed_forward import MixtureOfExperts, Mlp
from marconi.model.huggingface.config import Config
from marconi.model.mla import LatentAttention

FULL: tuple[str, ...] = ("full_attention", "attention")
"""Names of full attention among the entries of `layer_types`."""


def attention(config: Config, *, gated: bool = False) -> Attention:
    """Grouped-query attention; with `gated`, an output gate as wide as the queries."""
    hidden_size = config.positive("hidden_size")
    num_heads = config.positive("num_attention_heads")
    head_dim = config.positive("head_dim", "attention_head_dim", default=hidden_size // num_heads)
    return Attention(
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=config.positive("num_key_value_heads", default=num_heads),
        head_dim=head_dim,
        v_head_dim=head_dim,
        gate_channels=num_heads * head_dim if gated else 0,
    )


def latent_attention(config: Config, *, gated: bool = False) -> LatentAttention:
    """Multi-head latent attention; with `gated`, an output gate as wide as the values."""
    num_heads = config.positive("num_attention_heads")
    v_head_dim = config.positive("v_head_dim")
    return LatentAttention(
        hidden_size=config.positive("hidden_size"),
        num_heads=num_heads,
        q_lora_rank=config.integer("q_lora_rank", default=0),
        kv_lora_rank=config.positive("kv_lora_rank"),
        qk_nope_head_dim=config.positive("qk_nope_head_dim"),
        qk_rope_head_dim=config.integer("qk_rope_head_dim"),
        v_head_dim=v_head_dim,
        gate_channels=num_heads * v_head_dim if gated else 0,
    )


def mlp(config: Config) -> Mlp:
    """A gated feed-forward layer."""
    return Mlp(config.positive("hidden_size"), config.positive("intermediate_size"))


def experts(config: Config, *count: str, width: int, shared_width: int = 0) -> MixtureOfExperts:
    """Gated experts. `count` names the fields that may hold the number of routed ones; the first present is read."""
    return MixtureOfExperts(
        hidden_size=config.positive("hidden_size"),
        num_experts=config.positive(*count),
        num_active_experts=config.positive("num_experts_per_tok"),
        expert_intermediate_size=width,
        shared_intermediate_size=shared_width,
    )


def gated_delta_rule(config: Config) -> Layer:
    """Gated DeltaNet as Qwen3-Next spells it."""
    return recurrent.gated_delta_rule(
        hidden_size=config.positive("hidden_size"),
        num_key_heads=config.positive("linear_num_key_heads"),
        key_head_dim=config.positive("linear_key_head_dim"),
        num_value_heads=config.positive("linear_num_value_heads"),
        value_head_dim=config.positive("linear_value_head_dim"),
        conv_kernel=config.positive("linear_conv_kernel_dim"),
    )


def deepseek_feed_forward(config: Config, layer_index: int) -> Layer:
    """Dense for the first `first_k_dense_replace` layers, experts beyond; shared ones as wide as routed ones."""
    first_sparse = config.integer("first_k_dense_replace", default=0)
    is_sparse = layer_index >= first_sparse and layer_index % config.positive("moe_layer_freq", default=1) == 0
    if not is_sparse or not (config.has("num_experts") or config.has("n_routed_experts")):
        return mlp(config)
    width = config.positive("moe_intermediate_size")
    num_shared = config.integer("num_shared_experts", "n_shared_experts", default=0)
    return MixtureOfExperts(
        hidden_size=config.positive("hidden_size"),
        num_experts=config.positive("num_experts", "n_routed_experts"),
        num_active_experts=config.positive("num_experts_per_tok", "num_experts_per_token"),
        expert_intermediate_size=width,
        shared_intermediate_size=num_shared * config.positive("moe_shared_expert_intermediate_size", default=width),
        latent_size=config.integer("routed_expert_hidden_size", default=0),
    )
