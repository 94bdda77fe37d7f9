"""What `make cuda-check` starts on a card, as far as a machine without one can tell.

Its steps name tests that exist, its launches are served as `marconi check` answers for CUDA, its wide model is
one that SGLang's default kernels on Hopper take, and its reference tells a wrong state from bfloat16's rounding. On a
card that is not there (`fake_cuda_launches.py`) its servers start up to their weights, their layers write every planned
state of a prefill and none in the steps after it, and its benchmark of the kernels runs each of its rows. So does a
server of Kimi-Linear-48B, which it has no step for: there is no small model of KDA.
"""

import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from marconi import cli
from marconi.model import catalog

from . import test_half_precision
from .client import Completion, random_tokens
from .conftest import server_args
from .exact_model import ExactModel
from .scenarios import EXTRA_BUFFER, Exchange
from .stock_answers import WITHOUT_GRAPHS, verdict, write_model
from .test_half_precision import (
    HALF,
    MAX_MEDIAN_ERROR,
    ON_A_CARD,
    ON_A_GPU,
    RED_ANSWERS,
    WIDE,
    Case,
    is_right,
    leave_for_stock,
    medians,
    write_wide,
)

ROOT = Path(__file__).parents[2]
REFUSED = "refused"
"""A launch with a flag that is refused."""
KIMI = "kimi-linear-48b-a3b"
"""Of the catalog, whose configurations do not name the class."""
STARTED = (*ON_A_CARD, Case("kda", KIMI, server_args(EXTRA_BUFFER)))
"""All that is started up to its weights."""
NUM_REQUESTS, NUM_STEPS, NUM_LAYERS = 3, 3, 2
DECODES = {
    (WIDE, False): "fused_recurrent_gated_delta_rule_packed_decode_kernel",
    (WIDE, True): "fused_sigmoid_gating_delta_rule_update_kernel",
    ("mamba2", False): "_selective_scan_update_kernel",
    (KIMI, False): "fused_recurrent_kda_packed_decode_kernel",
}
"""SGLang's kernel that decodes, or verifies drafts, by the model and whether there are drafts."""


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """What a command line leaves in the environment goes; torch's threads are as before."""
    before, num_threads = dict(os.environ), torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)
    for name in set(os.environ) - set(before):
        del os.environ[name]


@pytest.fixture
def cuda_check(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmark"))
    import cuda_check

    return cuda_check


@pytest.fixture(scope="module")
def dry_run(model_of: Callable[[Case], Path]) -> dict[str, dict[str, Any]]:
    """What each launch and each row of the benchmark found on a card that is not there, and what planted faults did."""
    sys.path.insert(0, str(ROOT / "benchmark"))
    try:
        from cuda_check import PARTS
    finally:
        sys.path.pop(0)
    launches = {case.name: command_line(case, model_of) for case in STARTED}
    launches[REFUSED] = [*launches[ON_A_CARD[0].name], "--enable-pdmux"]
    _, *arguments = PARTS["speed"][0].arguments
    # Mamba2's too, which `cuda-check` has no time for.
    arguments += ["--models", "qwen3-next-80b-a3b,kimi-linear-48b-a3b,nemotron-h-8b"]
    kept = {name: value for name, value in os.environ.items() if name not in ("SGLANG_PLATFORM", "TRITON_INTERPRET")}
    path = os.pathsep.join([str(ROOT / "test"), *filter(None, [os.environ.get("PYTHONPATH")])])
    ended = subprocess.run(
        [sys.executable, "-m", "engine.fake_cuda_launches"],
        env=kept | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"},
        input=json.dumps({"launches": launches, "speed": arguments}),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert not ended.returncode, ended.stderr
    found: dict[str, dict[str, Any]] = json.loads(ended.stdout.splitlines()[-1])
    return found


def command_line(case: Case, model_of: Callable[[Case], Path]) -> list[str]:
    return ["--model-path", str(model_of(case)), *case.args, *HALF, *ON_A_GPU]


@pytest.fixture(scope="module")
def model_of(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], Path]:
    wide = tmp_path_factory.mktemp("wide") / "model"
    write_wide(wide)
    kimi = tmp_path_factory.mktemp("kimi")
    config = {**catalog.CONFIGS[KIMI], "architectures": ["KimiLinearForCausalLM"]}
    (kimi / "config.json").write_text(json.dumps(config))
    paths = {**models, WIDE: wide, KIMI: kimi}
    return lambda case: paths[case.model]


def test_every_test_that_a_step_names_is_found(cuda_check: Any) -> None:
    of_pytest = [step for part in cuda_check.PARTS.values() for step in part if step.is_pytest]
    named = [each for step in of_pytest for each in step.arguments if each.startswith("test/") and "::" in each]
    files = [each for step in of_pytest for each in step.arguments if each.startswith("test/") and "::" not in each]
    assert files
    assert all((ROOT / each).exists() for each in files)
    for each in named:
        file, function, case = re.split(r"::|\[", each.removesuffix("]"))
        assert ROOT / file == Path(test_half_precision.__file__)
        assert "serving" in inspect.signature(getattr(test_half_precision, function)).parameters
        assert case in {each.name for each in ON_A_CARD}
    assert {each.partition("[")[2] for each in named} == {f"{case.name}]" for case in ON_A_CARD}


def test_every_program_that_a_step_names_is_there(cuda_check: Any) -> None:
    for step in (*(step for part in cuda_check.PARTS.values() for step in part), cuda_check.STOCK):
        if step.arguments[0] == "-m":
            assert step.is_pytest or (ROOT / "test" / (step.arguments[1].replace(".", "/") + ".py")).is_file()
        else:
            assert (ROOT / step.arguments[0]).exists()
    assert cuda_check.RED_ANSWERS == RED_ANSWERS
    for ignored in cuda_check._ON_A_HOST:
        assert (ROOT / ignored).is_file()


def test_no_step_repeats_another_ones_tests(cuda_check: Any) -> None:
    """The kernels' tests have a limit of their own, which the benchmark's does not have room for."""
    checkpoints, _ = cuda_check.PARTS["speed"]
    assert "--skip-tests" in checkpoints.arguments
    assert sum(map(cuda_check.limit_s, cuda_check.PARTS.values())) <= cuda_check.BUDGET_S


@pytest.mark.slow
def test_the_programs_of_the_speed_part_take_their_arguments(cuda_check: Any) -> None:
    checkpoints, host_time = cuda_check.PARTS["speed"]
    for step in (checkpoints, host_time):
        ended = subprocess.run(
            [sys.executable, *step.arguments, "--no-such-option"], cwd=ROOT, capture_output=True, text=True, timeout=120
        )
        assert ended.stderr.endswith("error: unrecognized arguments: --no-such-option\n"), ended.stderr


@pytest.mark.parametrize("case", ON_A_CARD, ids=lambda case: case.name)
def test_its_launches_are_served_on_a_cuda_machine(
    case: Case, model_of: Callable[[Case], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = command_line(case, model_of)
    status = cli.main(["check", "--platform", "cuda", "--json", str(tmp_path / "answer.json"), "--", *args])
    assert status == 0, capsys.readouterr()
    assert "states kept by judicious" in capsys.readouterr().out
    assert set(case.stock_args) <= set(case.args), "stock is asked with flags of the case"


@pytest.mark.slow
@pytest.mark.parametrize("case", STARTED, ids=lambda case: case.name)
def test_its_servers_start_up_to_their_weights_and_their_layers_write_every_planned_state(
    case: Case, dry_run: dict[str, dict[str, Any]]
) -> None:
    found = dry_run[case.name]
    assert not found["error"]
    assert found["way"] == "FromChunks"
    assert set(found["num_written"]) == {found["num_layers"]}
    assert [wait for wait in found["waits"] if wait[1] == "ours"] == []
    assert found["facts"]["page_tokens"] == case.page_size
    assert (found["facts"]["kernel"] == "flashinfer") == case.is_flashinfer
    assert bool(found["num_operations"]) == bool(found["facts"]["num_nodes"]) == case.has_drafts


@pytest.mark.slow
@pytest.mark.parametrize("case", STARTED, ids=lambda case: case.name)
def test_its_layers_decode_after_a_prefill_and_keep_no_state_there(
    case: Case, dry_run: dict[str, dict[str, Any]]
) -> None:
    """A layer on the host ends a case; waits of these steps are among those of the launch, seen above."""
    decodes = dry_run[case.name]["facts"]["decodes"]
    assert (decodes["kept"], decodes["steps"]) == (0, 0)
    assert DECODES[case.model, case.has_drafts] in decodes["kernels"]
    assert "_fused_replay_state_indices_kernel" in decodes["kernels"], "no step ran by the decode graph"
    # One launch a step for all layers, or one for each; a step with drafts commits what it accepted elsewhere.
    assert decodes["tracked"] == (0 if case.has_drafts else NUM_STEPS * (NUM_LAYERS if case.model == "mamba2" else 1))


@pytest.mark.slow
def test_a_request_without_tracking_slots_begins_with_the_paddings_and_ends_with_its_working_slot(
    dry_run: dict[str, dict[str, Any]],
) -> None:
    """What this project writes beside states: the padding's slot for each request that has none, and a state's slot."""
    written = {case.name: dry_run[case.name]["facts"]["decodes"] for case in STARTED}
    assert {name: each["begin"] for name, each in written.items()} == {
        "gdn-flashinfer": NUM_REQUESTS,
        "gdn-triton-drafts": 0,
        "mamba2-pages-host": 0,
        "gdn-one-pool": NUM_REQUESTS,
        "gdn-one-pool-drafts": 0,
        "kda": NUM_REQUESTS,
    }
    slot = "torch.int64 (1,) cuda"
    assert {name: (each["end"], each["end_slot"]) for name, each in written.items()} == {
        "gdn-flashinfer": (1, slot),
        "gdn-triton-drafts": (0, None),
        "mamba2-pages-host": (1, slot),
        "gdn-one-pool": (1, slot),
        "gdn-one-pool-drafts": (0, None),
        "kda": (1, slot),
    }


@pytest.mark.slow
def test_its_benchmark_runs_every_row_beside_sglangs_layers(dry_run: dict[str, dict[str, Any]]) -> None:
    found = {name: each for name, each in dry_run.items() if "missing" in each["facts"]}
    assert len({name.split()[0] for name in found}) == 3
    assert {name: (each["error"], each["facts"]["missing"]) for name, each in found.items()} == dict.fromkeys(
        found, ("", [])
    )


@pytest.mark.slow
def test_negative_control_a_refused_launch_and_an_unwritten_state_are_seen(dry_run: dict[str, dict[str, Any]]) -> None:
    assert "PD-Multiplexing is not compatible" in dry_run[REFUSED]["error"]
    assert 0 in dry_run["planted: a kernel that is not met"]["num_written"]


@pytest.mark.slow
def test_negative_control_a_state_that_a_later_step_keeps_is_seen(dry_run: dict[str, dict[str, Any]]) -> None:
    for fault in ("a plan that decodes", "a plan that verifies"):
        found = dry_run[f"planted: {fault}"]
        assert max(found["num_written"]) > found["num_layers"]
        assert found["facts"]["decodes"]["kept"]


@pytest.mark.slow
def test_negative_control_faults_of_a_decode_are_seen(dry_run: dict[str, dict[str, Any]]) -> None:
    """A wait for the card, slots of the host, and slots that stay what SGLang fills them with."""
    ((kind, line),) = (
        (kind, line) for kind, whose, line in dry_run["planted: a wait at an end"]["waits"] if whose == "ours"
    )
    assert kind == "__int__()"
    assert line.startswith("scheduler.py:")
    assert "must be on cuda, got cpu" in dry_run["planted: slots on the host"]["error"]
    assert dry_run["planted: slots without padding"]["facts"]["decodes"]["begin"] == 0


def test_negative_control_a_launch_that_is_not_served_is_seen(model_of: Callable[[Case], Path]) -> None:
    case = ON_A_CARD[0]
    args = [*command_line(case, model_of), "--pp-size", "2"]
    assert cli.main(["check", "--platform", "cuda", "--", *args]) == 1


def test_the_flag_that_stock_is_asked_without_graphs_by_is_sglangs() -> None:
    import argparse

    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    found = parser.parse_args(["--model-path", "x", *WITHOUT_GRAPHS])
    assert found.cuda_graph_backend_prefill == "disabled"


def test_the_wide_models_heads_are_those_that_flashinfer_has_a_kernel_for(model_of: Callable[[Case], Path]) -> None:
    config = json.loads((model_of(ON_A_CARD[0]) / "config.json").read_text())
    assert (config["linear_key_head_dim"], config["linear_value_head_dim"]) == (128, 128)
    assert len({case.model for case in ON_A_CARD if case.is_flashinfer}) == 1


def answered(model: ExactModel, seed: int, num_cached: int, lost: int = 0) -> Exchange:
    """An answer with bfloat16's error, that of a model that has lost the first `lost` tokens of the prompt."""
    prompt = random_tokens(seed, 500)
    answer = random_tokens(seed + 1, 8)
    logprobs = model.logprobs(prompt[lost:], answer)
    return Exchange(tuple(prompt), Completion(tuple(answer), tuple(each + 0.04 for each in logprobs), num_cached))


@pytest.mark.slow
def test_the_reference_tells_a_lost_state_from_rounding(model_of: Callable[[Case], Path]) -> None:
    torch.set_num_threads(1)
    for case in (ON_A_CARD[0], ON_A_CARD[-1]):
        exact = ExactModel(model_of(case))
        anew = [answered(exact, 10 * seed, 0) for seed in range(5)]
        kept = [answered(exact, 10 * seed, 400) for seed in range(6)]
        broken = [answered(exact, 10 * seed, 400, lost=400) for seed in range(6)]
        assert is_right(*medians([*anew, *kept], exact.error))
        assert not is_right(*medians([*anew, *broken], exact.error))
        assert medians([*anew, *broken], exact.error)[1] > 5 * MAX_MEDIAN_ERROR


def test_errors_of_what_is_computed_anew_are_not_forgiven() -> None:
    assert is_right(0.04, 0.05)
    assert not is_right(0.04, 0.07)
    assert not is_right(0.09, 0.09)


def test_what_was_asked_of_a_wrong_server_can_be_asked_of_stock(
    model_of: Callable[[Case], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RED_ANSWERS, str(tmp_path))
    for case in ON_A_CARD:
        model = model_of(case)
        leave_for_stock(case, [Exchange((5, 6), Completion((7,), (0.0,), 0))], (0.1, 0.2))
        document = json.loads((tmp_path / f"{case.name}.red.json").read_text())
        assert document["prompts"] == [[5, 6]]
        assert not any("marconi" in each for each in document["args"])
        write_model(document, tmp_path / case.name)
        written = (tmp_path / case.name / "model.safetensors").read_bytes()
        assert written == (model / "model.safetensors").read_bytes()


def test_the_verdict_says_whether_stock_differs_too() -> None:
    assert verdict(0.04, 0.04) == "stock agrees with the model: the error is this project's"
    assert "stock differs too, with prefill graphs alone" in verdict(0.5, 0.04)
    assert "without prefill graphs" in verdict(0.5, 0.5)


def test_the_wide_model_differs_from_the_usual_one_in_its_recurrent_heads_alone(
    model_of: Callable[[Case], Path], models: dict[str, Path]
) -> None:
    wide, usual = (
        json.loads((path / "config.json").read_text()) for path in (model_of(ON_A_CARD[0]), models["gdn-mtp"])
    )
    assert {name for name in usual if usual[name] != wide[name]} == {"linear_key_head_dim", "linear_value_head_dim"}
    assert wide.keys() == usual.keys()
