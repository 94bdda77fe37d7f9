"""Everything that needs a Hopper card, in one command of a few minutes.

    1  the kernels against their references and SGLang's own (`test/kernels`), then their benchmark
    2  two small hybrid models on servers in bfloat16, overlap on, against servers without a prefix cache,
       with the control (`test/engine/test_half_precision.py`)

Each step is a process with a time limit. The kernels need torch 2.11 and Triton 3.6 or newer and, to be held against
SGLang's own, its Python sources; a server needs the SGLang that `version.py` names. What a machine lacks is said in one
line and the other step runs all the same.

Exit status: 0 all green, 1 something red, 77 no such card or a step that could not run.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
SKIPPED = 77
KERNELS_LIMIT_S, SERVERS_LIMIT_S = 240.0, 220.0
KERNELS = ("benchmark/kernels", "--tokens", "1024,16384", "--repetitions", "5")
SERVERS = ("-m", "pytest", "-q", "-m", "slow", "-p", "no:cacheprovider", "test/engine/test_half_precision.py")


def missing_card() -> str:
    """What stands in the way of any step, in one line; empty where nothing does."""
    try:
        import torch
    except ImportError:
        return "needs torch 2.11 or newer, which this Python lacks"
    if not torch.cuda.is_available():
        return "needs a CUDA device, none found"
    major, minor = torch.cuda.get_device_capability()
    if (major, minor) < (9, 0):
        return f"needs compute capability 9.0 or higher, got {major}.{minor}"
    return ""


def missing_server() -> str:
    """What keeps this Python from running a server, in one line; empty where nothing does."""
    sys.path.insert(0, str(ROOT / "python"))
    from importlib.metadata import PackageNotFoundError, entry_points, version

    from marconi.engine.version import VERIFIED_SGLANG

    try:
        found = version("sglang")
    except PackageNotFoundError:
        return f"a server needs sglang {VERIFIED_SGLANG[-1]}, which this Python lacks"
    if found not in VERIFIED_SGLANG:
        return f"a server needs sglang {VERIFIED_SGLANG[-1]}, got {found}"
    if not any(each.name == "marconi" for each in entry_points(group="sglang.srt.plugins")):
        return "a server needs this project installed: pip install -e '.[server]'"
    return ""


def run(name: str, arguments: Sequence[str], limit_s: float) -> bool:
    """Run this Python on `arguments` in the checkout; True if it exits with 0 in time."""
    print(f"cuda-check: {name}", flush=True)
    folders = [str(ROOT / "python"), str(ROOT / "sgl-kernel-ext"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, folders))}
    try:
        done = subprocess.run(  # noqa: S603 - this Python
            [sys.executable, *arguments], cwd=ROOT, env=environment, timeout=limit_s, check=False
        )
    except subprocess.TimeoutExpired:
        print(f"cuda-check: {name}: not ended after {limit_s:g} s", flush=True)
        return False
    return done.returncode == 0


def main() -> int:
    """Run both steps."""
    if missing := missing_card():
        print(f"cuda-check: skipped: {missing}")
        return SKIPPED
    green = [run("kernels", KERNELS, KERNELS_LIMIT_S)]
    if missing := missing_server():
        print(f"cuda-check: servers: skipped: {missing}")
    else:
        green.append(run("servers", SERVERS, SERVERS_LIMIT_S))
    if not all(green):
        return 1
    return SKIPPED if missing else 0


if __name__ == "__main__":
    sys.exit(main())
