"""The subcommand `marconi plan`: its options, and what it prints."""

import argparse
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from marconi.plan.advice import DEFAULT, STOCK
from marconi.plan.plan import make_plan, render
from marconi.plan.verdict import Plan
from marconi.replay.command import MEMORY_OF_CARD, add_shared
from marconi.replay.inputs import memory_of_card, read_inputs, require_memory_for, resolve, storage_of
from marconi.replay.memory import parse_host_memory, parse_memories
from marconi.replay.parallel import num_usable_cores
from marconi.replay.report import deliver
from marconi.replay.result import STDOUT, require_writable
from marconi.replay.task import ReplayInputs


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add `plan` to the commands of `marconi`."""
    plan: argparse.ArgumentParser = commands.add_parser(
        "plan",
        help="which KV/state split and which policy fit a trace",
        description="Replay a trace under SGLang's split of memory and others, one pool, and several policies; say "
        "what to configure and what it would win.",
        epilog="example:\n  marconi plan log.jsonl --model ./my-model\n"
        "  marconi plan generate:agent-append --model nemotron-h-8b --memory 8GB,16GB",
    )
    add_shared(plan, MEMORY_OF_CARD, "; requests_per_s is always null", needs_memory=False)
    plan.add_argument(
        "--table", action="store_true", help="also print the advice for each amount of memory, and all that was tried"
    )
    plan.set_defaults(run=_plan)


def _plan(
    args: argparse.Namespace, extend: Callable[[argparse.Namespace, ReplayInputs, Plan], Plan] | None = None
) -> int:
    require_writable(args.json)
    memories = (memory_of_card(args),) if args.memory is None else parse_memories(args.memory)
    host, storage = parse_host_memory(args.host_memory), storage_of(args)
    require_memory_for((STOCK, DEFAULT), memories)
    inputs = read_inputs(args)
    memories_bytes, host_bytes, unbounded = resolve(memories, inputs, host)
    plan = make_plan(inputs, memories_bytes, unbounded, args.jobs or num_usable_cores(), host_bytes, storage)
    if extend is not None:
        plan = extend(args, inputs, plan)
    deliver(render(plan, has_table=args.table), args.json, plan.to_json)
    if plan.launch_flags is not None and args.json != STDOUT:
        # Past the console, which would break it at a terminal's width.
        print(f"Next: {_check(args.model, plan)}")
    return 0


def _check(model: str, plan: Plan) -> str:
    """`marconi check` of the launch that is advised."""
    num_bytes = plan.report.inputs.device.memory_bytes
    card = f" --gpu-memory {num_bytes / 1e9:g}GB" if num_bytes else ""
    path = Path(model).parent if Path(model).is_file() else model
    return f"marconi check{card} -- --model-path {shlex.quote(str(path))} {plan.launch_flags}"
