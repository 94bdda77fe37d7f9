"""The inputs of a replay, from the command line: the trace, the model, the device and the memory."""

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from marconi.model import MeasuredLatency, PrefillLatency, load
from marconi.model.device import device
from marconi.policy.catalog import PolicySpec
from marconi.policy.request import Trace
from marconi.policy.store import FIRST_BYTES_PER_S
from marconi.replay.catalog import known_policies, resolve_policy
from marconi.replay.memory import MemorySize, MemoryUnit, format_bytes, parse_storage_memory
from marconi.replay.progress import metered
from marconi.replay.queueing import Batching
from marconi.replay.store import StoreSpec
from marconi.replay.target import block_bytes
from marconi.replay.task import Mode, ReplayInputs, unbounded_bytes
from marconi.replay.trace import Demand, Half, ReadOptions, UnusedOption, generate, in_blocks, preset, read
from marconi.replay.trace.arrivals import SESSION_RATE
from marconi.replay.trace.chats import has_tokenizer

GENERATE = "generate:"
"""The prefix of a trace argument that names a workload to generate."""

DEFAULT_NUM_SESSIONS = 200
STATIC_FRACTION = 0.85
"""Share of a card's memory that SGLang gives to weights and caches by default, or a little less."""
_MAX_SHOWN = 3


def read_inputs(args: argparse.Namespace) -> ReplayInputs:
    """The inputs that a command line names; `ValueError` for an impossible one. Quick checks come first."""
    model = load(args.model, tensor_parallel=args.tensor_parallel)
    on = device(args.device)
    if args.host_bandwidth is not None:
        if not 0 < args.host_bandwidth < math.inf:
            raise ValueError(f"--host-bandwidth must be a number of GB/s above 0, got {args.host_bandwidth:g}")
        on = replace(on, host_bytes_per_s=args.host_bandwidth * 1e9)
    latency = PrefillLatency(model, on) if args.latency_table is None else MeasuredLatency.read(args.latency_table)
    if not 0 < args.slo_s < math.inf:
        raise ValueError(f"--slo-s must be a number of seconds above 0, got {args.slo_s}")
    ratio = args.mamba_full_memory_ratio if "mamba_full_memory_ratio" in args else None
    if ratio is not None and not 0 < ratio < math.inf:
        raise ValueError(f"--mamba-full-memory-ratio must be a number above 0, got {ratio}")
    batching = Batching(args.max_running_requests, args.max_prefill_tokens)
    remarks: list[str] = []
    return ReplayInputs(
        trace=read_trace(args, remarks),
        model=model,
        device=on,
        latency=latency,
        mode=Mode(args.mode),
        batching=batching,
        slo_s=args.slo_s,
        seed=args.seed,
        remarks=tuple(remarks),
    )


def read_trace(args: argparse.Namespace, remarks: list[str] | None = None) -> Trace:
    """The trace that is named, read or drawn; what was skipped is said on stderr.

    What makes it approximate is said there as well, and added to `remarks`.
    """
    if args.trace.startswith(GENERATE):
        return _drawn(args)
    if not args.trace:
        raise ValueError("TRACE must be a file, a folder or generate:WORKLOAD, got ''")
    options = ReadOptions(
        block_tokens=args.block_tokens,
        session_rate=args.session_rate,
        seed=args.seed,
        half=Half(args.half),
        max_sessions=args.max_sessions,
        tokenizer=args.tokenizer,
        time_unit=args.time_unit,
        model_folder=_folder_of(args.model),
    )
    found = [] if remarks is None else remarks
    skipped: list[str] = []
    on_bad = skipped.append if args.skip_bad else None
    try:
        with metered("read the trace") as meter:
            trace = read(
                args.trace, options, format=args.format, progress=meter.reach, on_bad=on_bad, on_remark=found.append
            )
    except UnusedOption as error:
        raise ValueError(f"--{error.option.replace('_', '-')}: {error.why}") from None
    finally:
        # Also where nothing is left to replay: this says why.
        for line in found:
            print(f"marconi: {line}", file=sys.stderr)
        _say_skipped(skipped)
        if skipped:
            found.append(_num_skipped(skipped))
    return in_blocks(trace, args.block_tokens) if args.block_tokens and trace.unit_tokens == 1 else trace


def _folder_of(model: str | None) -> Path | None:
    """The folder that `--model` names, or that of its `config.json` if a tokenizer is there; None for a name."""
    path = Path(model or "").expanduser()
    if path.is_file():
        return path.parent if has_tokenizer(path.parent) else None
    return path if model and path.is_dir() else None


def _drawn(args: argparse.Namespace) -> Trace:
    """The trace of a workload."""
    if args.half != Half.ALL:
        raise ValueError(f"--half must be all for a drawn trace, got {args.half}: another --seed draws another trace")
    for flag, value in (("--tokenizer", args.tokenizer), ("--format", args.format)):
        if value is not None:
            raise ValueError(f"{flag} must be left out for a drawn trace, got {value}")
    demand = Demand(
        num_sessions=DEFAULT_NUM_SESSIONS if args.max_sessions is None else args.max_sessions,
        session_rate=SESSION_RATE if args.session_rate is None else args.session_rate,
        seed=args.seed,
    )
    unit_tokens = 1 if args.block_tokens is None else args.block_tokens
    return generate(preset(args.trace.removeprefix(GENERATE)), demand, unit_tokens)


def _say_skipped(skipped: Sequence[str]) -> None:
    for message in skipped[:_MAX_SHOWN]:
        print(f"marconi: skipped: {message}", file=sys.stderr)
    if skipped:
        print(f"marconi: {_num_skipped(skipped)}", file=sys.stderr)


def _num_skipped(skipped: Sequence[str]) -> str:
    return f"skipped {len(skipped)} bad record{'s' if len(skipped) > 1 else ''}"


def resolve(
    memories: Sequence[MemorySize], inputs: ReplayInputs, host: MemorySize | None = None
) -> tuple[list[int], int, int | None]:
    """Each amount in bytes, those of a host tier (0 without one), and what an unbounded cache holds.

    The last is None where no amount is relative to it.
    """
    unbounded = None
    if any(memory.unit is MemoryUnit.UNBOUNDED for memory in (*memories, host) if memory is not None):
        with metered("fill an unbounded cache", len(inputs.trace.requests)) as meter:
            unbounded = unbounded_bytes(inputs, meter.advance)
    a_block = block_bytes(inputs.trace.unit_tokens, inputs.costs)
    host_bytes = 0 if host is None else host.bytes_of(unbounded, a_block)
    return [memory.bytes_of(unbounded, a_block) for memory in memories], host_bytes, unbounded


def storage_of(args: argparse.Namespace) -> StoreSpec | None:
    """The store behind the host tier that a command line asks for; None without one, `ValueError` for a wrong one."""
    memory, bandwidth = args.storage_memory, args.storage_bandwidth
    if memory is None:
        if bandwidth is not None:
            raise ValueError(f"--storage-bandwidth must come with --storage-memory, got {bandwidth:g} alone")
        return None
    num_bytes = parse_storage_memory(memory)
    if args.host_memory is None:
        raise ValueError(f"--storage-memory must come with --host-memory, got {memory!r} alone")
    if bandwidth is None:
        return StoreSpec(num_bytes, FIRST_BYTES_PER_S)
    if not 0 < bandwidth < math.inf:
        raise ValueError(f"--storage-bandwidth must be a number of GB/s above 0, got {bandwidth:g}")
    return StoreSpec(num_bytes, bandwidth * 1e9)


def memory_of_card(args: argparse.Namespace) -> MemorySize:
    """Memory that one rank has for its cache on a card of the device, beside weights of 16 bits.

    `ValueError` where the weights leave none.
    """
    model, on = load(args.model, tensor_parallel=args.tensor_parallel), device(args.device)
    weight_bytes = model.weight_bytes // args.tensor_parallel
    left = int(STATIC_FRACTION * on.memory_bytes) - weight_bytes
    if left <= 0:
        raise ValueError(
            f"--memory must be given, or --tensor-parallel more than {args.tensor_parallel}: "
            f"{format_bytes(weight_bytes)} of weights (16 bits) leave nothing of an {on.name}'s "
            f"{format_bytes(int(on.memory_bytes))}"
        )
    print(
        f"marconi: --memory is {format_bytes(left)}: {STATIC_FRACTION:.0%} of an {on.name}'s "
        f"{format_bytes(int(on.memory_bytes))}, less {format_bytes(weight_bytes)} of weights (16 bits)",
        file=sys.stderr,
    )
    return MemorySize(left, MemoryUnit.BYTES)


def require_memory_for(policies: Sequence[PolicySpec], memories: Sequence[MemorySize]) -> None:
    """`ValueError` for an unknown policy, and for memory in blocks with one that caches no blocks."""
    others = [spec.name for spec in policies if not resolve_policy(spec).caches_blocks]
    in_blocks = [memory for memory in memories if memory.unit is MemoryUnit.BLOCKS]
    if others and in_blocks:
        known = ", ".join(policy.name for policy in known_policies().values() if policy.caches_blocks)
        raise ValueError(
            f"memory must be an amount of bytes such as 40GB for policy {others[0]!r}, got "
            f"'{in_blocks[0].amount}blocks' (blocks are for {known})"
        )
