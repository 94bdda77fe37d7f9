"""`marconi check` answers for the machine that would serve: its platform, its memory, and the weights on it."""

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("sglang", reason="the server extra is not installed: pip install '.[server]'")

from sglang.srt.arg_groups import memory_hook
from sglang.srt.runtime_context import get_platform

from marconi import cli
from marconi.check.answer import CheckResult, answer
from marconi.check.line import CommandLine
from marconi.check.machine import Generation, Machine, Platform
from marconi.check.stand_in import as_sglang_finds
from marconi.engine.cpu_platform import PLATFORM
from marconi.engine.launch.model import Model
from marconi.engine.launch.weights import bits_of, weight_bytes
from marconi.model import load
from marconi.replay.memory import MemorySize

GDN = "Qwen/Qwen3-Next-80B-A3B-Instruct"
KDA = "moonshotai/Kimi-Linear-48B-A3B-Instruct"
IMAGES = "Qwen/Qwen3.6-27B"
FALCON = "tiiuae/Falcon-H1-7B-Instruct"
SMALL = "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"


@pytest.fixture(autouse=True)
def no_platform(_plugins: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator who has chosen none; SGLang is imported."""
    monkeypatch.delenv("SGLANG_PLATFORM", raising=False)


def checked(*argv: str, model: str = GDN, machine: Machine | None = None, config: Path | None = None) -> CheckResult:
    line = CommandLine.parse(["--model-path", model, *argv])
    return answer(line, Model.find(line.model_path, config), machine or Machine())


def card(memory: str, weights: str | None = None) -> Machine:
    return Machine(memory=MemorySize.parse(memory), weights=None if weights is None else MemorySize.parse(weights))


# The platform


def test_ranks_that_cannot_share_the_heads_are_refused() -> None:
    (reason,) = checked("--tp-size", "3").reasons
    assert reason == "--tp-size 3: tensor_parallel must divide the number of value heads (32), got 3"
    assert checked("--tp-size", "4").reasons == ()


def test_the_pools_of_the_cpu_platform_are_its_own() -> None:
    pools = checked(machine=Machine(Platform.CPU)).pools
    assert pools is not None
    assert (pools.num_slots, pools.num_tokens) == (128, 65536)
    pools = checked().pools
    assert pools is not None
    assert (pools.num_slots, pools.num_tokens) == (None, None)


def test_a_launch_for_blackwell_is_refused_by_sglang_on_hopper_alone() -> None:
    """SGLang's kernels of latent attention in CuTe DSL exist for Blackwell."""
    argv = ("--decode-attention-backend", "cutedsl_mla", "--page-size", "64")
    (reason,) = checked(*argv, model=KDA, machine=Machine(card=Generation.HOPPER)).reasons
    assert "only supported on Blackwell" in reason
    assert checked(*argv, model=KDA, machine=Machine(card=Generation.BLACKWELL)).reasons == ()


def test_the_card_is_what_sglang_finds() -> None:
    for card_, major in ((Generation.AMPERE, 8), (Generation.HOPPER, 9), (Generation.BLACKWELL, 10)):
        with as_sglang_finds(Machine(card=card_)):
            found = get_platform()
            assert torch.cuda.get_device_capability() == found.device_capability == (major, 0)
            assert (found.is_sm90, found.is_sm100, found.is_blackwell) == (major == 9, major == 10, major == 10)


@pytest.mark.parametrize(
    ("option", "environment", "is_served"),
    [
        ((), None, False),
        ((), PLATFORM, True),
        (("--platform", "cpu"), None, True),
        (("--platform", "cuda"), PLATFORM, False),
    ],
)
def test_the_command_answers_for_cuda_unless_told_otherwise(
    option: tuple[str, ...], environment: str | None, is_served: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # Its own choice of what to import SGLang on must not outlive the test.
    monkeypatch.setenv("SGLANG_PLATFORM", environment or "")
    if environment is None:
        monkeypatch.delenv("SGLANG_PLATFORM")
    file = tmp_path / "answer.json"
    status = cli.main(["check", *option, "--json", str(file), "--", "--model-path", FALCON])
    assert status == (0 if is_served else 1)
    assert json.loads(file.read_text(encoding="utf-8"))["served"] == is_served


def test_a_platform_without_cards_has_no_memory_of_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "--platform", "cpu", "--gpu-memory", "80GB", "--model-path", GDN]) == 2
    assert "--gpu-memory must be left out with --platform cpu, which has no card" in capsys.readouterr().err


# The flags


def test_flags_of_sglang_need_no_separator(capsys: pytest.CaptureFixture[str]) -> None:
    shown = []
    for argv in (
        ["--model-path", GDN, "--tp-size", "2", "--gpu-memory=141GB"],
        ["--gpu-memory", "141GB", "--model-path", GDN, "--tp-size", "2"],
        ["--gpu-memory", "141GB", "--", "--model-path", GDN, "--tp-size", "2"],
    ):
        assert cli.main(["check", "--platform", "cuda", *argv]) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1] == shown[2]
    assert "--tp-size 2" in shown[0]
    assert cli.main(["check", "--platform", "cuda", "--model-path", GDN, "--tp-sise", "2"]) == 2
    assert "sglang: unrecognized arguments: --tp-sise 2" in capsys.readouterr().err


def test_what_no_other_command_knows_is_still_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["tiny-model", "--family", "gdn", "--out", "x", "--tp-size", "2"])
    assert ended.value.code == 2
    assert "unrecognized arguments: --tp-size 2" in capsys.readouterr().err


# The weights


@pytest.mark.parametrize(
    ("quantization", "flag", "bits"),
    [
        (None, None, None),
        ({}, "fp8", 8),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, None, 8),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, None, 4 + 20 / 128),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64}, None, 4 + 20 / 64),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, None, 8),
        (None, "modelopt_fp4", 4.5),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, None, 4.5),
        ({"quant_algo": "FP8"}, "modelopt", 8),
        ({"quant_method": "modelopt_fp4"}, "modelopt_fp4", 4.5),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"0": {"weights": {"num_bits": 8}}}},
            None,
            8,
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"0": {"weights": {"num_bits": 4, "group_size": 16, "type": "float"}}},
            },
            None,
            4.5,
        ),
    ],
)
def test_a_weight_has_the_bits_of_its_quantisation(
    quantization: dict[str, Any] | None, flag: str | None, bits: float | None
) -> None:
    assert bits_of(quantization, flag) == bits


def test_a_quantisation_that_is_not_known_is_said_and_not_guessed(models: dict[str, Path]) -> None:
    with pytest.raises(ValueError, match="in the quantisation gguf is not known here: give --weights"):
        bits_of(None, "gguf")
    for group in ({"weights": None}, {"weights": {"type": "float"}}, {}):
        with pytest.raises(ValueError, match="compressed-tensors is not known here: give --weights"):
            bits_of({"quant_method": "compressed-tensors", "config_groups": {"0": group}}, None)
    argv = ("--quantization", "gguf", "--mem-fraction-static", "0.8")
    (note,) = checked(*argv, machine=card("80GB")).notes
    assert "give --weights" in note
    assert checked(*argv, machine=card("80GB", "20GB")).notes == ()


def test_a_configuration_that_names_no_quantisation_has_none(tmp_path: Path, models: dict[str, Path]) -> None:
    (tmp_path / "config.json").write_text((models["gdn"] / "config.json").read_text())
    (tmp_path / "hf_quant_config.json").write_text('{"producer": {"name": "modelopt"}}')
    assert Model.find(str(tmp_path), None).quantization is None


def test_the_vocabulary_of_a_quantised_model_keeps_16_bits() -> None:
    profile = load(GDN)
    assert weight_bytes(profile, None) == weight_bytes(profile, 16) == 2 * profile.num_parameters
    vocabulary = 2 * 2048 * 151936
    assert weight_bytes(profile, 8) == profile.num_parameters + vocabulary
    # The published checkpoints: 163 GB and 82 GB.
    assert weight_bytes(profile, None) == pytest.approx(160e9, rel=0.02)
    assert weight_bytes(profile, 8) == pytest.approx(81e9, rel=0.02)


def test_the_weights_are_those_of_the_configuration_the_flag_or_the_name(tmp_path: Path) -> None:
    def weights(*argv: str, model: str = GDN, config: Path | None = None) -> int | None:
        pools = checked("--tp-size", "8", *argv, model=model, machine=card("80GB"), config=config).pools
        assert pools is not None
        return pools.weight_bytes

    fp8 = weights("--quantization", "fp8")
    assert fp8 == weights(model=GDN + "-FP8") == weight_bytes(load(GDN), 8) // 8
    assert weights() == weight_bytes(load(GDN), None) // 8
    fields = Model.find(GDN, None).hf_config.to_dict()
    fields["quantization_config"] = {"quant_method": "fp8"}
    (tmp_path / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    assert weights(config=tmp_path) == fp8
    del fields["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    assert weights(config=tmp_path) == weights()
    beside = {"quantization": {"quant_algo": "NVFP4"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(beside), encoding="utf-8")
    assert weights(config=tmp_path) == weight_bytes(load(GDN), 4.5) // 8


# The memory


def reserved(num_tokens: int, max_batch: int, num_prefill_sizes: int, num_ranks: int, memory_mib: float) -> float:
    """SGLang's rule in words: activations by the chunk of a prefill, graphs by their sizes, at least 10 GiB."""
    mib = 512 + 1.5 * num_tokens + 128 * num_ranks + 2 * max_batch + 8 * num_prefill_sizes
    return max(mib, 10 * 1024) if memory_mib > 60 * 1024 else mib


@pytest.mark.parametrize(
    ("memory", "num_ranks", "num_tokens", "max_batch", "num_prefill_sizes"),
    [
        ("24GiB", 1, 4096, 48, 50),
        ("80GB", 1, 8192, 256, 58),
        ("80GB", 4, 8192, 512, 58),
        ("141GB", 2, 8192, 256, 58),
        ("192GB", 8, 16384, 512, 74),
    ],
)
def test_the_static_fraction_is_sglangs_for_a_card_of_that_memory(
    memory: str, num_ranks: int, num_tokens: int, max_batch: int, num_prefill_sizes: int
) -> None:
    found = checked("--tp-size", str(num_ranks), machine=card(memory, "1GB")).pools
    mib = MemorySize.parse(memory).amount / 2**20
    fraction = round((mib - reserved(num_tokens, max_batch, num_prefill_sizes, num_ranks, mib)) / mib, 3)
    assert found is not None
    assert found.num_bytes == int(MemorySize.parse(memory).amount * fraction) - 10**9


def test_a_fraction_that_is_given_is_taken() -> None:
    found = checked("--mem-fraction-static", "0.5", machine=card("80GB", "1GB")).pools
    assert found is not None
    assert found.num_bytes == 39 * 10**9


def test_a_model_with_images_or_latent_attention_has_the_fraction_of_its_kind() -> None:
    def bytes_left(model: Model, *argv: str) -> int:
        found = answer(CommandLine.parse(["--model-path", GDN, *argv]), model, card("141GB", "1GB"))
        assert found.pools is not None
        assert found.pools.num_bytes is not None
        return found.pools.num_bytes

    text, images = Model.find(GDN, None), Model.find(IMAGES, None)
    images = replace(images, fields={**images.fields, "vision_config": {"depth": 27, "hidden_size": 1152}})
    assert bytes_left(images) < bytes_left(images, "--language-only") == bytes_left(text)
    # The graphs of latent attention are dearer, which shows where all graphs take more than the floor of 10 GiB.
    many = ("--cuda-graph-max-bs-decode", "4096", "--cuda-graph-backend-prefill", "breakable")
    assert bytes_left(Model.find(KDA, None), *many) < bytes_left(text, *many)


def test_the_memory_of_the_card_is_asked_while_the_answer_is_made_alone() -> None:
    before = memory_hook.get_device_memory_capacity
    checked(machine=card("80GB", "1GB"))
    assert memory_hook.get_device_memory_capacity is before


# Room


def test_a_model_that_does_not_fit_is_not_served_and_what_would_fit_is_named() -> None:
    found = checked(machine=card("80GB"), model=GDN + "-FP8")
    (reason,) = found.reasons
    assert reason.startswith("--gpu-memory 80 GB: 80.")
    assert reason.endswith("of a request; what would fit: --tp-size 2 or a card of 96 GB")
    assert checked("--tp-size", "2", machine=card("80GB"), model=GDN + "-FP8").is_served
    assert checked(machine=card("96GB"), model=GDN + "-FP8").is_served
    assert checked(machine=card("80GB"), model=SMALL).is_served


def test_what_is_not_counted_is_said() -> None:
    (note,) = checked(machine=card("10GB"), model="lmsys/vicuna-7b-v1.5").notes
    assert note == "--gpu-memory: the pools of a cache that is SGLang's own are not counted"
    assert checked(model="lmsys/vicuna-7b-v1.5").notes == ()


def test_weights_that_are_counted_may_be_given_instead() -> None:
    (counted,) = checked(machine=card("80GB")).reasons
    (given,) = checked(machine=card("80GB", "159GB")).reasons
    assert "159 GB of weights on a card (give --weights if they take less) leave no room" in counted
    assert "159 GB of weights on a card leave no room" in given


def test_what_sglang_logs_of_the_machine_is_not_the_answers(caplog: pytest.LogCaptureFixture) -> None:
    checked(machine=card("80GB"), model=KDA)
    assert not caplog.records
    logging.getLogger("sglang").warning("still heard")
    assert len(caplog.records) == 1


def test_weights_that_are_given_are_shared_by_more_ranks() -> None:
    (reason,) = checked(machine=card("80GB", "70GB")).reasons
    assert "--gpu-memory 80 GB: 70 GB of weights on a card leave no room" in reason
    assert "what would fit: --tp-size 2 or" in reason


def test_too_few_slots_by_a_flag_are_the_flags_fault() -> None:
    of_sglang, ours = checked("--max-mamba-cache-size", "2", machine=card("80GB", "10GB")).reasons
    assert of_sglang.startswith("sglang 0.5.23: --max-mamba-cache-size must give at least 3")
    assert ours.startswith("--max-mamba-cache-size must give at least 4")


def test_the_command_ends_with_1_where_nothing_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "answer.json"
    argv = ["check", "--platform", "cuda", "--gpu-memory", "80GB", "--json", str(file), "--model-path"]
    assert cli.main([*argv, GDN]) == 1
    read = json.loads(file.read_text(encoding="utf-8"))
    assert read["served"] is False
    (reason,) = read["reasons"]
    assert "\n" not in reason
    assert "--tp-size" in reason
    assert "not served: 1 reason" in capsys.readouterr().out
    assert cli.main([*argv, SMALL]) == 0
    assert json.loads(file.read_text(encoding="utf-8"))["served"] is True
