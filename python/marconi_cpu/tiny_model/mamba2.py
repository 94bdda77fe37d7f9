"""The `mamba2` family: two Mamba2 layers, one of attention and an MLP, in the shape of Nemotron-H.

A token decays a head's state by exp(-A * dt), dt = softplus(raw + dt_bias). In prefill transformers does not let dt
fall below `time_step_min` (0.001); SGLang, and transformers itself in decoding, do. All heads have a dt around
0.05 that the input moves little, far from that bound, and differ in A.

Upstream: transformers `models/nemotron_h`, SGLang `models/nemotron_h.py` and `configs/nemotron_h.py`.
"""

import math
from typing import Any, Final

import numpy as np

from marconi_cpu.tiny_model.weights import (
    Architecture,
    MtpHead,
    Parameter,
    Values,
    constant,
    log_decay_rates,
    passed_on,
    projection,
    short_convolution,
    vocabulary_head,
)

_MEAN_STEP = 0.05
_HALF_LIVES = (4096.0, 128.0)
_NUM_HEADS = 4

CONFIG: Final[dict[str, Any]] = {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "hidden_size": 128,
    "intermediate_size": 256,
    # The one spelling of the layers that SGLang and transformers agree on: M Mamba2, - MLP, * attention.
    "hybrid_override_pattern": "MM*-",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "mamba_num_heads": _NUM_HEADS,
    "mamba_head_dim": 64,
    "ssm_state_size": 64,
    # SGLang reads this number under both names, in the layers and for the shape of the state.
    "n_groups": 2,
    "mamba_n_groups": 2,
    "conv_kernel": 4,
    "chunk_size": 64,
    "mlp_hidden_act": "relu2",
    "layer_norm_epsilon": 1e-5,
}


def _in_projection(parameter: Parameter) -> Values:
    # Its last rows make dt, one a head.
    weight = projection(1.0)(parameter)
    weight[-_NUM_HEADS:] *= np.float32(0.25)
    return weight


def _decay(parameter: Parameter) -> Values:
    (num_heads,) = parameter.shape
    return np.array(log_decay_rates(num_heads, _HALF_LIVES, _MEAN_STEP), np.float32)


def _inverse_softplus(value: float) -> float:
    return math.log(math.expm1(value))


_WIDTH: Final = CONFIG["hidden_size"]
ARCHITECTURE: Final = Architecture(
    config=CONFIG,
    mtp=MtpHead(
        config={"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*"},
        layer="model.layers.2.",
        parameters={
            "mtp.layers.0.eh_proj.weight": (_WIDTH, 2 * _WIDTH),
            "mtp.layers.0.enorm.weight": (_WIDTH,),
            "mtp.layers.0.hnorm.weight": (_WIDTH,),
            "mtp.layers.0.final_layernorm.weight": (_WIDTH,),
        },
        embedding="model.embeddings.weight",
        succession=1.5,
    ),
    rules=(
        ("eh_proj.weight", passed_on),
        ("mtp.layers.0.mixer.o_proj.weight", projection(0.1)),
        ("enorm.weight", constant(1.0)),
        ("hnorm.weight", constant(1.0)),
        ("final_layernorm.weight", constant(1.0)),
        ("embeddings.weight", projection(math.sqrt(CONFIG["hidden_size"]))),
        ("lm_head.weight", vocabulary_head(1.0)),
        ("norm.weight", constant(1.0)),
        ("norm_f.weight", constant(1.0)),
        ("A_log", _decay),
        ("dt_bias", constant(_inverse_softplus(_MEAN_STEP))),
        # The input's way past the state: a small one.
        (".D", constant(0.3)),
        ("in_proj.weight", _in_projection),
        ("conv1d.weight", short_convolution()),
        ("conv1d.bias", lambda parameter: parameter.uniform(0.05)),
        ("out_proj.weight", projection(2.0)),
        ("o_proj.weight", projection(2.0)),
        ("down_proj.weight", projection(1.0)),
        ("up_proj.weight", projection(1.0)),
        # Large queries and keys make attention sharp.
        ("q_proj.weight", projection(2.0)),
        ("k_proj.weight", projection(2.0)),
        ("v_proj.weight", projection(1.0)),
    ),
)
