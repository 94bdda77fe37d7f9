"""No advice that `marconi check` would refuse: its own hints, and the flags that a plan names, are held against it.

Models, flags and machines are drawn. A hint is a flag that a line tells to add; of a plan it is every flag in it, with
the cards that it counts.
"""

import json
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

pytest.importorskip("sglang", reason="the server extra is not installed: pip install '.[server]'")

from marconi.check.answer import CheckResult, answer
from marconi.check.line import CommandLine
from marconi.check.machine import Machine, Platform
from marconi.engine.launch import split
from marconi.engine.launch.model import Model
from marconi.model import DEVICES, PrefillLatency, catalog, load
from marconi.plan.advice import STOCK
from marconi.plan.plan import make_plan
from marconi.replay.memory import MemorySize, MemoryUnit
from marconi.replay.task import ReplayInputs
from replay.worlds import conversations

from .launches import launches

GDN: Final = "Qwen/Qwen3-Next-80B-A3B-Instruct"
ONE_POOL: Final = "--enable-unified-memory"
TREE: Final = (
    *("--speculative-algorithm", "NEXTN", "--speculative-num-steps", "3", "--speculative-num-draft-tokens", "5"),
    "--speculative-eagle-topk",
)
TWO_POOLS: Final = ("--mamba-full-memory-ratio", "0.9")
CARDS_GB: Final = (None, None, 24, 48, 80, 141)
_FLAG: Final = re.compile(r"--[a-z0-9-]+(?: (?:[0-9.]*[0-9]|disabled|marconi))?")
_FITS: Final = re.compile(r"--tp-size (\d+)|a card of (\d+) GB")
LFM2: Final[dict[str, Any]] = {
    "architectures": ["Lfm2ForCausalLM"],
    "model_type": "lfm2",
    "hidden_size": 1024,
    "intermediate_size": 2560,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 65536,
    "conv_L_cache": 3,
    "layer_types": ["conv", "conv", "full_attention", "conv"],
    "max_position_embeddings": 2**17,
}
"""Its states are SGLang's to keep."""
MAMBA1: Final[dict[str, Any]] = {
    "architectures": ["FalconMambaForCausalLM"],
    "model_type": "falcon_mamba",
    "hidden_size": 1024,
    "num_hidden_layers": 4,
    "state_size": 16,
    "conv_kernel": 4,
    "expand": 2,
    "intermediate_size": 2048,
    "time_step_rank": 64,
    "vocab_size": 65024,
}

pytestmark = pytest.mark.usefixtures("loaded_plugins")


def checked(*argv: str, model: str = GDN, machine: Machine | None = None) -> CheckResult:
    line = CommandLine.parse(["--model-path", model, *argv])
    return answer(line, Model.find(line.model_path, None), machine or Machine())


@pytest.mark.parametrize(
    ("argv", "is_hinted"),
    [
        (("--disaggregation-mode", "prefill"), True),
        (("--disaggregation-mode", "prefill", "--enable-hierarchical-cache"), False),
        (("--speculative-algorithm", "NEXTN", "--enable-hierarchical-cache"), False),
        (("--speculative-algorithm", "NEXTN", "--marconi-admission", "chunk-end"), False),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, tuple) else "",
)
def test_one_pool_is_hinted_at_where_it_would_be_served(argv: tuple[str, ...], is_hinted: bool) -> None:
    said = checked(*argv).split
    assert said is not None
    assert said.endswith("--enable-unified-memory chooses it") == is_hinted
    assert checked(*argv, ONE_POOL).is_served == is_hinted


@pytest.mark.parametrize(
    ("argv", "is_hinted"), [((), True), (("--enable-hierarchical-cache",), False), (("--page-size", "64"), True)]
)
def test_one_branch_of_drafts_is_hinted_at_where_it_would_share_one_pool(
    argv: tuple[str, ...], is_hinted: bool
) -> None:
    said = checked(*argv, *TREE, "2").split
    assert said is not None
    assert said.endswith(split.ONE_BRANCH) == is_hinted
    assert (checked(*argv, *TREE, "1").split == split.ONE_POOL) == is_hinted


@pytest.mark.slow
def test_the_cpu_platform_has_the_one_pool_that_its_server_makes() -> None:
    """In a process that loads no plugin, as `marconi check` is."""
    script = (
        "from marconi.check.answer import answer; from marconi.check.line import CommandLine;"
        "from marconi.check.machine import Machine, Platform; from marconi.engine.launch.model import Model;"
        f"line = CommandLine.parse(['--model-path', {GDN!r}]);"
        "print(answer(line, Model.find(line.model_path, None), Machine(Platform.CPU)).pools.is_one_pool)"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ended.stdout.split()[-1] == "True"


def card(gigabytes: float | None) -> Machine:
    return Machine(memory=None if gigabytes is None else MemorySize(gigabytes * 1e9, MemoryUnit.BYTES))


def hints_of(found: CheckResult, argv: tuple[str, ...], machine: Machine) -> Iterator[tuple[tuple[str, ...], Machine]]:
    """Each launch that the lines of an answer hint at; what does not fit first has to have room."""
    fits = [reason.partition("what would fit: ")[2] for reason in found.reasons if "what would fit: " in reason]
    if len(found.reasons) > len(fits):
        return
    for num_ranks, gigabytes in _FITS.findall(" ".join(fits)):
        yield ((*argv, "--tp-size", num_ranks), machine) if num_ranks else (argv, card(float(gigabytes)))
    if fits:
        return
    if found.split == split.ONE_POOL:
        yield (*argv, ONE_POOL), machine
        yield (*argv, *TWO_POOLS), machine
    elif found.split is not None and found.split.endswith(split.ONE_BRANCH):
        yield (*argv, ONE_POOL, "--speculative-eagle-topk", "1"), machine
    elif found.split is not None and found.split.endswith(f"{ONE_POOL} chooses it"):
        yield (*argv, ONE_POOL), machine


def refused_hints(seed: int, num: int) -> tuple[list[str], int]:
    """Hints on drawn launches that the check refuses, and how many hints there were."""
    rng, wrong, num_hints = random.Random(seed), [], 0  # noqa: S311 - draws, no secrets
    for launch in launches(seed, num):
        if any("{" in word for word in launch.flags):
            continue
        machine = Machine(Platform.CPU) if rng.random() < 0.25 else card(rng.choice(CARDS_GB))
        try:
            found = checked(*launch.flags, model=launch.model, machine=machine)
        except ValueError:
            continue
        for argv, hinted in hints_of(found, launch.flags, machine):
            num_hints += 1
            reasons = checked(*argv, model=launch.model, machine=hinted).reasons
            if reasons:
                wrong.append(f"{launch.model} {argv} on {hinted}: {reasons}")
    return wrong, num_hints


def lines_of_plan(inputs: ReplayInputs, rng: random.Random) -> list[str]:
    """Every line of a plan for a drawn amount of memory, but what it says of stock SGLang, which lacks the backend."""
    memory, host = int(rng.choice((1, 5, 20, 60)) * 1e9), int(rng.choice((0, 0, 100)) * 1e9) * inputs.has_states
    plan = make_plan(inputs, [memory], None, 1, host)
    said = [
        advice.to_json()["sglang_flags"] or ""
        for advice in plan.advice
        if str(STOCK) not in str(advice.to_json()["policy"])
    ]
    ours = [
        line
        for advice in plan.advice
        for line in advice.sentences
        if not line.startswith("Stock SGLang") and f"policy {STOCK} " not in line
    ]
    return [*said, *ours, *plan.verdict]


def refused_flags(models: list[str], seed: int, num: int) -> tuple[list[str], int]:
    """Flags that drawn plans name and the check refuses, and how many there were."""
    rng, wrong, num_named = random.Random(seed), [], 0  # noqa: S311 - draws, no secrets
    for _ in range(num):
        name, device = rng.choice(models), DEVICES[rng.choice(("h100", "a100", "l40s"))]
        model, trace = load(name), conversations(4, 3, seed=rng.randrange(100), unit_tokens=rng.choice((1, 64, 512)))
        inputs = ReplayInputs(trace, model, device, PrefillLatency(model, device))
        lines = lines_of_plan(inputs, rng)
        ranks = re.search(r"--tensor-parallel (\d+) plans", lines[-2] if len(lines) > 1 else "")
        beside = ("--tp-size", ranks[1]) if ranks else ()
        for line in lines:
            named = " ".join(each for each in _FLAG.findall(line) if "parallel" not in each).split()
            if not named:
                continue
            num_named += 1
            try:
                reasons = checked(*named, *beside, model=name, machine=card(device.memory_bytes / 1e9)).reasons
            except ValueError as error:
                reasons = (str(error),)
            if reasons:
                wrong.append(f"{name} on {device.name}: {line!r}: {reasons}")
    return wrong, num_named


@pytest.fixture
def planned(tmp_path: Path) -> list[str]:
    """Models of which a plan can be made: the catalogue's, and two kinds that it lacks."""
    for fields in (LFM2, MAMBA1):
        folder = tmp_path / str(fields["model_type"])
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    return [*catalog.NAMES, *(str(tmp_path / str(fields["model_type"])) for fields in (LFM2, MAMBA1))]


@pytest.mark.slow
def test_hints_and_flags_of_plans_are_served(planned: list[str]) -> None:
    wrong, num_hints = refused_hints(seed=1, num=80)
    others, num_named = refused_flags(planned, seed=1, num=60)
    assert [*wrong, *others] == []
    assert num_hints > 20
    assert num_named > 60
