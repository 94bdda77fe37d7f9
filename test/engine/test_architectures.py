"""docs/models.md has every architecture of SGLang's with recurrent layers, and says what `marconi check` says of it.

Architectures are found in the source of SGLang's models: in each module that names such a layer, or imports from one.
Of each a smallest configuration is enough, since what decides are its classes.
"""

import ast
import importlib.util
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pytest

pytest.importorskip("sglang", reason="the server extra is not installed: pip install '.[server]'")

from marconi.check.answer import answer
from marconi.check.line import CommandLine
from marconi.check.machine import Machine
from marconi.engine.launch import split
from marconi.engine.launch.flags import BACKEND
from marconi.engine.launch.model import Model
from marconi.model import catalog

from .test_models_page import LAYERS, PAGE

_RECURRENT: Final = re.compile(
    r"\b\w*(?:RadixLinearAttention|LinearAttention|MambaMixer|ShortConv|Lightning|DeltaNet|DeltaAttention)\w*\b"
)
_DRAFT: Final = re.compile(r"(?:MTP|NextN|DraftModel)$")
SHORT: Final = dict.fromkeys(("ShortConvAttnBackend", "InklingShortConvAttnBackend"), "short convolutions")
_KIMI: Final = catalog.CONFIGS["kimi-linear-48b-a3b"]
_JET: Final = {
    "model_type": "jet_nemotron",
    **{"hidden_size": 1536, "intermediate_size": 8960, "num_attention_heads": 12, "num_key_value_heads": 2},
    **{"num_hidden_layers": 2, "vocab_size": 1024},
}
_LING_3: Final = {"model_type": "bailing_hybrid", "use_kda": True}
CONFIGS: Final[dict[str, Mapping[str, Any]]] = {
    "BailingMoeV2_5ForCausalLM": {"model_type": "bailing_hybrid"},
    "BailingMoeV3ForCausalLM": _LING_3,
    "BailingMoeV3VLForConditionalGeneration": _LING_3,
    "FalconH1ForCausalLM": {"model_type": "falcon_h1"},
    "GigaChat35ForCausalLM": {"model_type": "gigachat3_5"},
    "Glm5NextForConditionalGeneration": {"model_type": "glm5_next"},
    "GraniteMoeHybridForCausalLM": {"model_type": "granitemoehybrid"},
    "InklingForConditionalGeneration": {"model_type": "inkling_mm_model"},
    "InternS2MobiusForConditionalGeneration": {"model_type": "interns2_mobius"},
    "InternS2PreviewForConditionalGeneration": {"model_type": "intern_s2_preview"},
    "JetNemotronForCausalLM": _JET,
    "JetVLMForConditionalGeneration": {"model_type": "jet_vlm", "text_config": _JET},
    "KimiK3ForConditionalGeneration": catalog.CONFIGS["kimi-k3"],
    "KimiK3LinearForCausalLM": _KIMI,
    "KimiLinearForCausalLM": _KIMI,
    "Lfm2ForCausalLM": {"model_type": "lfm2"},
    "Lfm2MoeForCausalLM": {"model_type": "lfm2_moe"},
    "Lfm2VlForConditionalGeneration": {"model_type": "lfm2_vl"},
    "MiniCPMSALAForCausalLM": {
        "model_type": "minicpm_sala",
        **{"num_hidden_layers": 2, "mixer_types": ["lightning-attn", "minicpm4"]},
        **{"num_attention_heads": 8, "num_key_value_heads": 8},
    },
    "MiniCPMV4_6ForConditionalGeneration": {"model_type": "minicpmv4_6"},
    "MiniCPMV4_7ForConditionalGeneration": {"model_type": "minicpmv4_7"},
    "NemotronHForCausalLM": {"model_type": "nemotron_h"},
    "NemotronHPuzzleForCausalLM": {
        "model_type": "nemotron_h_puzzle",
        "block_configs": [{"block_type": "mamba"}, {"block_type": "attention"}],
    },
    "NemotronH_Nano_Omni_Reasoning_V3": {"model_type": "NemotronH_Nano_Omni_Reasoning_V3"},
    "NemotronH_Nano_VL_V2": {"model_type": "NemotronH_Nano_VL_V2"},
    "NemotronH_Omni_Reasoning_V3": {"model_type": "NemotronH_Nano_Omni_Reasoning_V3"},
    "Qwen3NextForCausalLM": {"model_type": "qwen3_next"},
    "Qwen3_5ForConditionalGeneration": {"model_type": "qwen3_5"},
    "Qwen3_5MoeForConditionalGeneration": {"model_type": "qwen3_5_moe"},
    "Qwen4ExpForConditionalGeneration": {
        "model_type": "qwen4_exp",
        "text_config": {"ple_layer_ids": [2], "eos_token_id": 0},
    },
    "ZayaForCausalLM": {"model_type": "zaya"},
}
"""Of each architecture on the page."""
ELSEWHERE: Final = {
    "FalconMambaForCausalLM": "nothing but Mamba layers",
    "MambaForCausalLM": "nothing but Mamba layers",
    "Mamba2ForCausalLM": "nothing but Mamba layers",
    "Lfm2BidirectionalModel": "embeddings, which no cache serves",
    "MiniCPMForCausalLM": "attention alone, beside a model of lightning attention",
    "MiniCPMV": "one class for versions of which those with recurrent layers are listed",
}
"""Found in the same modules, and not on the page as an architecture."""


def found() -> Iterator[str]:
    """Names of SGLang's model classes with recurrent layers, and of those in the same modules."""
    spec = importlib.util.find_spec("sglang")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    modules = {
        file.stem: file.read_text(encoding="utf-8")
        for file in Path(spec.submodule_search_locations[0], "srt", "models").glob("*.py")
    }
    recurrent = {name for name, source in modules.items() if _RECURRENT.search(source)}
    for name, source in modules.items():
        imported = set(re.findall(r"^\s*from sglang\.srt\.models\.(\w+) import", source, re.MULTILINE))
        if name in recurrent or imported & recurrent:
            yield from _entry_classes(ast.parse(source))


def _entry_classes(module: ast.Module) -> Iterator[str]:
    for node in module.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "EntryClass":
            yield from (each.id for each in ast.walk(node.value) if isinstance(each, ast.Name))


def test_every_architecture_with_recurrent_layers_has_a_configuration_or_a_reason() -> None:
    names = {name for name in found() if not _DRAFT.search(name)}
    assert names - CONFIGS.keys() == ELSEWHERE.keys(), "add it to CONFIGS, and its row to docs/models.md"
    assert CONFIGS.keys() <= names


def of(architecture: str, folder: Path, *flags: str) -> tuple[str, str, str]:
    """The recurrent layers of an architecture, where states are kept, and how memory is divided."""
    fields = {"architectures": [architecture], **CONFIGS[architecture]}
    (folder / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    model = Model.find(str(folder), None)
    line = CommandLine.parse(["--model-path", str(folder), *flags])
    layers = (LAYERS | SHORT)[str(model.recurrent_layers(captures_prefills=False).linear_backend)]
    verdict = answer(line, model, Machine())
    assert verdict.cache == BACKEND, f"{architecture} has no recurrent layers in this configuration"
    if not verdict.is_served:
        (reason,) = verdict.reasons
        assert "--cuda-graph-backend-prefill must be disabled" in reason, reason
        _, states, memory = of(architecture, folder, "--cuda-graph-backend-prefill", "disabled")
        return layers, f"refused without `--cuda-graph-backend-prefill disabled`; {states} with it", memory
    why = next((note for note in verdict.notes if note.startswith("planned states cannot be kept")), None)
    states = "exact tokens" if why is None else f"ends of chunks: {why.partition('(')[2].partition(')')[0]}"
    return layers, states, "one pool" if verdict.split == split.ONE_POOL else "two pools"


@pytest.mark.slow
@pytest.mark.usefixtures("loaded_plugins")
def test_the_page_has_a_row_for_each(tmp_path: Path) -> None:
    alike = defaultdict(list)
    for architecture in CONFIGS:
        alike[of(architecture, tmp_path)].append(f"`{architecture}`")
    rows = [
        f"| {layers} | {', '.join(names)} | {states} | {memory} |"
        for (layers, states, memory), names in sorted(alike.items())
    ]
    shown = PAGE.partition("| layers | architectures |")[2].splitlines()[2 : 2 + len(rows) + 1]
    assert shown == [*rows, ""], "write instead:\n" + "\n".join(rows)
    num_exact = sum(len(names) for (_, states, _), names in alike.items() if states == "exact tokens")
    assert f"**{num_exact} of {len(CONFIGS)} keep states at exact tokens with default flags.**" in PAGE
