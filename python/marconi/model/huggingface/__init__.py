"""A model's profile from its Hugging Face `config.json`.

`model_type` picks a family; a family is a generator of layers in the order in which the model runs them. Dtypes are
SGLang 0.5.23's: KV in the model's own, convolution windows in bfloat16, recurrent states in `mamba_ssm_dtype` where
SGLang reads that field for the family, else in float32 (`configs/mamba_utils.py:mamba2_state_dtype`).
"""

from collections.abc import Callable, Iterable
from types import MappingProxyType
from typing import Final

from marconi.model.base import Layer, Precision, Storage
from marconi.model.huggingface import convolution, delta, linear, mamba
from marconi.model.huggingface.config import Config, from_mapping, read
from marconi.model.huggingface.transformer import transformer
from marconi.model.profile import ModelProfile, profile_of
from marconi.model.serving import BY_TYPE, SERVED

__all__ = ["FAMILIES", "Config", "from_mapping", "profile", "read"]

_Family = Callable[[Config], Iterable[Layer]]

_READS_STATE_DTYPE: Final = MappingProxyType(
    {
        "qwen3_next": delta.qwen,
        "qwen3_5": delta.qwen,
        "qwen3_5_text": delta.qwen,
        "qwen3_5_moe": delta.qwen,
        "qwen3_5_moe_text": delta.qwen,
        "intern_s2_preview": delta.qwen,
        "interns2_mobius_text": delta.qwen,
        "gigachat3_5": delta.gigachat,
        "jet_nemotron": delta.jet_nemotron,
        "jet_vlm": delta.jet_nemotron,
        "nemotron_h": mamba.nemotron_h,
        "nemotronh_nano_vl_v2": mamba.nemotron_h,
        "falcon_h1": mamba.falcon_h1,
    }
)
_FIXED_STATE_DTYPE: Final = MappingProxyType(
    {
        "kimi_linear": delta.kimi_linear,
        "kimi_k3": delta.kimi_linear,
        "glm5_next": delta.glm5_next,
        "glm5_next_text": delta.glm5_next,
        "granitemoehybrid": mamba.granite,
        "jamba": mamba.jamba,
        "mamba": mamba.mamba1,
        "falcon_mamba": mamba.mamba1,
        "mamba2": mamba.mamba2,
        "bailing_hybrid": linear.bailing,
        "bailing_moe_linear": linear.bailing,
        "bailing_moe_v3_vl": linear.bailing,
        "minicpm_sala": linear.minicpm_sala,
        "minimax": linear.minimax,
        "minimax_text_01": linear.minimax,
        "rwkv7": linear.rwkv7,
        "lfm2": convolution.lfm2,
        "lfm2_moe": convolution.lfm2,
        "lfm2_vl": convolution.lfm2,
        "inkling_model": convolution.inkling,
        "inkling_mm_model": convolution.inkling,
        "zaya": convolution.zaya,
        "llama": transformer,
        "mistral": transformer,
        "mixtral": transformer,
        "qwen2": transformer,
        "qwen3": transformer,
        "qwen3_moe": transformer,
        "gemma3_text": transformer,
        "gpt_oss": transformer,
    }
)
FAMILIES: Final = MappingProxyType(dict(sorted({**_READS_STATE_DTYPE, **_FIXED_STATE_DTYPE}.items())))
"""Generators of layers, by `model_type`."""


def profile(config: Config, name: str, *, precision: Precision | None = None, tensor_parallel: int = 1) -> ModelProfile:
    """The profile of the model that `config` describes.

    `ValueError` for an unknown `model_type` (with the known ones), a field that is missing or not of its type, and a
    number of heads that the workers cannot share.
    """
    model_type = config.text("model_type").lower()
    family: _Family | None = FAMILIES.get(model_type)
    if family is None:
        raise ValueError(f"{config.source}: model_type must be one of {', '.join(FAMILIES)}, got {model_type!r}")
    storage = _own_storage(config, model_type).over(precision, tensor_parallel)
    num_head = config.integer("vocab_size", default=0) * config.positive("hidden_size")
    return profile_of(
        name,
        tuple(family(config)),
        storage,
        num_embedding_parameters=0 if config.flag("tie_word_embeddings", default=False) else num_head,
        num_head_parameters=num_head,
        serving=BY_TYPE.get(model_type, SERVED),
    )


def _own_storage(config: Config, model_type: str) -> Storage:
    dtype = config.text("dtype", "torch_dtype", default="bfloat16")
    state_dtype = "float32"
    if model_type in _READS_STATE_DTYPE:
        state_dtype = config.text("mamba_ssm_dtype", default=state_dtype)
    return Storage(kv_dtype=dtype, state_dtype=state_dtype, weight_dtype=dtype)
