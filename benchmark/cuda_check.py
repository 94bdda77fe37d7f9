"""Everything that needs a Hopper card, in parts that fit 8 minutes of one together and can be run alone.

    kernels   the kernels against their references and SGLang's own, then FlashInfer's rows against the token-by-token
              recurrence (`test/kernels`)
    servers   small hybrid models in bfloat16, overlap and prefill graphs on: a reused state against the model itself
              (`test/engine/test_half_precision.py`), one server a step, all at once: GDN by FlashInfer with the
              control, GDN by Triton with drafts, Mamba2 with pages of 64 and a host tier, GDN in one pool, and in one
              pool with drafts
    speed     exact checkpoints beside the prefills that they are taken from (`benchmark/kernels`; of Mamba2 by
              itself: SGLang's scan tunes itself for minutes), and host time (`benchmark/hook_cost.py`)

Limits are those of an H100 with 16 processors and compilers that find no cache: over 70 s for the kernels; 51 s until
the last server was ready and 130 s for what it was asked, most of it SGLang's compilations. Where an answer is wrong,
one step more asks stock SGLang the same, with prefill graphs and without: an error that stock shares, or has with
graphs alone (sgl-project/sglang#37606), is not this project's.

The kernels need torch 2.11 and Triton 3.6 or newer and, to be held against SGLang's own, its Python sources; a server
needs the SGLang that `version.py` names. What a machine lacks is said in one line and the other steps run all the same.

Exit status, and the last line: 0 green, 1 something wrong, 3 nothing wrong but a step that did not end in time, 77 no
such card or a step that could not run; 130 interrupted, 2 bad arguments.
"""

import argparse
import importlib.util
import os
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from steps import Done, Outcome, Step, run, table, tail, termination_as_interrupt, worst

ROOT = Path(__file__).parents[1]
BUDGET_S = 480.0
NUM_PROCESSES = 8
INTERRUPTED = 130
RED_ANSWERS = "MARCONI_RED_ANSWERS"
"""The folder in which the servers' tests leave the prompts of answers that were wrong."""

PYTEST = ("-m", "pytest", "-q", "-o", "addopts=", "-p", "no:cacheprovider", "-rfEs")
_ON_A_HOST = ("test/kernels/test_interpreter.py", "test/kernels/test_ahead_of_time.py")
"""What runs without a card."""
_ROWS = "test/kernels/test_flashinfer_rows.py"
_SERVERS = "test/engine/test_half_precision.py"
_REUSED = f"{_SERVERS}::test_a_reused_state_answers_as_the_model_does"
_CONTROL = f"{_SERVERS}::test_negative_control_a_broken_state_is_seen"


def _in_parallel() -> tuple[str, ...]:
    return ("-n", str(min(NUM_PROCESSES, os.cpu_count() or 1))) if importlib.util.find_spec("xdist") else ()


def _server(name: str, *tests: str) -> Step:
    """A step of one server: a cold start and some 60 answers, beside those of the other servers."""
    return Step(name, (*PYTEST, *tests), 190.0, needs_server=True)


PARTS: Mapping[str, tuple[Step, ...]] = {
    "kernels": (
        Step(
            "against-references",
            (*PYTEST, *_in_parallel(), *(f"--ignore={each}" for each in (*_ON_A_HOST, _ROWS)), "test/kernels"),
            110.0,
        ),
        Step("flashinfer-rows", (*PYTEST, "-k", "by_flashinfer", _ROWS), 50.0),
    ),
    "servers": (
        _server("gdn-flashinfer", f"{_REUSED}[gdn-flashinfer]", f"{_CONTROL}[gdn-flashinfer]"),
        _server("gdn-triton-drafts", f"{_REUSED}[gdn-triton-drafts]"),
        _server("mamba2-pages-host", f"{_REUSED}[mamba2-pages-host]"),
        _server("gdn-one-pool", f"{_REUSED}[gdn-one-pool]"),
        _server("gdn-one-pool-drafts", f"{_REUSED}[gdn-one-pool-drafts]"),
    ),
    "speed": (
        Step(
            "checkpoints",
            (
                # Their tests are a step of their own, which alone may take longer than this one.
                *("benchmark/kernels", "--skip-tests", "--tokens", "16384", "--repetitions", "5"),
                *("--models", "qwen3-next-80b-a3b,kimi-linear-48b-a3b"),
            ),
            90.0,
        ),
        Step("host-time", ("benchmark/hook_cost.py", "--rounds", "20"), 40.0),
    ),
}
STOCK = Step("stock-where-wrong", ("-m", "engine.stock_answers"), 180.0, needs_server=True)
"""Two servers more, run only where an answer was wrong: no part of the 8 minutes."""


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


def environment(logs: Path) -> dict[str, str]:
    """The environment of a step."""
    folders = [*(str(ROOT / each) for each in ("python", "sgl-kernel-ext", "test")), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, folders)),
        # What servers and references load stands in folders; a hub that cannot be reached takes its time to say so.
        "HF_HUB_OFFLINE": "1",
        RED_ANSWERS: str(logs),
    }


def check(steps: Sequence[Step], logs: Path) -> list[Done]:
    """Run steps one after the other, those of servers at once; what is wrong or late is shown, and the next runs."""
    servers = [step for step in steps if step.needs_server]
    no_server = missing_server() if servers else ""
    done = [_one(step, logs, no_server) for step in steps if not step.needs_server]
    if servers:
        done += _at_once(servers, logs, no_server)
    if any(each.step.needs_server and each.outcome is Outcome.WRONG for each in done) and list(logs.glob("*.red.json")):
        done.append(_one(STOCK, logs, no_server))
        assert done[-1].log is not None
        print("\n".join(f"  {line}" for line in tail(done[-1].log)), flush=True)
    return done


def _at_once(steps: Sequence[Step], logs: Path, no_server: str) -> list[Done]:
    stop = threading.Event()
    with ThreadPoolExecutor(len(steps)) as pool:
        try:
            return list(pool.map(partial(_one, logs=logs, no_server=no_server, stop=stop), steps))
        except BaseException:
            stop.set()
            raise


def _one(step: Step, logs: Path, no_server: str, stop: threading.Event | None = None) -> Done:
    if step.needs_server and no_server:
        print(f"cuda-check: {step.name}: skipped: {no_server}", flush=True)
        return Done(step, Outcome.SKIPPED, why=no_server)
    print(f"cuda-check: {step.name}, at most {step.limit_s:g} s", flush=True)
    done = run(step, logs / f"{step.name}.log", cwd=ROOT, environment=environment(logs), stop=stop)
    print(f"cuda-check: {step.name}: {done.outcome.words} after {done.seconds:.1f} s", flush=True)
    if done.outcome in (Outcome.WRONG, Outcome.LATE):
        print("\n".join(f"  | {line}" for line in tail(logs / f"{step.name}.log")), flush=True)
    return done


def limit_s(steps: Sequence[Step]) -> float:
    """How long steps may take: one after the other, and those of servers at once."""
    servers = [step.limit_s for step in steps if step.needs_server]
    return sum(step.limit_s for step in steps if not step.needs_server) + max(servers, default=0.0)


def listing(parts: Sequence[str]) -> str:
    """The plan: each step with its limit and its command, and how long all may take."""
    lines = []
    for part in parts:
        lines.append(f"{part}: {limit_s(PARTS[part]):g} s")
        lines += [f"  {step.name:<20}{step.limit_s:4g} s  python {' '.join(step.arguments)}" for step in PARTS[part]]
    lines.append(f"in all: {sum(limit_s(PARTS[part]) for part in parts):g} s")
    if "servers" in parts:
        lines.append(f"and where an answer is wrong: {STOCK.name}, {STOCK.limit_s:g} s")
    return "\n".join(lines)


def _parts(text: str) -> tuple[str, ...]:
    named = text.split(",")
    if unknown := [each for each in named if each not in PARTS]:
        raise argparse.ArgumentTypeError(f"a part must be one of {', '.join(PARTS)}, got {unknown[0]!r}")
    return tuple(part for part in PARTS if part in named)


def _steps_of(part: Sequence[str], named: Sequence[str], factor: float) -> list[Step]:
    of_all = [step for each in part for step in PARTS[each]]
    return [
        Step(step.name, step.arguments, step.limit_s * factor, step.needs_server)
        for step in of_all
        if not named or step.name in named
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was asked for, and say in the last line how it ended."""
    parser = argparse.ArgumentParser("cuda-check", description="All that needs a Hopper card, in parts.")
    names = [step.name for steps in PARTS.values() for step in steps]
    parser.add_argument(
        "--part", type=_parts, default=tuple(PARTS), metavar="PART,...", help=f"of {', '.join(PARTS)} (default: all)"
    )
    parser.add_argument("--step", action="append", choices=names, default=[], help="only this one; may be repeated")
    parser.add_argument("--list", action="store_true", help="print the plan and its limits, and run nothing")
    parser.add_argument("--logs", type=Path, metavar="DIR", help="of each step (default: a new folder, which is named)")
    parser.add_argument("--slack", type=float, default=1.0, metavar="FACTOR", help="of all limits (default: 1)")
    given = parser.parse_args(arguments)
    if not 0 < given.slack < float("inf"):
        parser.error(f"--slack must be above 0, got {given.slack:g}")
    if given.list:
        print(listing(given.part))
        return 0
    steps = _steps_of(given.part, given.step, given.slack)
    if not steps:
        parser.error(f"--step must be of --part {','.join(given.part)}, got {', '.join(given.step)}")
    if missing := missing_card():
        print(f"cuda-check: skipped: {missing}")
        return int(Outcome.SKIPPED)
    logs = Path(tempfile.mkdtemp(prefix="cuda-check-")) if given.logs is None else given.logs.resolve()
    logs.mkdir(parents=True, exist_ok=True)
    for old in logs.glob("*.red.json"):
        old.unlink()
    print(f"cuda-check: logs in {logs}", flush=True)
    try:
        with termination_as_interrupt():
            done = check(steps, logs)
    except KeyboardInterrupt:
        print("cuda-check: interrupted", flush=True)
        return INTERRUPTED
    print(table(done))
    outcome = worst([each.outcome for each in done])
    print(f"cuda-check: {outcome.words}", flush=True)
    return int(outcome)


if __name__ == "__main__":
    sys.exit(main())
