"""A checkpoint has the bytes that a slot of SGLang's pool has. Needs SGLang, not a GPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang", reason="NEEDS SGLANG, not installed (pip install '.[server]'): this test did not run")

from sglang.srt import configs
from sglang.srt.configs.gigachat35 import GigaChat35Config
from sglang.srt.configs.glm5_next import Glm5NextTextConfig
from sglang.srt.configs.qwen3_5 import Qwen3_5MoeTextConfig, Qwen3_5TextConfig
from sglang.srt.runtime_context import get_parallel

from marconi.model import Precision, catalog, huggingface, load
from marconi.model.profile import ModelProfile

CLASSES = {
    "qwen3_next": configs.Qwen3NextConfig,
    "qwen3_5_text": Qwen3_5TextConfig,
    "qwen3_5_moe_text": Qwen3_5MoeTextConfig,
    "nemotron_h": configs.NemotronHConfig,
    "falcon_h1": configs.FalconH1Config,
    "granitemoehybrid": configs.GraniteMoeHybridConfig,
    "kimi_linear": configs.KimiLinearConfig,
    "bailing_hybrid": configs.BailingHybridConfig,
    "mamba": configs.MambaConfig,
    "falcon_mamba": configs.FalconMambaConfig,
    "mamba2": configs.Mamba2Config,
    "lfm2": configs.Lfm2Config,
    "lfm2_moe": configs.Lfm2MoeConfig,
    "jet_nemotron": configs.JetNemotronConfig,
    "minicpm_sala": configs.MiniCPMHybridConfig,
    "zaya": configs.ZayaConfig,
    "glm5_next_text": Glm5NextTextConfig,
    "gigachat3_5": GigaChat35Config,
}
BASE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8}
MLA = {"kv_lora_rank": 64, "q_lora_rank": 96, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
GDN = {
    "linear_num_key_heads": 8,
    "linear_key_head_dim": 32,
    "linear_num_value_heads": 16,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
}
SMALL: dict[str, dict[str, Any]] = {
    "gdn in bfloat16": {
        **BASE,
        **GDN,
        "model_type": "qwen3_5_text",
        "full_attention_interval": 4,
        "num_key_value_heads": 2,
        "mamba_ssm_dtype": "bfloat16",
    },
    "lightning": {
        **BASE,
        **MLA,
        **EXPERTS,
        "model_type": "bailing_hybrid",
        "num_experts": 4,
        "layer_group_size": 2,
        "head_dim": 32,
        "mamba_ssm_dtype": "bfloat16",
    },
    "kda of ling 3": {
        **BASE,
        **MLA,
        **EXPERTS,
        "model_type": "bailing_hybrid",
        "num_experts": 4,
        "layer_group_size": [1, 1, 0, 1],
        "head_dim": 32,
        "short_conv_kernel_size": 4,
    },
    "mamba": {"model_type": "mamba", "hidden_size": 256, "num_hidden_layers": 3, "state_size": 16, "conv_kernel": 4},
    "falcon-mamba": {
        "model_type": "falcon_mamba",
        "hidden_size": 256,
        "intermediate_size": 384,
        "num_hidden_layers": 3,
        "state_size": 16,
        "conv_kernel": 4,
    },
    "mamba2": {
        "model_type": "mamba2",
        "hidden_size": 256,
        "num_hidden_layers": 3,
        "num_heads": 8,
        "head_dim": 64,
        "n_groups": 2,
        "state_size": 32,
        "conv_kernel": 4,
        "intermediate_size": 512,
    },
    "lfm2": {
        **BASE,
        "model_type": "lfm2",
        "num_key_value_heads": 2,
        "conv_L_cache": 3,
        "layer_types": ["conv", "conv", "full_attention", "conv"],
    },
    "lfm2-moe": {
        **BASE,
        **EXPERTS,
        "model_type": "lfm2_moe",
        "num_experts": 4,
        "num_dense_layers": 1,
        "num_key_value_heads": 2,
        "conv_L_cache": 3,
        "layer_types": ["conv", "conv", "full_attention", "conv"],
    },
    "jet-nemotron": {
        **BASE,
        "model_type": "jet_nemotron",
        "num_key_value_heads": 2,
        "layer_types": ["jet", "swa", "attn", "jet"],
        "efficient_attention_config": {
            "swa": {"window_size": 1024},
            "jet": {
                "mode": "chunk",
                "expand_v": 2.0,
                "num_heads": 8,
                "head_dim": 32,
                "norm_eps": "1e-5",
                "conv_size": 4,
                "dconv_generator_reduction": 8,
                "dconv_implementation": "triton",
            },
        },
    },
    "minicpm-sala": {
        **BASE,
        "model_type": "minicpm_sala",
        "num_key_value_heads": 8,
        "mixer_types": ["minicpm4", "lightning-attn"],
        "lightning_nh": 8,
        "lightning_nkv": 8,
        "lightning_head_dim": 32,
    },
    "zaya": {
        "model_type": "zaya",
        "hidden_size": 256,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "num_query_groups": 4,
        "head_dim": 32,
        "num_experts": 4,
        "moe_router_topk": 1,
        "ffn_hidden_size": 128,
    },
    "glm5-next": {
        **BASE,
        **MLA,
        **EXPERTS,
        "model_type": "glm5_next_text",
        "n_routed_experts": 4,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "linear_num_heads": 8,
        "linear_head_dim": 32,
        "linear_conv_kernel_dim": 4,
    },
    "gigachat": {
        **BASE,
        **MLA,
        **EXPERTS,
        **GDN,
        "model_type": "gigachat3_5",
        "n_routed_experts": 4,
        "full_attention_layers": [3],
    },
}
SERVED = {name: fields for name, fields in catalog.CONFIGS.items() if fields["model_type"] in CLASSES}
ALL = {**SERVED, **SMALL}


@contextmanager
def workers(degree: int) -> Iterator[None]:
    with get_parallel().override(
        tp_size=degree, attn_tp_size=degree, attn_cp_size=1, attn_dp_size=1, enable_cp_tp_group_sharing=False
    ):
        yield


@pytest.fixture(autouse=True)
def default_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The dtypes that SGLang takes unless told otherwise."""
    for name in ("SGLANG_MAMBA_CONV_DTYPE", "SGLANG_MAMBA_SSM_DTYPE"):
        monkeypatch.delenv(name, raising=False)


def profile(fields: dict[str, Any], degree: int = 1) -> ModelProfile:
    return huggingface.profile(huggingface.from_mapping(fields, "test"), "test", tensor_parallel=degree)


@pytest.mark.parametrize("degree", [1, 2, 4])
@pytest.mark.parametrize("name", ALL)
def test_a_checkpoint_has_the_bytes_of_sglangs_slot(name: str, degree: int) -> None:
    fields = dict(ALL[name])
    with workers(degree):
        theirs = CLASSES[fields["model_type"]](**fields).mamba2_cache_params.mamba_cache_per_req
    assert profile(fields, degree).state_bytes == theirs


@pytest.mark.parametrize("family", ["gdn", "mamba2"])
def test_a_checkpoint_of_a_tiny_model_has_the_bytes_of_its_pools_tensors(family: str, tmp_path: Path) -> None:
    from sglang.srt.mem_cache.memory_pool import MambaPool
    from sglang.srt.utils.hf_transformers_utils import get_config

    from marconi_cpu.tiny_model import Family, write

    write(Family(family), tmp_path / "model")
    config = get_config(str(tmp_path / "model"), trust_remote_code=False)
    num_slots = 3
    with workers(1):
        params = config.mamba2_cache_params
    pool = MambaPool(
        size=num_slots, spec_state_size=num_slots, cache_params=params, mamba_layer_ids=params.layers, device="cpu"
    )
    # One slot more than asked for: padding writes to slot 0.
    assert load(str(tmp_path / "model")).state_bytes * (num_slots + 1) == pool.mamba_cache.mem_usage_bytes()


def test_the_environments_dtypes_are_a_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_MAMBA_CONV_DTYPE", "float32")
    monkeypatch.setenv("SGLANG_MAMBA_SSM_DTYPE", "bfloat16")
    fields = dict(catalog.CONFIGS["qwen3-next-80b-a3b"])
    with workers(1):
        theirs = CLASSES["qwen3_next"](**fields).mamba2_cache_params.mamba_cache_per_req
    ours = load("qwen3-next-80b-a3b", precision=Precision(conv_dtype="float32", state_dtype="bfloat16"))
    assert ours.state_bytes == theirs


@pytest.mark.parametrize("degree", [1, 2, 4])
def test_a_checkpoint_of_inkling_has_the_bytes_of_sglangs_slot(degree: int, monkeypatch: pytest.MonkeyPatch) -> None:
    not_scattered = SimpleNamespace(comm=SimpleNamespace(enable_scattered_sconv=False))
    monkeypatch.setattr("sglang.srt.configs.inkling.get_exec", lambda: not_scattered)
    fields = {
        **BASE,
        "num_key_value_heads": 2,
        "swa_num_key_value_heads": 4,
        "swa_head_dim": 16,
        "local_layer_ids": [0, 1, 2],
        "sliding_window_size": 128,
        "sconv_kernel_size": 4,
        "use_sconv": True,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
    }
    with workers(degree):
        theirs = configs.InklingModelConfig(**fields).mamba2_cache_params.mamba_cache_per_req
    assert profile({**fields, "model_type": "inkling_model"}, degree).state_bytes == theirs
