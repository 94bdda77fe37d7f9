"""The `windows` family: attention alternately in a window of 64 tokens and in all, in the shape of Inkling.

Every layer has four short convolutions, of keys, values and what attention and the MLP give, so a state is the inputs
of the last three tokens of each. Attention knows positions by a bias for distances alone. Its scale is 1 / head_dim, so
norms that multiply by 4 sharpen it, and a lost window, or lost keys and values in one, move the logits by far more than
rounding does.

The checkpoint has the published names. Upstream: SGLang `models/inkling.py` and `configs/inkling.py`, transformers
`models/inkling`.
"""

from collections.abc import Mapping
from typing import Any, Final

from marconi_cpu.tiny_model.weights import Architecture, constant, projection, vocabulary_head

WINDOW: Final = 64
CONFIG: Final[dict[str, Any]] = {
    "architectures": ["InklingForConditionalGeneration"],
    "model_type": "inkling_mm_model",
    "hidden_size": 128,
    "intermediate_size": 256,
    "dense_intermediate_size": 256,
    "num_hidden_layers": 4,
    "local_layer_ids": [0, 2],
    "sliding_window_size": WINDOW,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
    "swa_head_dim": 32,
    "d_rel": 8,
    "rel_extent": 256,
    "use_embed_norm": True,
    "use_sconv": True,
    "sconv_kernel_size": 4,
    # Layers before this one have an MLP, those behind it experts.
    "dense_mlp_idx": 4,
    "use_global_scale": True,
    "logits_mup_width_multiplier": 1.0,
    "rms_norm_eps": 1e-6,
}
_OF_ROOT: Final = ("architectures", "model_type")


def wrapped(text: Mapping[str, Any]) -> dict[str, Any]:
    """The `config.json` of the model around the language model whose own is `text`: it takes text alone."""
    shared = ("dtype", "tie_word_embeddings", "pad_token_id", "bos_token_id", "eos_token_id")
    own = {name: value for name, value in text.items() if name not in _OF_ROOT}
    return {**{name: text[name] for name in (*_OF_ROOT, *shared)}, "text_config": own}


def shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The parameters of the model that the root's `config` describes, by their names in a published checkpoint."""
    text = config["text_config"]
    width, inner, vocabulary = (text[name] for name in ("hidden_size", "dense_intermediate_size", "vocab_size"))
    found: dict[str, tuple[int, ...]] = {
        "embed.weight": (vocabulary, width),
        "embed_norm.weight": (width,),
        "norm.weight": (width,),
        "unembed.weight": (vocabulary, width),
    }
    for layer in range(text["num_hidden_layers"]):
        is_local = layer in text["local_layer_ids"]
        kind = "swa_" if is_local else ""
        heads, kv_heads, size = (
            text[kind + name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim")
        )
        extent, taps = text["sliding_window_size" if is_local else "rel_extent"], text["sconv_kernel_size"]
        found |= {
            f"layers.{layer}.{name}": shape
            for name, shape in {
                "attn_norm.weight": (width,),
                "attn.wq_du.weight": (heads * size, width),
                "attn.wk_dv.weight": (kv_heads * size, width),
                "attn.wv_dv.weight": (kv_heads * size, width),
                "attn.wr_du.weight": (heads * text["d_rel"], width),
                "attn.wo_ud.weight": (width, heads * size),
                "attn.k_sconv.weight": (kv_heads * size, 1, taps),
                "attn.v_sconv.weight": (kv_heads * size, 1, taps),
                "attn.q_norm.weight": (size,),
                "attn.k_norm.weight": (size,),
                "attn.rel_logits_proj.proj": (text["d_rel"], extent),
                "attn_sconv.weight": (width, 1, taps),
                "mlp_norm.weight": (width,),
                "mlp.w13_dn.weight": (2 * inner, width),
                "mlp.w2_md.weight": (width, inner),
                "mlp.global_scale": (1,),
                "mlp_sconv.weight": (width, 1, taps),
            }.items()
        }
    return {f"model.llm.{name}": shape for name, shape in found.items()}


ARCHITECTURE: Final = Architecture(
    config=CONFIG,
    mtp=None,
    shapes=shapes,
    rules=(
        ("unembed.weight", vocabulary_head(1.0)),
        ("embed.weight", lambda parameter: parameter.uniform(1.0)),
        # Those of queries and keys sharpen attention.
        ("q_norm.weight", constant(4.0)),
        ("k_norm.weight", constant(4.0)),
        ("norm.weight", constant(1.0)),
        ("global_scale", constant(1.0)),
        ("sconv.weight", projection(1.0)),
        # The products of d_rel channels.
        ("rel_logits_proj.proj", lambda parameter: parameter.uniform(0.35)),
        ("wq_du.weight", projection(1.0)),
        ("wk_dv.weight", projection(1.0)),
        ("wv_dv.weight", projection(1.0)),
        ("wr_du.weight", projection(1.0)),
        ("wo_ud.weight", projection(2.0)),
        ("w13_dn.weight", projection(1.0)),
        ("w2_md.weight", projection(0.5)),
    ),
)
