"""The subcommand `marconi plan`: its options, and what it prints."""

import argparse
from collections.abc import Callable
from typing import Any

from marconi.plan.advice import DEFAULT, STOCK
from marconi.plan.plan import make_plan, render
from marconi.plan.verdict import Plan
from marconi.replay.command import MEMORY_OF_CARD, add_shared
from marconi.replay.inputs import memory_of_card, read_inputs, require_memory_for, resolve, storage_of
from marconi.replay.memory import parse_host_memory, parse_memories
from marconi.replay.parallel import num_usable_cores
from marconi.replay.report import deliver
from marconi.replay.result import require_writable
from marconi.replay.task import ReplayInputs


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add `plan` to the commands of `marconi`."""
    plan: argparse.ArgumentParser = commands.add_parser(
        "plan",
        help="which KV/state split and which policy fit a trace",
        description="Replay a trace under SGLang's split of memory and others, one pool, and several policies; say "
        "what to configure and what it would win.",
    )
    add_shared(plan, MEMORY_OF_CARD, "; requests_per_s is always null", needs_memory=False)
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
    deliver(render(plan), args.json, plan.to_json)
    return 0
