"""A model is found by name or by its configuration, and what is wrong with either is said in one line."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from marconi.model import Precision, catalog, huggingface, load

# Billions of parameters, all and active, as published; vision towers and draft layers are not counted here.
PUBLISHED = {
    "jamba-1.5-mini": (51.6, 12.0),
    "nemotron-h-8b": (8.1, 8.1),
    "nemotron-nano-9b-v2": (8.89, 8.89),
    "nemotron-3-nano-30b-a3b": (31.6, 3.6),
    "nemotron-3-super-120b-a12b": (120.6, 12.7),
    "qwen3-next-80b-a3b": (80.0, 3.9),
    "qwen3.5-27b": (27.0, 27.0),
    "qwen3.5-35b-a3b": (35.0, 3.4),
    "qwen3.5-397b-a17b": (397.0, 17.0),
    "kimi-linear-48b-a3b": (49.1, 3.4),
    "kimi-k3": (2780.0, 104.0),
    "granite-4.0-h-small": (32.2, 9.0),
    "granite-4.0-h-tiny": (6.9, 1.5),
    "falcon-h1-7b": (7.6, 7.6),
    "falcon-h1-34b": (33.6, 33.6),
    "lfm2-350m": (0.354, 0.354),
    "lfm2-1.2b": (1.17, 1.17),
    # The pages say 8.3 and 1.5 of both; the weights of the newer one, with its larger vocabulary, have 8.4679.
    "lfm2-8b-a1b": (8.34, 1.56),
    "lfm2.5-8b-a1b": (8.468, 1.69),
    "vicuna-7b": (6.74, 6.74),
}
QWEN = dict(catalog.CONFIGS["qwen3.5-27b"])
LLAMA = dict(catalog.CONFIGS["vicuna-7b"])


def from_fields(fields: dict[str, Any]) -> Any:
    return huggingface.profile(huggingface.from_mapping(fields, "config.json"), "test")


def write(folder: Path, content: object) -> Path:
    (folder / "config.json").write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return folder


@pytest.mark.parametrize("name", catalog.CONFIGS)
def test_the_number_of_parameters_is_the_published_one(name: str) -> None:
    profile, (num_billions, num_active_billions) = load(name), PUBLISHED[name]
    assert profile.num_parameters / 1e9 == pytest.approx(num_billions, rel=0.012)
    assert profile.num_active_parameters / 1e9 == pytest.approx(num_active_billions, rel=0.03)


def test_the_catalogs_file_holds_nothing_that_is_not_read() -> None:
    entries = json.loads(Path(catalog.__file__).with_name("catalog.json").read_text(encoding="utf-8"))
    assert list(entries) == list(catalog.CONFIGS) == list(PUBLISHED)
    for entry in entries.values():
        assert {"config", "architecture", "hub"} <= set(entry) <= {"config", "architecture", "hub", "aliases"}


def test_the_papers_model() -> None:
    profile = load("Marconi-7B")
    assert profile.kv_bytes_per_token == 4 * 4 * 4096
    assert profile.state_bytes == 24 * (2 * 4096 * 128 + 2 * 4 * (2 * 4096 + 2 * 128))
    assert [(kind.kind, kind.num_layers) for kind in profile.kinds] == [("attention", 4), ("ssm", 24), ("mlp", 28)]


def test_the_states_of_known_models() -> None:
    """Qwen3-Next: 36 layers of 32 x 128 x 128 in float32 and a window of 3 x 8192 in bfloat16 (SGLang's pool)."""
    assert load("qwen3-next-80b-a3b").state_bytes == 36 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)
    assert load("nemotron-h-8b").state_bytes == 24 * (128 * 64 * 128 * 4 + 3 * (8192 + 2 * 8 * 128) * 2)
    assert load("qwen3-next-80b-a3b").kv_bytes_per_token == 12 * 2 * 2 * 256 * 2
    assert load("kimi-linear-48b").kv_bytes_per_token == 7 * 576 * 2


def test_a_name_in_short_is_the_name_in_full() -> None:
    for short, full in catalog.ALIASES.items():
        assert load(short) == load(full)


def test_a_model_may_be_named_as_a_server_names_it() -> None:
    assert load("Qwen/Qwen3-Next-80B-A3B-Instruct") == load("qwen3-next-80b-a3b")
    assert load("nvidia/nvidia-nemotron-nano-9b-v2") == load("nemotron-nano-9b-v2")
    assert set(catalog.HUB_NAMES.values()) == set(catalog.CONFIGS)
    for hub, name in catalog.HUB_NAMES.items():
        assert load(hub) == load(name)


def test_a_folder_that_is_called_like_a_model_of_the_hub_is_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = Path("Qwen") / "Qwen3.5-27B"
    folder.mkdir(parents=True)
    write(folder, {**QWEN, "num_hidden_layers": 4})
    assert load("Qwen/Qwen3.5-27B").name == "Qwen3.5-27B"
    assert load("Qwen/Qwen3.5-27B") != load("Qwen/Qwen3.5-27B-FP8") == load("qwen3.5-27b")


@pytest.mark.parametrize(
    ("spelt", "meant"),
    [
        ("qwen3-nxt", "'qwen3-next'"),
        ("Qwen/Qwen3-Next-80B-A3B-Instrct", "'Qwen/Qwen3-Next-80B-A3B-Instruct'"),
        ("nvidia/Nemotron-Nano-9B-v2", "'nvidia/NVIDIA-Nemotron-Nano-9B-v2'"),
    ],
)
def test_a_near_miss_is_told_what_may_have_been_meant(spelt: str, meant: str) -> None:
    with pytest.raises(ValueError, match=rf"^a model must be .*, got '{spelt}': did you mean {meant}[^?\n]*\?$"):
        load(spelt)


def test_an_unknown_model_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"must be .*marconi-7b, jamba-1.5-mini.*vicuna-7b.*, got 'marconi-70b'"):
        load("marconi-70b")


def test_a_folder_and_its_file_are_the_same_model(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    write(folder, QWEN)
    by_folder, by_file = load(str(folder)), load(str(folder / "config.json"))
    assert by_folder == by_file
    assert by_folder.name == "my-model"
    assert by_folder.kinds == load("qwen3.5-27b").kinds


def test_the_language_part_of_a_multimodal_configuration_is_read() -> None:
    wrapped = {"model_type": "qwen3_5", "text_config": QWEN, "vision_config": {"hidden_size": 7}}
    assert from_fields(wrapped).kinds == load("qwen3.5-27b").kinds
    unnamed = {key: value for key, value in QWEN.items() if key != "model_type"}
    assert from_fields({"model_type": "qwen3_5", "text_config": unnamed}).kinds == load("qwen3.5-27b").kinds


def test_layer_types_and_an_interval_say_the_same() -> None:
    types = (["linear_attention"] * 3 + ["full_attention"]) * 16
    fields = {key: value for key, value in QWEN.items() if key != "full_attention_interval"}
    assert from_fields({**fields, "layer_types": types}) == from_fields(QWEN)


def test_nemotrons_letters_and_names_say_the_same() -> None:
    fields = dict(catalog.CONFIGS["nemotron-h-8b"])
    names = {"M": "mamba", "-": "mlp", "*": "attention"}
    spelt = [names[letter] for letter in fields.pop("hybrid_override_pattern")]
    assert from_fields({**fields, "layers_block_type": spelt}).kinds == load("nemotron-h-8b").kinds


def test_dtypes_are_the_models_unless_given() -> None:
    own = from_fields({**QWEN, "dtype": "float16", "mamba_ssm_dtype": "bfloat16"})
    assert (own.storage.kv_dtype, own.storage.state_dtype, own.storage.conv_dtype) == (
        "float16",
        "bfloat16",
        "bfloat16",
    )
    given = load("qwen3.5-27b", precision=Precision(kv_dtype="float8_e4m3fn", state_dtype="bfloat16"))
    assert given.kv_bytes_per_token * 2 == load("qwen3.5-27b").kv_bytes_per_token


def test_sglang_keeps_granites_and_kimis_states_in_float32_whatever_the_model_says() -> None:
    for name in ("granite-4.0-h-small", "kimi-linear-48b-a3b"):
        fields = {**catalog.CONFIGS[name], "mamba_ssm_dtype": "bfloat16"}
        assert from_fields(fields).state_bytes == load(name).state_bytes


def test_workers_share_states_and_weights_but_not_flops() -> None:
    alone, shared = load("qwen3-next-80b-a3b"), load("qwen3-next-80b-a3b", tensor_parallel=4)
    assert shared.state_bytes * 4 == alone.state_bytes
    assert shared.kv_bytes_per_token * 2 == alone.kv_bytes_per_token
    assert shared.prefix_flops(5000) == alone.prefix_flops(5000)


@pytest.mark.parametrize("degree", [0, -1])
def test_no_workers_are_refused(degree: int) -> None:
    with pytest.raises(ValueError, match=f"tensor_parallel must be at least 1, got {degree}"):
        load("vicuna-7b", tensor_parallel=degree)


@pytest.mark.parametrize("field", ["hidden_size", "num_attention_heads", "linear_num_value_heads", "intermediate_size"])
def test_a_missing_field_is_named(field: str) -> None:
    fields = {key: value for key, value in QWEN.items() if key != field}
    with pytest.raises(ValueError, match=f"config.json: missing field '{field}'"):
        from_fields(fields)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({**QWEN, "model_type": "gpt5"}, "model_type must be one of .*nemotron_h.*qwen3_next.*, got 'gpt5'"),
        ({"hidden_size": 5}, "missing field 'model_type'"),
        ({**QWEN, "mlp_only_layers": ["a"]}, "mlp_only_layers must hold whole numbers, got 'a'"),
        ({**QWEN, "hidden_size": "5120"}, "hidden_size must be a whole number that is not negative, got '5120'"),
        ({**QWEN, "hidden_size": -1}, "hidden_size must be a whole number that is not negative, got -1"),
        ({**QWEN, "num_attention_heads": 0}, "num_attention_heads must be a positive"),
        (
            {**QWEN, "layer_types": ["linear_attention"]},
            r"layer_types must have 64 entries \(num_hidden_layers\), got 1",
        ),
        ({**QWEN, "layer_types": ["conv"] * 64}, "layer_types must hold linear_attention"),
        ({**QWEN, "layer_types": "linear"}, "layer_types must be a list, got 'linear'"),
        ({**QWEN, "mamba_ssm_dtype": "float3"}, "a dtype must be one of .*, got 'float3'"),
        (
            {**catalog.CONFIGS["nemotron-h-8b"], "hybrid_override_pattern": "M-X"},
            "hybrid_override_pattern must hold M, ",
        ),
        (
            {**catalog.CONFIGS["kimi-linear-48b-a3b"], "linear_attn_config": 3},
            "linear_attn_config must be an obj",
        ),
    ],
)
def test_a_bad_configuration_is_refused_in_one_line(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem) as raised:
        from_fields(fields)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("content", "problem"),
    [("{", "is not JSON"), ("[1]", "must hold a JSON object, got a list"), (None, "cannot be read: No such file")],
)
def test_a_bad_file_is_named(tmp_path: Path, content: str | None, problem: str) -> None:
    if content is not None:
        write(tmp_path, content)
    with pytest.raises(ValueError, match=re.escape(str(tmp_path / "config.json")) + " " + problem):
        load(str(tmp_path))


def test_mistrals_window_is_on_every_layer_and_gemmas_on_those_listed() -> None:
    mistral = from_fields({**LLAMA, "model_type": "mistral", "sliding_window": 4096})
    per_token = load("vicuna-7b").kv_bytes_per_token
    assert (mistral.kv_bytes_per_token, mistral.checkpoint_bytes) == (0, 4096 * per_token)
    types = ["sliding_attention", "full_attention"] * 16
    gemma = from_fields({**LLAMA, "model_type": "gemma3_text", "sliding_window": 1024, "layer_types": types})
    assert (gemma.kv_bytes_per_token, gemma.checkpoint_bytes) == (per_token // 2, 512 * per_token)


def test_families_that_sglang_does_not_serve_are_read_too() -> None:
    rwkv = {
        "model_type": "rwkv7",
        "hidden_size": 2560,
        "num_hidden_layers": 32,
        "head_dim": 64,
        "decay_low_rank_dim": 96,
        "a_low_rank_dim": 96,
        "v_low_rank_dim": 64,
        "gate_low_rank_dim": 320,
        "vocab_size": 65536,
    }
    assert from_fields(rwkv).num_parameters / 1e9 == pytest.approx(2.95, rel=0.01)
    assert from_fields(rwkv).state_bytes == 32 * (2560 * 64 * 4 + 2 * 2560 * 2)
    minimax = {
        "model_type": "minimax_text_01",
        "hidden_size": 6144,
        "intermediate_size": 9216,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "num_local_experts": 32,
        "num_experts_per_tok": 2,
        "attn_type_list": ([0] * 7 + [1]) * 10,
        "vocab_size": 200064,
    }
    assert from_fields(minimax).num_parameters / 1e9 == pytest.approx(456, rel=0.01)
    # Published without embedding and head.
    active = from_fields(minimax).num_active_parameters - 2 * 200064 * 6144
    assert active / 1e9 == pytest.approx(45.9, rel=0.005)
