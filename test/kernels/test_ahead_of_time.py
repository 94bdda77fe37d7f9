"""Kernels compile for the cards that models run on, fit into them, and are compiled before the first request.

`ahead_of_time.py` compiles, in a process of its own for each target and with a cache of its own: Triton says what a
kernel takes only when it compiles it. What it said is kept in the environment, by the source of the kernels and of that
program. How long a compilation took is printed (`-s`) and held to nothing.
"""

import hashlib
import json
import os
import subprocess
import sys
import time
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

import sgl_kernel_ext

from .ahead_of_time import INVALID, SPILLS, Compiled

MAX_SHARED_BYTES = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
"""Of one block, by compute capability (CUDA programming guide, technical specifications)."""
KEPT = Path(sys.prefix) / ".compilations"
"""What the compiler said; a new environment has nothing."""
MAX_REGISTERS = {"gated_delta_rule": 128, "kda": 128, "mamba2": 192}
"""Of a thread on Hopper with inputs in bfloat16: 4 blocks of 128 threads on a processor, and 2."""

MAX_COMPILATIONS = {
    "draft_ends.kernel._find_kernel": 1,
    "gated_delta_rule.kernel._advance_kernel": 8,
    "gated_delta_rule.kernel._checkpoint_kernel": 4,
    "kda.kernel._checkpoint_kernel": 4,
    "mamba2.kernel._checkpoint_kernel": 2,
    "short_conv.kernel._checkpoint_kernel": 4,
    "state_copy.kernel._copy_kernel": 2,
}
"""Over all models and 400 batches of random sizes: a kernel is compiled for a model's shapes and dtypes, no batch's."""


def source_digest() -> str:
    """A digest of all that a compilation hangs on."""
    digest = hashlib.blake2b(f"{version('triton')} {version('torch')}".encode(), digest_size=16)
    folders = Path(sgl_kernel_ext.__file__).parent, Path(__file__).parent
    for path in sorted(path for folder in folders for path in folder.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def run(folder: Path, *command: str) -> Any:
    """Return what `ahead_of_time.py` says to `command`, with a cache of Triton in `folder`, or what it said before."""
    said = KEPT / f"{'-'.join(command)}-{source_digest()}.json"
    if said.exists():
        return json.loads(said.read_text(encoding="utf-8"))
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    paths = (str(Path(__file__).parents[1]), environment.get("PYTHONPATH", ""))
    made = subprocess.run(
        [sys.executable, "-m", "kernels.ahead_of_time", *command],
        env={**environment, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "TRITON_CACHE_DIR": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    found = json.loads(made.stdout)
    KEPT.mkdir(exist_ok=True)
    said.write_text(made.stdout, encoding="utf-8")
    return found


@pytest.fixture(
    scope="module",
    params=[pytest.param(each, marks=pytest.mark.slow) for each in MAX_SHARED_BYTES],
    ids=lambda capability: f"sm_{capability}",
)
def capability(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def compiled(capability: int, tmp_path_factory: pytest.TempPathFactory) -> list[Compiled]:
    start_s = time.monotonic()
    made = run(tmp_path_factory.mktemp("triton"), "resources", str(capability))
    print(f"sm_{capability}: {len(made)} compilations in {time.monotonic() - start_s:.1f} s")
    return [Compiled(**each) for each in made]


@pytest.fixture(scope="module")
def sound(compiled: list[Compiled]) -> list[Compiled]:
    """Without what is broken on purpose."""
    return [each for each in compiled if each.case not in (SPILLS, INVALID)]


def test_every_kernel_compiles(sound: list[Compiled]) -> None:
    assert not [each for each in sound if each.error]
    assert {each.kernel for each in sound} == kernels()


def test_no_kernel_spills(sound: list[Compiled]) -> None:
    assert not [each for each in sound if each.spilled_bytes or each.stack_bytes]


def test_a_block_fits_into_shared_memory(sound: list[Compiled], capability: int) -> None:
    assert not [each for each in sound if not 0 <= each.shared_bytes <= MAX_SHARED_BYTES[capability]]


def test_registers_leave_room_for_other_blocks_on_hopper(sound: list[Compiled], capability: int) -> None:
    if capability == 90:
        over = {each: MAX_REGISTERS.get(each.kernel.split(".")[1], 128) for each in sound if not each.is_exact}
        assert over
        assert not [each for each, limit in over.items() if not 0 < each.registers <= limit]


def test_what_is_broken_is_seen(compiled: list[Compiled]) -> None:
    """Negative control: blocks that do not fit into registers, and a kernel that is none."""
    (spilling,) = (each for each in compiled if each.case == SPILLS)
    assert spilling.spilled_bytes > 1000
    assert spilling.stack_bytes > 1000
    (invalid,) = (each for each in compiled if each.case == INVALID)
    assert "arange" in invalid.error


def test_after_the_warm_up_no_batch_compiles_a_kernel(tmp_path: Path) -> None:
    """Negative control: without it, each kernel is compiled while a request waits, a few times for all models."""
    met = run(tmp_path, "specializations")
    assert not met["warm"]
    assert met["cold"].keys() == kernels() == {f"sgl_kernel_ext.{name}" for name in MAX_COMPILATIONS}
    over = {name: met["cold"][f"sgl_kernel_ext.{name}"] for name in MAX_COMPILATIONS}
    assert all(count <= MAX_COMPILATIONS[name] for name, count in over.items()), over


def kernels() -> set[str]:
    """Names of all functions of the package that are launched."""
    root = Path(sgl_kernel_ext.__file__).parent
    modules = [import_module(f"sgl_kernel_ext.{path.parent.name}.kernel") for path in root.glob("*/kernel.py")]
    return {f"{each.__name__}.{name}" for each in modules for name in vars(each) if name.endswith("_kernel")}
