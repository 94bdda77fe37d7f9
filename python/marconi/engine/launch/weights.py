"""Bytes of a model's weights, by its quantisation.

    layers x bits / 8 + (embedding + head) x 16 bits      what is converted are the matrices of layers

Bits are those of a weight and its share of the scales. A layer that a checkpoint leaves in 16 bits is counted as if it
were converted: `--weights` is exact there.
"""

from collections.abc import Mapping
from typing import Any, Final

from marconi.model import ModelProfile

_BITS: Final[Mapping[str, float]] = {
    **dict.fromkeys(("fp8", "fbgemm_fp8", "modelopt_fp8", "w8a8_fp8", "w8a8_int8"), 8.0),
    "mxfp8": 8 + 8 / 32,
    "mxfp4": 4 + 8 / 32,
    **dict.fromkeys(("modelopt_fp4", "nvfp4", "petit_nvfp4"), 4 + 8 / 16),
}
_MODELOPT: Final = {"FP8": "modelopt_fp8", "NVFP4": "modelopt_fp4", "FP4": "modelopt_fp4", "MXFP8": "mxfp8"}
_GROUPED: Final = ("awq", "awq_marlin", "gptq", "gptq_marlin", "auto-round")
_NAMED: Final = {"fp8": "fp8", "nvfp4": "modelopt_fp4", "awq": "awq", "int4": "gptq"}
"""The last word of a checkpoint's name on the hub."""


def named_quantization(model_path: str) -> Mapping[str, Any] | None:
    """The quantisation in a checkpoint's name, as its configuration would give it; None for none."""
    method = _NAMED.get(model_path.rpartition("-")[2].lower())
    return None if method is None else {"quant_method": method}


def bits_of(quantization: Mapping[str, Any] | None, flag: str | None) -> float | None:
    """Bits of a quantised weight; None for weights that are not. `ValueError` for a method that is not known here.

    `quantization` is the configuration's `quantization_config`; `flag`, the method of `--quantization`, counts where
    there is none.
    """
    found = quantization or ({} if flag is None else {"quant_method": flag})
    if not found:
        return None
    method = str(found.get("quant_method", "modelopt")).lower()
    if method.startswith("modelopt"):
        method = _MODELOPT.get(str(found.get("quant_algo")).upper(), method)
    if method in _BITS:
        return _BITS[method]
    if method in _GROUPED:
        return _grouped(found.get("bits", found.get("w_bit", 4)), found.get("group_size", found.get("q_group_size")))
    if method == "compressed-tensors" and found.get("config_groups"):
        groups = [group.get("weights") or {} for group in found["config_groups"].values()]
        if all("num_bits" in weights for weights in groups):
            return max(map(_compressed, groups))
    raise ValueError(f"how many bits a weight has in the quantisation {method} is not known here: give --weights")


def weight_bytes(profile: ModelProfile, bits: float | None) -> int:
    """Bytes of all weights."""
    itemsize = profile.storage.weight_itemsize
    vocabulary = profile.num_embedding_parameters + profile.num_head_parameters
    layers = profile.num_parameters - vocabulary
    return vocabulary * itemsize + (layers * itemsize if bits is None else int(layers * bits / 8))


def _grouped(bits: int, group_size: int | None) -> float:
    """With a scale of 16 bits and a zero point for each group."""
    size = 128 if group_size is None else group_size
    return bits if size <= 0 else bits + (16 + bits) / size


def _compressed(weights: Mapping[str, Any]) -> float:
    bits, size = weights["num_bits"], weights.get("group_size")
    scale = 8 if weights.get("type") == "float" else 16
    return float(bits if not size or size <= 0 else bits + scale / size)
