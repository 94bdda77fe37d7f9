"""`marconi replay --replicas`: the options of a simulated fleet, and the command with them."""

import argparse
import math
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from marconi.policy.catalog import parse_list
from marconi.policy.request import Trace
from marconi.replay.grid import run_tasks
from marconi.replay.inputs import read_inputs, require_memory_for, resolve
from marconi.replay.memory import parse_host_memory, parse_memories
from marconi.replay.parallel import num_usable_cores, run_all
from marconi.replay.progress import metered
from marconi.replay.report import deliver
from marconi.replay.result import require_writable
from marconi.replay.task import Task
from marconi.replay.trace import in_blocks
from marconi_lab.fleet.plan import with_layouts
from marconi_lab.fleet.result import FleetReport, tables
from marconi_lab.fleet.simulation import DEFAULT_EVENT_DELAY_S
from marconi_lab.fleet.task import MAX_REPLICAS, FleetTask, execute, require_for_fleets, require_possible
from marconi_lab.fleet.variants import parse_variants, require_keys

DEFAULT_POLICY = "best"
DEFAULT_BLOCK_TOKENS = 64
"""Tokens of a block for a trace of single tokens without `--block-tokens`."""
MAX_GATEWAYS = 100
DEFAULT_ROUTERS = "round-robin,least-loaded,sticky-hash,kv-only,state-aware"


def add_to(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add the options of fleets to `marconi replay`, and fleets to what `marconi plan` compares."""
    replay, plan = commands.choices["replay"], commands.choices["plan"]
    fleet = replay.add_argument_group("a fleet of workers behind a router, by the clock")
    fleet.add_argument("--replicas", metavar="LIST", help="numbers of workers, which share --memory equally")
    fleet.add_argument("--router", metavar="LIST", help=f"rules (default: {DEFAULT_ROUTERS})")
    fleet.add_argument("--gateways", type=int, metavar="K", help="routers, which get requests in turn (default: 1)")
    fleet.add_argument(
        "--event-delay-ms", type=float, metavar="MS", help="delay of events to the router (default: 100)"
    )
    fleet.add_argument("--speedup", type=float, metavar="X", help="arrivals X times as fast (default: 1)")
    replay.set_defaults(run=partial(_run, replay.get_default("run")))
    plan.set_defaults(run=partial(plan.get_default("run"), extend=partial(with_layouts, blocked=blocked)))


def _run(run_alone: Callable[[argparse.Namespace], int], args: argparse.Namespace) -> int:
    if args.replicas is not None:
        return _run_fleets(args)
    for option in ("router", "gateways", "event_delay_ms", "speedup"):
        if getattr(args, option) is not None:
            raise ValueError(f"--{option.replace('_', '-')} must come with --replicas N, got none")
    return run_alone(args)


def _run_fleets(args: argparse.Namespace) -> int:
    require_writable(args.json)
    counts = _parse_replicas(args.replicas)
    variants = parse_variants(DEFAULT_ROUTERS if args.router is None else args.router)
    policies = parse_list(DEFAULT_POLICY if args.policy is None else args.policy)
    for policy in policies:
        require_for_fleets(policy)
    memories, host = parse_memories(args.memory), parse_host_memory(args.host_memory)
    require_memory_for(policies, memories)
    if args.mode != "serial":
        raise ValueError(f"--mode must be left out with --replicas, since a fleet runs by the clock, got {args.mode}")
    if args.int8_checkpoints:
        raise ValueError("--int8-checkpoints must be left out with --replicas: it is replayed for one server")
    if args.storage_memory is not None:
        raise ValueError("--storage-memory must be left out with --replicas: it is replayed for one server")
    if args.explain:
        raise ValueError("--explain must be left out with --replicas: the causes of misses are those of one server")
    speedup = 1.0 if args.speedup is None else args.speedup
    if not 0 < speedup < math.inf:
        raise ValueError(f"--speedup must be above 0, got {speedup:g}")
    delay_s = DEFAULT_EVENT_DELAY_S if args.event_delay_ms is None else args.event_delay_ms / 1000
    if not 0 <= delay_s < math.inf:
        raise ValueError(f"--event-delay-ms must be 0 or more, got {args.event_delay_ms:g}")
    num_gateways = 1 if args.gateways is None else args.gateways
    if not 1 <= num_gateways <= MAX_GATEWAYS:
        raise ValueError(f"--gateways must be 1 to {MAX_GATEWAYS}, got {num_gateways}")
    start_s = time.monotonic()
    inputs = read_inputs(args)
    inputs = replace(inputs, trace=faster(blocked(inputs.trace), speedup))
    require_keys(variants, inputs.trace)
    memories_bytes, host_bytes, unbounded = resolve(memories, inputs, host)
    ratio = args.mamba_full_memory_ratio
    cells = [(policy, num_bytes) for policy in policies for num_bytes in memories_bytes]
    alone = [Task(policy, num_bytes, ratio, host_bytes) for policy, num_bytes in cells]
    tasks = [
        FleetTask(policy, num_bytes, count, variant, ratio, delay_s, host_bytes, num_gateways)
        for policy, num_bytes in cells
        for count in counts
        for variant in variants
    ]
    for task in tasks:
        require_possible(inputs, task)
    num_requests = (len(alone) + len(tasks)) * len(inputs.trace.requests)
    num_processes = args.jobs or num_usable_cores()
    with metered("simulate", num_requests) as meter:
        singles = run_tasks(inputs, alone, num_processes, meter.advance)
        runs = run_all(execute, inputs, tasks, num_processes, meter.advance)
    report = FleetReport(
        inputs=inputs,
        speedup=speedup,
        event_delay_s=delay_s,
        num_gateways=num_gateways,
        unbounded_bytes=unbounded,
        host_bytes=host_bytes,
        singles=singles,
        runs=tuple(runs),
    )
    deliver(tables(report, args.timings), args.json, partial(report.to_json, args.timings))
    print(f"marconi: {num_requests:,} requests simulated in {time.monotonic() - start_s:.1f} s", file=sys.stderr)
    return 0


def blocked(trace: Trace) -> Trace:
    """`trace` in blocks, as a router's index has them, where it is one of single tokens."""
    return in_blocks(trace, DEFAULT_BLOCK_TOKENS) if trace.unit_tokens == 1 else trace


def faster(trace: Trace, speedup: float) -> Trace:
    """`trace`, its arrivals `speedup` times as close."""
    if speedup == 1:
        return trace
    return replace(trace, requests=tuple(replace(each, arrival_s=each.arrival_s / speedup) for each in trace.requests))


def _parse_replicas(text: str) -> list[int]:
    counts = []
    for part in text.split(","):
        count = int(part) if part.strip().isascii() and part.strip().isdigit() and len(part) < 10 else 0
        if not 1 <= count <= MAX_REPLICAS:
            raise ValueError(f"--replicas must be whole numbers from 1 to {MAX_REPLICAS}, got {part.strip()!r}")
        if count in counts:
            raise ValueError(f"--replicas must be different numbers, got {count} twice")
        counts.append(count)
    return counts
