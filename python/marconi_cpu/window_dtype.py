"""The dtype of Inkling's windows: the model's, as every other family's on this platform.

SGLang keeps them in bfloat16 whatever the model computes in, so a float32 model would continue from rounded inputs
where it resumes, and decode other logits than a prefill of the same tokens has. Source: `srt/configs/inkling.py`.
"""

from dataclasses import replace
from typing import Any

import torch


def register() -> None:
    """Let the windows have the dtype that `SGLANG_MAMBA_CONV_DTYPE` names, which the platform sets by the model."""
    from sglang.srt.configs.inkling import InklingModelConfig

    described = InklingModelConfig.mamba2_cache_params.fget
    InklingModelConfig.mamba2_cache_params = property(lambda config: in_dtype_of_model(described(config)))


def in_dtype_of_model(params: Any) -> Any:
    """Give `InklingConvCacheParams` of the same shapes, unchanged where no dtype was chosen."""
    from sglang.srt.environ import envs

    if not envs.SGLANG_MAMBA_CONV_DTYPE.is_set():
        return params
    dtype = getattr(torch, envs.SGLANG_MAMBA_CONV_DTYPE.get())
    return replace(params, dtype=replace(params.dtype, conv=dtype))
