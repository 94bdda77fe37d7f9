"""Models by name: the paper's 7B hybrid, and dimensions of published models in the spelling of their `config.json`.

`catalog.json` holds them by the name that a command line takes, each with

    config        fields of `config.json`, of the language model alone where that is a part
    architecture  the one of `architectures` in the whole `config.json`, by which SGLang chooses
    hub           names on the Hugging Face hub: what a server's `--model-path` takes, of the same `config.json`
    aliases       shorter names

Only fields that costs depend on are listed. What a table like this gets wrong shows in the number of parameters, which
the tests hold against the published ones. Sources: the `config.json` of each model on the Hugging Face hub; those of
Nemotron 3 and Kimi K3 as others' code that loads them spells them out (Megatron Bridge's recipes and the tests of
loaders), and Qwen3.6 and Qwen3-Coder-Next are of the shapes of Qwen3.5 and Qwen3-Next. Of weights in FP8 states and KV
have the same bytes; times on a device are those of 16 bits.
"""

import json
from collections.abc import Mapping
from difflib import get_close_matches
from importlib.resources import files
from types import MappingProxyType
from typing import Any, Final

MARCONI_7B: Final = "marconi-7b"
"""The hybrid of the Marconi paper's evaluation, counted as the paper counts (`marconi.model.paper`)."""

_ENTRIES: Final[dict[str, dict[str, Any]]] = json.loads(
    files("marconi.model").joinpath("catalog.json").read_text(encoding="utf-8")
)

CONFIGS: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {name: entry["config"] for name, entry in _ENTRIES.items()}
)
"""Fields of `config.json`, by name."""

ARCHITECTURES: Final[Mapping[str, str]] = MappingProxyType(
    {name: entry["architecture"] for name, entry in _ENTRIES.items()}
)
"""SGLang's class of the model, by name."""

HUB_NAMES: Final[Mapping[str, str]] = MappingProxyType(
    {hub: name for name, entry in _ENTRIES.items() for hub in entry["hub"]}
)
"""The name here of what the Hugging Face hub has."""

ALIASES: Final[Mapping[str, str]] = MappingProxyType(
    {alias: name for name, entry in _ENTRIES.items() for alias in entry.get("aliases", ())}
)
"""The name in full of a shorter one."""

NAMES: Final = (MARCONI_7B, *CONFIGS)
"""Every name in full."""

_KINDS: Final[Mapping[tuple[str, str], tuple[str, ...]]] = {
    ("bailing_hybrid", "BailingMoeV2_5ForCausalLM"): (
        "inclusionAI/Ring-2.5-1T",
        "inclusionAI/Ring-2.6-1T",
        "inclusionAI/Ling-2.6-1T",
        "inclusionAI/Ling-2.6-flash",
    ),
    ("nemotron_h", "NemotronHForCausalLM"): (
        "nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16",
        "nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-NVFP4",
    ),
    ("qwen3_5", "Qwen3_5ForConditionalGeneration"): ("deepreinforce-ai/Ornith-1.0-9B",),
    ("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration"): (
        "deepreinforce-ai/Ornith-1.0-35B",
        "deepreinforce-ai/Ornith-1.0-35B-FP8",
        "deepreinforce-ai/Ornith-1.0-397B",
        "deepreinforce-ai/Ornith-1.0-397B-FP8",
    ),
    ("intern_s2_preview", "InternS2PreviewForConditionalGeneration"): ("internlm/Intern-S2-Preview",),
    ("minicpmv4_6", "MiniCPMV4_6ForConditionalGeneration"): ("openbmb/MiniCPM-V-4.6",),
    ("lfm2_vl", "Lfm2VlForConditionalGeneration"): ("LiquidAI/LFM2.5-VL-1.6B", "LiquidAI/LFM2.5-VL-450M"),
    ("inkling_mm_model", "InklingForConditionalGeneration"): (
        "thinkingmachines/Inkling-Small",
        "thinkingmachines/Inkling-Small-NVFP4",
    ),
}

KINDS: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        hub: {"model_type": model_type, "architectures": [architecture]}
        for (model_type, architecture), hubs in _KINDS.items()
        for hub in hubs
    }
)
"""Models of the hub of which no dimensions are known here, but what SGLang chooses by."""

_BY_SPELLING: Final = MappingProxyType(
    {spelt.lower(): name for spelt, name in (*ALIASES.items(), *HUB_NAMES.items(), *zip(NAMES, NAMES, strict=True))}
)


def name_of(spelt: str) -> str | None:
    """The name in full of what is spelt as any of them; None for no model here."""
    return _BY_SPELLING.get(spelt.lower())


def near(spelt: str) -> list[str]:
    """Up to three spellings of models here that look like `spelt`, the nearest first."""
    found = get_close_matches(spelt.lower(), _BY_SPELLING, n=3, cutoff=0.7)
    hub = {name.lower(): name for name in HUB_NAMES}
    return [hub.get(each, each) for each in found]
