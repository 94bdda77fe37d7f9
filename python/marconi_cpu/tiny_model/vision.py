"""A vision tower before the language model of the `gdn` family, in the shape of Qwen3.5: two blocks over 16x16 patches.

The language model has the parameters that it has by itself, so a prompt without images has the same answers. Four
tokens join the end of its vocabulary; one of them stands in a prompt for each 2x2 patches of an image, whose embeddings
are as large as those of text and as constant in the channel that `gdn.py` keeps constant.

Upstream: transformers `models/qwen3_5` and `models/qwen3_vl`, SGLang `models/qwen3_5.py` and
`multimodal/processors/qwen_vl.py`.
"""

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from marconi_cpu.tiny_model import gdn, tokenizer
from marconi_cpu.tiny_model.weights import Architecture, Parameter, Values, constant, projection

TOKENS: Final = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_START, _END, _IMAGE, _ = TOKENS
VOCAB_SIZE: Final = tokenizer.VOCAB_SIZE + len(TOKENS)
_PATCH, _MERGE, _FRAMES = 16, 2, 2
_TOWER: Final[dict[str, Any]] = {
    "model_type": "qwen3_5_vision",
    "depth": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_heads": 2,
    "hidden_act": "gelu_pytorch_tanh",
    "in_channels": 3,
    "patch_size": _PATCH,
    "spatial_merge_size": _MERGE,
    "temporal_patch_size": _FRAMES,
    "out_hidden_size": gdn.CONFIG["hidden_size"],
    "num_position_embeddings": 256,
    "deepstack_visual_indexes": [],
}
# Sections of time, height and width: pairs of the rotated channels, which are a quarter of a head's.
_ROPE: Final = {**gdn.CONFIG["rope_parameters"], "mrope_section": [4, 2, 2], "mrope_interleaved": True}
_PIXELS: Final = {
    "processor_class": "Qwen3VLProcessor",
    "patch_size": _PATCH,
    "temporal_patch_size": _FRAMES,
    "merge_size": _MERGE,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "size": {"shortest_edge": (_PATCH * _MERGE) ** 2, "longest_edge": 1 << 18},
}
CHAT_TEMPLATE: Final = tokenizer.CHAT_TEMPLATE.replace(
    "{{ message['content'] or '' }}",
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] or [] %}"
    f"{{% if part['type'] == 'image' %}}{_START}{_IMAGE}{_END}{{% else %}}{{{{ part['text'] }}}}{{% endif %}}"
    "{% endfor %}{% endif %}",
)


def config(text: Mapping[str, Any]) -> dict[str, Any]:
    """The `config.json` of the model around the language model whose own is `text`."""
    ids = {f"{name}_token_id": tokenizer.VOCAB_SIZE + TOKENS.index(token) for name, token in _NAMED.items()}
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": {**text, "vocab_size": VOCAB_SIZE, "rope_parameters": _ROPE},
        "vision_config": _TOWER,
        "tie_word_embeddings": False,
        "dtype": text["dtype"],
        **tokenizer.token_ids(),
        **ids,
    }


def processor_configs() -> dict[str, dict[str, Any]]:
    """The files that say how images and videos become patches, by their names."""
    return {
        "preprocessor_config.json": {**_PIXELS, "image_processor_type": "Qwen2VLImageProcessor"},
        "video_preprocessor_config.json": {**_PIXELS, "video_processor_type": "Qwen3VLVideoProcessor"},
    }


_NAMED: Final = dict(zip(("vision_start", "vision_end", "image", "video"), TOKENS, strict=True))


def _into_embedding(parameter: Parameter) -> Values:
    weight = projection(2.0)(parameter)
    weight[gdn.CONSTANT_CHANNEL] = 0.0
    return weight


def _embedding_shift(parameter: Parameter) -> Values:
    shift = np.zeros(parameter.shape, np.float32)
    shift[gdn.CONSTANT_CHANNEL] = 1.0
    return shift


ARCHITECTURE: Final = Architecture(
    config=gdn.CONFIG,
    mtp=None,
    rules=(
        ("merger.linear_fc2.weight", _into_embedding),
        ("merger.linear_fc2.bias", _embedding_shift),
        (".bias", constant(0.0)),
        ("merger.norm.weight", constant(1.0)),
        ("norm1.weight", constant(1.0)),
        ("norm2.weight", constant(1.0)),
        ("pos_embed.weight", projection(1.0)),
        ("patch_embed.proj.weight", lambda parameter: parameter.uniform(1.0 / 16)),
        ("attn.qkv.weight", projection(1.0)),
        ("attn.proj.weight", projection(1.0)),
        ("linear_fc1.weight", projection(1.0)),
        ("linear_fc2.weight", projection(1.0)),
        *gdn.ARCHITECTURE.rules,
    ),
)
