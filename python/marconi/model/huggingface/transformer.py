"""Plain transformers, for comparison: Llama, Mistral, Qwen2, Qwen3, Gemma 3, GPT-OSS and their experts.

A layer has a sliding window where `layer_types` says so, or where the configuration has a `sliding_window` and no
list, as Mistral 7B has.
"""

from collections.abc import Iterator

from marconi.model.attention import SlidingWindowAttention
from marconi.model.base import Layer
from marconi.model.huggingface.blocks import FULL, attention, experts, mlp
from marconi.model.huggingface.config import Config

_SLIDING = "sliding_attention"


def transformer(config: Config) -> Iterator[Layer]:
    """Attention and a feed-forward layer, dense or sparse."""
    full = attention(config)
    for kind in _layer_types(config):
        if kind == _SLIDING:
            yield SlidingWindowAttention(full, config.positive("sliding_window"))
        elif kind in FULL:
            yield full
        else:
            raise config.unexpected("layer_types", kind, (_SLIDING, *FULL))
        if config.has("num_local_experts") or config.has("num_experts"):
            width = config.positive("moe_intermediate_size", "intermediate_size")
            yield experts(config, "num_local_experts", "num_experts", width=width)
        else:
            yield mlp(config)


def _layer_types(config: Config) -> list[str]:
    if config.has("layer_types"):
        return config.per_layer("layer_types")
    is_sliding = config.has("sliding_window") and config.flag("use_sliding_window", default=True)
    return [_SLIDING if is_sliding else FULL[0]] * config.positive("num_hidden_layers")
