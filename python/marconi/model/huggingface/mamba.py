"""Families of Mamba and Mamba-2: Nemotron-H, Falcon-H1, Granite 4, Jamba, Mamba, Falcon-Mamba, Mamba-2.

Upstream: SGLang `configs/{nemotron_h,falcon_h1,granitemoehybrid,mamba,mamba2}.py`, transformers `models/jamba`, which
SGLang does not serve.
"""

from collections.abc import Iterator

from marconi.model import recurrent
from marconi.model.base import Layer
from marconi.model.feed_forward import UNGATED, MixtureOfExperts, Mlp
from marconi.model.huggingface.blocks import FULL, attention, experts, mlp
from marconi.model.huggingface.config import Config

_NEMOTRON_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}


def nemotron_h(config: Config) -> Iterator[Layer]:
    """Nemotron-H: one mixer or one feed-forward layer (squared ReLU, no gate) a layer."""
    hidden_size = config.positive("hidden_size")
    for kind in _nemotron_layers(config):
        if kind in ("mamba", "linear_attention"):
            yield recurrent.mamba2(
                hidden_size=hidden_size,
                num_heads=config.positive("mamba_num_heads"),
                head_dim=config.positive("mamba_head_dim"),
                num_groups=config.positive("n_groups", "mamba_n_groups"),
                state_size=config.positive("ssm_state_size"),
                conv_kernel=config.positive("conv_kernel", "mamba_d_conv"),
            )
        elif kind in FULL:
            yield attention(config)
        elif kind == "mlp":
            yield Mlp(hidden_size, config.positive("intermediate_size"), UNGATED)
        elif kind == "moe":
            shared_size = config.integer("moe_shared_expert_intermediate_size", default=0)
            yield MixtureOfExperts(
                hidden_size=hidden_size,
                num_experts=config.positive("n_routed_experts"),
                num_active_experts=config.positive("num_experts_per_tok"),
                expert_intermediate_size=config.positive("moe_intermediate_size"),
                shared_intermediate_size=config.integer("n_shared_experts", default=1) * shared_size,
                num_matrices=UNGATED,
                latent_size=config.integer("moe_latent_size", default=0),
            )
        else:
            raise config.unexpected("layers_block_type", kind, tuple(_NEMOTRON_LETTERS.values()))


def _nemotron_layers(config: Config) -> list[str]:
    if config.has("layers_block_type"):
        return config.sequence("layers_block_type")
    if config.has("layer_types"):
        return config.sequence("layer_types")
    pattern = config.text("hybrid_override_pattern")
    config.require_known("hybrid_override_pattern", list(pattern), tuple(_NEMOTRON_LETTERS))
    return [_NEMOTRON_LETTERS[letter] for letter in pattern]


def _mamba2(config: Config, inner_size: int) -> Layer:
    num_heads = config.positive("mamba_n_heads")
    return recurrent.mamba2(
        hidden_size=config.positive("hidden_size"),
        num_heads=num_heads,
        head_dim=inner_size // num_heads,
        num_groups=config.positive("mamba_n_groups"),
        state_size=config.positive("mamba_d_state"),
        conv_kernel=config.positive("mamba_d_conv"),
    )


def falcon_h1(config: Config) -> Iterator[Layer]:
    """Falcon-H1: every layer has attention and Mamba-2 side by side, then a feed-forward layer."""
    if config.has("mamba_d_ssm"):
        inner_size = config.positive("mamba_d_ssm")
    else:
        inner_size = config.positive("mamba_expand") * config.positive("hidden_size")
    for _ in range(config.positive("num_hidden_layers")):
        yield attention(config)
        yield _mamba2(config, inner_size)
        yield mlp(config)


def granite(config: Config) -> Iterator[Layer]:
    """Granite 4: a mixer and a feed-forward layer, whose shared part is all there is without experts."""
    hidden_size = config.positive("hidden_size")
    shared_size = config.positive("shared_intermediate_size")
    for kind in config.per_layer("layer_types", "layers_block_type"):
        if kind in ("mamba", "linear_attention"):
            yield _mamba2(config, config.positive("mamba_expand", default=2) * hidden_size)
        elif kind in FULL:
            yield attention(config)
        else:
            raise config.unexpected("layer_types", kind, ("mamba", *FULL))
        if config.integer("num_local_experts", default=0):
            width = config.positive("intermediate_size")
            yield experts(config, "num_local_experts", width=width, shared_width=shared_size)
        else:
            yield Mlp(hidden_size, shared_size)


def jamba(config: Config) -> Iterator[Layer]:
    """Jamba: Mamba, attention every `attn_layer_period` layers, experts every `expert_layer_period`."""
    for index in range(config.positive("num_hidden_layers")):
        if index % config.positive("attn_layer_period") == config.integer("attn_layer_offset"):
            yield attention(config)
        else:
            yield _mamba1(config, "mamba_")
        has_experts = index % config.positive("expert_layer_period") == config.integer("expert_layer_offset")
        if has_experts and config.positive("num_experts") > 1:
            yield experts(config, "num_experts", width=config.positive("intermediate_size"))
        else:
            yield mlp(config)


def _mamba1(config: Config, prefix: str) -> Layer:
    hidden_size = config.positive("hidden_size")
    rank = config.fields.get(f"{prefix}dt_rank", config.fields.get("time_step_rank", "auto"))
    inner_size = config.positive("expand", f"{prefix}expand", default=2) * hidden_size
    if not prefix:
        inner_size = config.positive("intermediate_size", default=inner_size)
    return recurrent.mamba1(
        hidden_size=hidden_size,
        inner_size=inner_size,
        state_size=config.positive("state_size", f"{prefix}d_state"),
        step_rank=rank if isinstance(rank, int) else -(-hidden_size // 16),
        conv_kernel=config.positive("conv_kernel", f"{prefix}d_conv"),
    )


def mamba1(config: Config) -> Iterator[Layer]:
    """Mamba and Falcon-Mamba: nothing but Mamba layers."""
    for _ in range(config.positive("num_hidden_layers")):
        yield _mamba1(config, "")


def mamba2(config: Config) -> Iterator[Layer]:
    """Mamba-2: nothing but Mamba-2 layers."""
    for _ in range(config.positive("num_hidden_layers")):
        yield recurrent.mamba2(
            hidden_size=config.positive("hidden_size"),
            num_heads=config.positive("num_heads"),
            head_dim=config.positive("head_dim"),
            num_groups=config.positive("n_groups"),
            state_size=config.positive("state_size"),
            conv_kernel=config.positive("conv_kernel"),
        )
