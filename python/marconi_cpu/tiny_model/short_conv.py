"""The `short-conv` family: two short convolutions and two layers of attention, in the shape of LFM2.

A layer's state is the inputs of the last two tokens, so a wrong one changes what the next two tokens see, and the keys
and values of all layers above them, which later tokens read. Attention is sharp enough for those to matter, and a
convolution is large enough beside the residual stream.

Upstream: transformers `models/lfm2`, SGLang `models/lfm2.py` and `configs/lfm2.py`.
"""

import math
from typing import Any, Final

from marconi_cpu.tiny_model.weights import Architecture, constant, projection, vocabulary_head

CONFIG: Final[dict[str, Any]] = {
    "architectures": ["Lfm2ForCausalLM"],
    "model_type": "lfm2",
    "hidden_size": 128,
    "intermediate_size": 256,
    "block_auto_adjust_ff_dim": False,
    "num_hidden_layers": 4,
    "layer_types": ["conv", "full_attention", "conv", "full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "conv_L_cache": 3,
    "conv_bias": False,
    "norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
}

ARCHITECTURE: Final = Architecture(
    config=CONFIG,
    mtp=None,
    rules=(
        ("embed_tokens.weight", projection(math.sqrt(CONFIG["hidden_size"]))),
        ("lm_head.weight", vocabulary_head(1.0)),
        # Those of queries and keys sharpen attention.
        ("layernorm.weight", constant(2.0)),
        ("norm.weight", constant(1.0)),
        ("conv.conv.weight", projection(1.0)),
        ("conv.in_proj.weight", projection(1.0)),
        ("conv.out_proj.weight", projection(2.0)),
        ("self_attn.out_proj.weight", projection(4.0)),
        ("q_proj.weight", projection(1.0)),
        ("k_proj.weight", projection(1.0)),
        ("v_proj.weight", projection(1.0)),
        ("w1.weight", projection(1.0)),
        ("w2.weight", projection(0.5)),
        ("w3.weight", projection(1.0)),
    ),
)
