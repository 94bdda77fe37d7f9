"""`marconi check` says of a command line what a server that starts says of it, on both platforms (`starting.py`).

Where the server refuses, its words are a reason of the check's, or the check names the option in words of its own
(`OTHER_WORDS`).
"""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

pytest.importorskip("sglang", reason="the server extra is not installed: pip install '.[server]'")

from marconi.check.answer import answer
from marconi.check.line import CommandLine
from marconi.check.machine import Machine, Platform
from marconi.engine.cpu_platform import PLATFORM
from marconi.engine.launch.flags import BACKEND
from marconi.engine.launch.model import Model
from marconi.engine.launch.weights import named_quantization
from marconi.model import catalog

from .launches import Launch, launches
from .processes import free_ports

pytestmark = pytest.mark.usefixtures("loaded_plugins")

DENSE = "lmsys/vicuna-7b-v1.5"
RECIPES = "MARCONI_RECIPES"
"""Names a file of recipes, such as `make recipes` reads."""
EDGES = [
    Launch("Qwen/Qwen3-Next-80B-A3B-Instruct", tuple(flags.split()))
    for flags in ("--ep-size 2", "--max-mamba-cache-size 4", "--max-total-tokens 100 --page-size 64", "--tp-size 3")
]
OTHER_WORDS = {
    "state cache is too small to serve any requests": "--max-mamba-cache-size must give at least",
    "is not divisible by": "must divide the number of",
    "heads over": "must divide the number of",
}
"""What the server says, and what is said of the same option before."""


@pytest.mark.slow
@pytest.mark.parametrize("platform", Platform)
def test_random_command_lines_have_a_servers_verdict(platform: Platform, tmp_path: Path) -> None:
    served = compare([*EDGES, *launches(seed=1, num=80)], platform, tmp_path)
    assert 16 < served < 70, "both verdicts are among them"


@pytest.mark.slow
@pytest.mark.skipif(RECIPES not in os.environ, reason=f"{RECIPES} names no file of recipes")
@pytest.mark.parametrize("platform", Platform)
def test_recipes_have_a_servers_verdict(platform: Platform, tmp_path: Path) -> None:
    content = json.loads(Path(os.environ[RECIPES]).read_text(encoding="utf-8"))
    recipes = content["recipes"] if isinstance(content, dict) else content
    assert compare([Launch(each["model"], tuple(shlex.split(each["args"]))) for each in recipes], platform, tmp_path)


def compare(lines: Sequence[Launch], platform: Platform, folder: Path) -> int:
    """Hold the check's answers against what servers say; returns how many are served."""
    draft, port = str(folder_of(DENSE, folder)), str(free_ports(2))
    filled = [
        Launch(line.model, tuple(word.replace("{draft}", draft).replace("{port}", port) for word in line.flags))
        for line in lines
    ]
    said = said_by_servers(filled, platform, folder)
    answers = [reasons_of(line, Machine(platform)) for line in filled]
    assert list(disagreements(filled, said, answers, folder)) == []
    other = ["refused" if words is None else None for words in said]
    assert len(list(disagreements(filled, other, answers, folder))) == len(filled), "a wrong verdict is found"
    return said.count(None)


def said_by_servers(lines: Sequence[Launch], platform: Platform, folder: Path) -> list[str | None]:
    """The words in which a server refuses each; None where it is served."""
    kept = {name: value for name, value in os.environ.items() if name not in ("SGLANG_PLATFORM", "TRITON_INTERPRET")}
    path = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    found = {"SGLANG_PLATFORM": PLATFORM} if platform is Platform.CPU else {}
    starts = [
        ["--model-path", str(folder_of(line.model, folder)), "--radix-cache-backend", BACKEND, *line.flags]
        for line in lines
    ]
    ended = subprocess.run(
        [sys.executable, "-m", "engine.starting"],
        env=kept | found | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"},
        input=json.dumps(starts),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert not ended.returncode, ended.stderr
    said: list[str | None] = json.loads(ended.stdout.splitlines()[-1])
    return said


def disagreements(
    lines: Sequence[Launch], said: Sequence[str | None], answers: Sequence[tuple[str, ...]], folder: Path
) -> Iterator[str]:
    """Each line of which a server and the check say something else."""
    for line, words, reasons in zip(lines, said, answers, strict=True):
        if words is None:
            is_said = not reasons
        else:
            spelt = Model.find(line.model, None).spelt
            plain = " ".join(words.replace(str(folder_of(line.model, folder)), spelt).split())
            is_said = any(is_the_same(plain, reason) for reason in reasons)
        if not is_said:
            yield f"{line.model} {shlex.join(line.flags)}\n  server: {words}\n  check: {reasons}"


def reasons_of(line: Launch, machine: Machine) -> tuple[str, ...]:
    try:
        asked = CommandLine.parse(["--model-path", line.model, *line.flags])
        return answer(asked, Model.find(line.model, None), machine).reasons
    except ValueError as error:
        return (str(error),)


def is_the_same(said: str, reason: str) -> bool:
    """Whether the server's words are the reason, or about the same option."""
    ours = any(theirs in said and other in reason for theirs, other in OTHER_WORDS.items())
    words = reason.partition(": ")[2] if reason.startswith("sglang") else reason
    return ours or words.removesuffix(" ...") in said


def folder_of(hub: str, folder: Path) -> Path:
    """A folder with the configuration of a model of the hub."""
    found = folder / hub.replace("/", "_")
    if not found.exists():
        name = catalog.name_of(hub)
        fields = dict(catalog.KINDS[hub]) if name not in catalog.CONFIGS else dict(catalog.CONFIGS[name])
        if name in catalog.CONFIGS:
            fields["architectures"] = [catalog.ARCHITECTURES[name]]
            if (quantization := named_quantization(hub)) is not None:
                fields["quantization_config"] = dict(quantization)
        # A checkpoint says how long its context is, and may have a draft model in it.
        fields["max_position_embeddings"] = 2**20
        (found / "dspark").mkdir(parents=True)
        (found / "dspark" / "config.json").write_text(json.dumps(dict(catalog.CONFIGS["vicuna-7b"])), encoding="utf-8")
        (found / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    return found
