"""The subcommand `marconi view`: replay a trace under one policy, and write the picture of its tree over time."""

import argparse
import sys
from pathlib import Path
from typing import Any

from marconi.policy.catalog import parse_list
from marconi.replay.command import MEMORY_OF_CARD, add_inputs, positive
from marconi.replay.inputs import memory_of_card, read_inputs, require_memory_for, resolve
from marconi.replay.memory import format_bytes, parse_host_memory, parse_memories
from marconi.replay.progress import metered
from marconi.replay.result import require_writable
from marconi.replay.task import Task
from marconi.view.document import document
from marconi.view.record import record


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add the subcommand to those of the `marconi` command."""
    view: argparse.ArgumentParser = commands.add_parser(
        "view",
        help="draw the cache's tree over a trace",
        description="Replay a trace under one policy, request by request, and write a page that shows the tree, its "
        "memory, hits and evictions over time: one HTML file, which fetches nothing.",
        epilog="example:\n  marconi view log.jsonl --model nemotron-h-8b --memory 8GB --html tree.html",
    )
    add_inputs(view, MEMORY_OF_CARD, needs_memory=False)
    view.add_argument("--html", type=Path, required=True, metavar="FILE", help="write the page there")
    view.add_argument("--policy", default="best", metavar="NAME", help="as in `marconi replay` (default: best)")
    view.add_argument(
        "--mamba-full-memory-ratio",
        type=float,
        metavar="R",
        help="bytes for states over bytes for KV (default: the policy's own division)",
    )
    view.add_argument("--frames", type=positive, default=60, metavar="N", help="steps of the slider (default: 60)")
    view.set_defaults(run=_view)


def _view(args: argparse.Namespace) -> int:
    require_writable(args.html, "--html")
    policies = parse_list(args.policy)
    if len(policies) > 1:
        raise ValueError(f"--policy must be one policy, got {args.policy}")
    memories = (memory_of_card(args),) if args.memory is None else parse_memories(args.memory)
    if len(memories) > 1:
        raise ValueError(f"--memory must be one amount, got {args.memory}")
    host = parse_host_memory(args.host_memory)
    require_memory_for(policies, memories)
    inputs = read_inputs(args)
    (memory_bytes,), host_bytes, _ = resolve(memories, inputs, host)
    task = Task(policies[0], memory_bytes, args.mamba_full_memory_ratio, host_bytes)
    with metered("replay", len(inputs.trace.requests)) as meter:
        frames = [*record(inputs, task, args.frames, progress=meter.advance)]
    title = f"{args.trace}: {task.policy}, {format_bytes(memory_bytes)}"
    args.html.write_text(document(title, frames), encoding="utf-8")
    num_nodes = max(len(frame.nodes.parent) for frame in frames)
    print(
        f"marconi: {args.html}: {len(frames)} frames of up to {num_nodes:,} nodes, "
        f"{format_bytes(args.html.stat().st_size)}",
        file=sys.stderr,
    )
    return 0
