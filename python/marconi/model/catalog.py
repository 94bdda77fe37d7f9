"""Models by name: the paper's 7B hybrid, and dimensions of published models in the spelling of their `config.json`.

Only fields that costs depend on are listed. What a table like this gets wrong shows in the number of parameters, which
the tests hold against the published ones. Sources: the `config.json` of each model on the Hugging Face hub; those of
Nemotron 3 and Kimi K3 as others' code that loads them spells them out (Megatron Bridge's recipes and the tests of
loaders), and Qwen3.6 and Qwen3-Coder-Next are of the shapes of Qwen3.5 and Qwen3-Next.
"""

from collections.abc import Mapping
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, Final

MARCONI_7B: Final = "marconi-7b"
"""The hybrid of the Marconi paper's evaluation, counted as the paper counts (`marconi.model.paper`)."""

_QWEN_LINEAR: Final = {
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "head_dim": 256,
}
_QWEN35: Final = {**_QWEN_LINEAR, "mamba_ssm_dtype": "float32", "vocab_size": 248320}
_GRANITE_TYPES: Final = ["attention" if index in (5, 15, 25, 35) else "mamba" for index in range(40)]
_GRANITE: Final = {
    "model_type": "granitemoehybrid",
    "num_hidden_layers": 40,
    "layer_types": _GRANITE_TYPES,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "vocab_size": 100352,
    "tie_word_embeddings": True,
}
_NEMOTRON_3: Final = {
    "model_type": "nemotron_h",
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "ssm_state_size": 128,
    "conv_kernel": 4,
    "n_shared_experts": 1,
    "vocab_size": 131072,
}
_FALCON: Final = {"model_type": "falcon_h1", "head_dim": 128, "mamba_d_state": 256, "mamba_d_conv": 4}

CONFIGS: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "jamba-1.5-mini": {
            "model_type": "jamba",
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "attn_layer_period": 8,
            "attn_layer_offset": 4,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "num_experts": 16,
            "num_experts_per_tok": 2,
            "mamba_d_state": 16,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_dt_rank": 256,
            "vocab_size": 65536,
        },
        "nemotron-h-8b": {
            "model_type": "nemotron_h",
            "hidden_size": 4096,
            "intermediate_size": 21504,
            "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "mamba_num_heads": 128,
            "mamba_head_dim": 64,
            "n_groups": 8,
            "ssm_state_size": 128,
            "conv_kernel": 4,
            "vocab_size": 131072,
        },
        "nemotron-nano-9b-v2": {
            "model_type": "nemotron_h",
            "hidden_size": 4480,
            "intermediate_size": 15680,
            "hybrid_override_pattern": "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
            "num_attention_heads": 40,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "mamba_num_heads": 128,
            "mamba_head_dim": 80,
            "n_groups": 8,
            "ssm_state_size": 128,
            "conv_kernel": 4,
            "vocab_size": 131072,
        },
        "nemotron-3-nano-30b-a3b": {
            **_NEMOTRON_3,
            "hidden_size": 2688,
            "intermediate_size": 1856,
            "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
            "mamba_num_heads": 64,
            "n_routed_experts": 128,
            "num_experts_per_tok": 6,
            "moe_intermediate_size": 1856,
            "moe_shared_expert_intermediate_size": 3712,
        },
        "nemotron-3-super-120b-a12b": {
            **_NEMOTRON_3,
            "hidden_size": 4096,
            "intermediate_size": 2688,
            "hybrid_override_pattern": "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*"
            "EMEMEMEME",
            "mamba_num_heads": 128,
            "n_routed_experts": 512,
            "num_experts_per_tok": 22,
            "moe_intermediate_size": 2688,
            "moe_latent_size": 1024,
            "moe_shared_expert_intermediate_size": 5376,
        },
        "qwen3-next-80b-a3b": {
            **_QWEN_LINEAR,
            "model_type": "qwen3_next",
            "hidden_size": 2048,
            "intermediate_size": 5120,
            "num_hidden_layers": 48,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "linear_num_value_heads": 32,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "vocab_size": 151936,
        },
        "qwen3.5-27b": {
            **_QWEN35,
            "model_type": "qwen3_5_text",
            "hidden_size": 5120,
            "intermediate_size": 17408,
            "num_hidden_layers": 64,
            "num_attention_heads": 24,
            "num_key_value_heads": 4,
            "linear_num_value_heads": 48,
        },
        "qwen3.5-35b-a3b": {
            **_QWEN35,
            "model_type": "qwen3_5_moe_text",
            "hidden_size": 2048,
            "num_hidden_layers": 40,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "linear_num_value_heads": 32,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
        },
        "qwen3.5-397b-a17b": {
            **_QWEN35,
            "model_type": "qwen3_5_moe_text",
            "hidden_size": 4096,
            "num_hidden_layers": 60,
            "num_attention_heads": 32,
            "num_key_value_heads": 2,
            "linear_num_value_heads": 64,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "moe_intermediate_size": 1024,
            "shared_expert_intermediate_size": 1024,
        },
        "kimi-linear-48b-a3b": {
            "model_type": "kimi_linear",
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 27,
            "num_attention_heads": 32,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "linear_attn_config": {
                "kda_layers": [index for index in range(1, 27) if index % 4],
                "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
                "num_heads": 32,
                "head_dim": 128,
                "short_conv_kernel_size": 4,
            },
            "num_experts": 256,
            "num_experts_per_token": 8,
            "num_shared_experts": 1,
            "moe_intermediate_size": 1024,
            "first_k_dense_replace": 1,
            "vocab_size": 163840,
        },
        "kimi-k3": {
            "model_type": "kimi_linear",
            "hidden_size": 7168,
            "intermediate_size": 33792,
            "num_hidden_layers": 93,
            "num_attention_heads": 96,
            "num_key_value_heads": 96,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "mla_use_output_gate": True,
            "linear_attn_config": {
                "kda_layers": [index for index in range(1, 93) if index % 4],
                "full_attn_layers": [*range(4, 93, 4), 93],
                "num_heads": 96,
                "head_dim": 128,
                "short_conv_kernel_size": 4,
                "use_full_rank_gate": True,
            },
            "num_experts": 896,
            "num_experts_per_token": 16,
            "num_shared_experts": 2,
            "moe_intermediate_size": 3072,
            "routed_expert_hidden_size": 3584,
            "first_k_dense_replace": 1,
            "vocab_size": 163840,
        },
        "granite-4.0-h-small": {
            **_GRANITE,
            "hidden_size": 4096,
            "intermediate_size": 768,
            "shared_intermediate_size": 1536,
            "num_local_experts": 72,
            "num_experts_per_tok": 10,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "mamba_n_heads": 128,
        },
        "granite-4.0-h-tiny": {
            **_GRANITE,
            "hidden_size": 1536,
            "intermediate_size": 512,
            "shared_intermediate_size": 1024,
            "num_local_experts": 64,
            "num_experts_per_tok": 6,
            "num_attention_heads": 12,
            "num_key_value_heads": 4,
            "mamba_n_heads": 48,
        },
        "falcon-h1-7b": {
            **_FALCON,
            "hidden_size": 3072,
            "intermediate_size": 12288,
            "num_hidden_layers": 44,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
            "mamba_d_ssm": 3072,
            "mamba_n_heads": 24,
            "mamba_n_groups": 1,
            "vocab_size": 130048,
        },
        "falcon-h1-34b": {
            **_FALCON,
            "hidden_size": 5120,
            "intermediate_size": 21504,
            "num_hidden_layers": 72,
            "num_attention_heads": 20,
            "num_key_value_heads": 4,
            "mamba_d_ssm": 4096,
            "mamba_n_heads": 32,
            "mamba_n_groups": 2,
            "vocab_size": 261120,
        },
        "vicuna-7b": {
            "model_type": "llama",
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "torch_dtype": "float16",
            "vocab_size": 32000,
        },
    }
)
"""Fields of `config.json`, by the name that a command line takes."""

ARCHITECTURES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "jamba-1.5-mini": "JambaForCausalLM",
        "nemotron-h-8b": "NemotronHForCausalLM",
        "nemotron-nano-9b-v2": "NemotronHForCausalLM",
        "nemotron-3-nano-30b-a3b": "NemotronHForCausalLM",
        "nemotron-3-super-120b-a12b": "NemotronHForCausalLM",
        "qwen3-next-80b-a3b": "Qwen3NextForCausalLM",
        "qwen3.5-27b": "Qwen3_5ForConditionalGeneration",
        "qwen3.5-35b-a3b": "Qwen3_5MoeForConditionalGeneration",
        "qwen3.5-397b-a17b": "Qwen3_5MoeForConditionalGeneration",
        "kimi-linear-48b-a3b": "KimiLinearForCausalLM",
        "kimi-k3": "KimiK3ForConditionalGeneration",
        "granite-4.0-h-small": "GraniteMoeHybridForCausalLM",
        "granite-4.0-h-tiny": "GraniteMoeHybridForCausalLM",
        "falcon-h1-7b": "FalconH1ForCausalLM",
        "falcon-h1-34b": "FalconH1ForCausalLM",
        "vicuna-7b": "LlamaForCausalLM",
    }
)
"""`architectures` of the whole `config.json`, by which SGLang chooses: of some, the language model is only a part."""

KINDS: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {"inclusionAI/Ring-2.5-1T": {"model_type": "bailing_hybrid", "architectures": ["BailingMoeV2_5ForCausalLM"]}}
)
"""Models of the hub of which no dimensions are known here, but what SGLang chooses by."""

ALIASES: Final = MappingProxyType(
    {
        "kimi-linear-48b": "kimi-linear-48b-a3b",
        "granite-4-h-small": "granite-4.0-h-small",
        "granite-4-h-tiny": "granite-4.0-h-tiny",
        "qwen3-next": "qwen3-next-80b-a3b",
    }
)
"""Shorter names."""

NAMES: Final = (MARCONI_7B, *CONFIGS)
"""Every name in full."""

_HUB: Final = {
    "jamba-1.5-mini": ("ai21labs/AI21-Jamba-1.5-Mini", "ai21labs/AI21-Jamba-Mini-1.5"),
    "nemotron-h-8b": ("nvidia/Nemotron-H-8B-Base-8K", "nvidia/Nemotron-H-8B-Reasoning-128K"),
    "nemotron-3-nano-30b-a3b": (
        "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
        "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-FP8",
    ),
    "nemotron-3-super-120b-a12b": ("nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16",),
    "nemotron-nano-9b-v2": ("nvidia/NVIDIA-Nemotron-Nano-9B-v2", "nvidia/NVIDIA-Nemotron-Nano-9B-v2-Base"),
    "qwen3-next-80b-a3b": (
        "Qwen/Qwen3-Next-80B-A3B-Instruct",
        "Qwen/Qwen3-Next-80B-A3B-Instruct-FP8",
        "Qwen/Qwen3-Next-80B-A3B-Thinking",
        "Qwen/Qwen3-Next-80B-A3B-Thinking-FP8",
        "Qwen/Qwen3-Coder-Next",
        "Qwen/Qwen3-Coder-Next-FP8",
    ),
    "qwen3.5-27b": ("Qwen/Qwen3.5-27B", "Qwen/Qwen3.5-27B-FP8", "Qwen/Qwen3.6-27B", "Qwen/Qwen3.6-27B-FP8"),
    "qwen3.5-35b-a3b": (
        "Qwen/Qwen3.5-35B-A3B",
        "Qwen/Qwen3.5-35B-A3B-FP8",
        "Qwen/Qwen3.6-35B-A3B",
        "Qwen/Qwen3.6-35B-A3B-FP8",
    ),
    "qwen3.5-397b-a17b": (
        "Qwen/Qwen3.5-397B-A17B",
        "Qwen/Qwen3.5-397B-A17B-FP8",
        "nvidia/Qwen3.5-397B-A17B-NVFP4",
    ),
    "kimi-k3": ("moonshotai/Kimi-K3",),
    "kimi-linear-48b-a3b": ("moonshotai/Kimi-Linear-48B-A3B-Base", "moonshotai/Kimi-Linear-48B-A3B-Instruct"),
    "granite-4.0-h-small": ("ibm-granite/granite-4.0-h-small", "ibm-granite/granite-4.0-h-small-base"),
    "granite-4.0-h-tiny": ("ibm-granite/granite-4.0-h-tiny", "ibm-granite/granite-4.0-h-tiny-base"),
    "falcon-h1-7b": ("tiiuae/Falcon-H1-7B-Base", "tiiuae/Falcon-H1-7B-Instruct"),
    "falcon-h1-34b": ("tiiuae/Falcon-H1-34B-Base", "tiiuae/Falcon-H1-34B-Instruct"),
    "vicuna-7b": ("lmsys/vicuna-7b-v1.5",),
}

HUB_NAMES: Final = MappingProxyType({hub: name for name, hubs in _HUB.items() for hub in hubs})
"""What a server's `--model-path` takes from the Hugging Face hub, and the name here: the same `config.json`.

Of weights in FP8 states and KV have the same bytes; times on a device are those of 16 bits.
"""

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
