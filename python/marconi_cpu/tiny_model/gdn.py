"""The `gdn` family: two layers of the gated delta rule and one of full attention, in the shape of Qwen3.5.

The state of a head forgets in two ways, and both are slow here. A token decays all of it by exp(-A * softplus(a)), and
replaces a share beta = sigmoid(b) of what it holds for the token's key; for keys that point anywhere, that costs
any one memory about beta / key_dim. Beta is 0.5 on average where b has mean 0, and the architecture has no bias
that could shift b. Therefore channel 0 of the residual stream is a constant: the embedding sets it, no layer writes
to it, and b reads it.

Sizes are ones that GPU kernels exist for; some exist for the recurrent heads of large models alone, which have
`WIDE_HEAD_DIM`. Upstream: transformers `models/qwen3_5`, SGLang `models/qwen3_5_text.py`.
"""

import math
from typing import Any, Final

import numpy as np

from marconi_cpu.tiny_model.weights import (
    Architecture,
    MtpHead,
    Parameter,
    Rule,
    Values,
    constant,
    log_decay_rates,
    passed_on,
    projection,
    short_convolution,
    vocabulary_head,
)

HEAD_DIM: Final = 64
WIDE_HEAD_DIM: Final = 128
CONSTANT_CHANNEL: Final = 0
_WRITE_SHIFT = -3.0
_HALF_LIVES = (4096.0, 256.0)


def recurrent_heads(head_dim: int) -> dict[str, int]:
    """Entries of `config.json` for recurrent heads whose keys and values have `head_dim` channels."""
    return {"linear_key_head_dim": head_dim, "linear_value_head_dim": head_dim}


CONFIG: Final[dict[str, Any]] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    # SGLang derives the kinds of the layers from the interval, transformers too if they are not listed.
    "full_attention_interval": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    **recurrent_heads(HEAD_DIM),
    "linear_conv_kernel_dim": 4,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.25},
}


def _embedding(parameter: Parameter) -> Values:
    weight = parameter.uniform(1.0)
    weight[:, CONSTANT_CHANNEL] = 1.0
    return weight


def _write_strength(parameter: Parameter) -> Values:
    weight = projection(0.5)(parameter)
    weight[:, CONSTANT_CHANNEL] = _WRITE_SHIFT
    return weight


def _into_residual(gain: float) -> Rule:
    def rule(parameter: Parameter) -> Values:
        weight = projection(gain)(parameter)
        weight[CONSTANT_CHANNEL] = 0.0
        return weight

    return rule


def _decay(parameter: Parameter) -> Values:
    (num_heads,) = parameter.shape
    mean_step = math.log(2.0)  # softplus(0)
    return np.array(log_decay_rates(num_heads, _HALF_LIVES, mean_step), np.float32)


_WIDTH: Final = CONFIG["hidden_size"]
ARCHITECTURE: Final = Architecture(
    config=CONFIG,
    mtp=MtpHead(
        config={"mtp_num_hidden_layers": 1},
        layer="model.layers.2.",
        parameters={
            "mtp.fc.weight": (_WIDTH, 2 * _WIDTH),
            "mtp.norm.weight": (_WIDTH,),
            "mtp.pre_fc_norm_embedding.weight": (_WIDTH,),
            "mtp.pre_fc_norm_hidden.weight": (_WIDTH,),
        },
        embedding="model.embed_tokens.weight",
        succession=0.8,
    ),
    rules=(
        ("mtp.fc.weight", passed_on),
        ("mtp.layers.0.self_attn.o_proj.weight", projection(0.1)),
        ("mtp.layers.0.mlp.down_proj.weight", projection(0.1)),
        ("pre_fc_norm_embedding.weight", constant(0.0)),
        ("pre_fc_norm_hidden.weight", constant(0.0)),
        ("embed_tokens.weight", _embedding),
        ("lm_head.weight", vocabulary_head(1.0)),
        ("linear_attn.norm.weight", constant(1.0)),
        # The other norms multiply by 1 + weight. Those of queries and keys sharpen attention.
        ("q_norm.weight", constant(0.5)),
        ("k_norm.weight", constant(0.5)),
        ("norm.weight", constant(0.0)),
        ("A_log", _decay),
        ("dt_bias", constant(0.0)),
        ("in_proj_a.weight", projection(0.25)),
        ("in_proj_b.weight", _write_strength),
        ("conv1d.weight", short_convolution()),
        ("out_proj.weight", _into_residual(2.0)),
        ("o_proj.weight", _into_residual(2.0)),
        ("down_proj.weight", _into_residual(1.0)),
        ("in_proj_qkv.weight", projection(1.0)),
        ("in_proj_z.weight", projection(1.0)),
        ("q_proj.weight", projection(1.0)),
        ("k_proj.weight", projection(1.0)),
        ("v_proj.weight", projection(1.0)),
        ("gate_proj.weight", projection(1.0)),
        ("up_proj.weight", projection(1.0)),
    ),
)
