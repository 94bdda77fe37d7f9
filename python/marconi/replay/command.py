"""The subcommands `marconi replay` and `marconi convert`: their options, and what they print.

Tables are written to stdout, progress and remarks to stderr, results to the file of `--json`.
"""

import argparse
import re
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Group

from marconi.policy.catalog import PolicySpec, parse_list
from marconi.policy.store import FIRST_BYTES_PER_S
from marconi.replay.bound import bounded
from marconi.replay.catalog import known_policies
from marconi.replay.grid import num_replays, require_executable, run_tasks
from marconi.replay.inputs import GENERATE, read_inputs, read_trace, require_memory_for, resolve, storage_of
from marconi.replay.memory import parse_host_memory, parse_memories
from marconi.replay.parallel import num_usable_cores
from marconi.replay.progress import metered
from marconi.replay.queueing import Batching
from marconi.replay.report import causes, deliver, tables
from marconi.replay.result import Report, require_writable
from marconi.replay.reuse import Reuse
from marconi.replay.task import UNBOUNDED_BYTES, Mode, Task
from marconi.replay.trace import write as write_trace
from marconi.replay.trace.source import STDIN

DEFAULT_POLICIES = "lru,lru-joint,seglen,marconi,best"
INT8_POLICIES = "marconi,best"
"""By default with checkpoints in int8, which a server does not offer with the others."""
STORED_POLICIES = "lru-joint,seglen,marconi,best"
"""By default with a store behind the host: `DEFAULT_POLICIES` but stock SGLang's."""
_MEMORY = "of KV and states on one worker: 40GB, 512MiB or 0.05x of what an unbounded cache would hold"
MEMORY_OF_CARD = f"{_MEMORY} (default: what the weights leave of a card of the device)"


def add_parsers(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add `replay` and `convert` to the commands of `marconi`."""
    replay: argparse.ArgumentParser = commands.add_parser(
        "replay",
        help="replay a trace under several policies and amounts of memory",
        description="What each policy would have hit, computed and kept on a trace. TRACE is a file or folder, "
        "compressed or not, - for stdin, or generate:WORKLOAD. Same input and seed, same bytes. Block caches also give "
        "the four numbers of the Mooncake-format block replays, by their names.",
        epilog="example:\n  marconi replay log.jsonl --model nemotron-h-8b --memory 10GB,20GB\n"
        "  marconi replay generate:chat-short --model nemotron-h-8b --memory 0.1x --policy lru,best",
    )
    add_shared(
        replay,
        f"{_MEMORY}; 3000blocks for block caches (lru-block, lfu, s3fifo)",
        "; requests_per_s is null without --timings",
    )
    replay.add_argument(
        "--policy",
        action=_GoesOn,
        metavar="LIST",
        help="NAME[:NUMBER][@ADMISSION] or FILE.py:RULE[@ADMISSION], separated by commas; ADMISSION is "
        "judicious[:GRID], every-block[:N[:GRID]], "
        f"chunk-end[:INTERVAL[:GRID[:CHUNK]]] or no-buffer[:CHUNK[:GRID]] (default: {DEFAULT_POLICIES}; with "
        f"--storage-memory {STORED_POLICIES})",
    )
    replay.add_argument("--list-policies", action=_ListPolicies, help="say which there are, and exit")
    replay.add_argument(
        "--mamba-full-memory-ratio",
        type=float,
        metavar="R",
        help="bytes for states over bytes for KV, for every policy, none of which may be a block cache "
        "(default: lru 0.9 as SGLang, others one pool)",
    )
    replay.add_argument(
        "--int8-checkpoints",
        action="store_true",
        help="keep states in int8, as a server with --enable-int8-mamba-checkpoint divides its memory for states, for "
        f"policies that it offers (default: {INT8_POLICIES}; ratio 0.9); answers that resume from one may differ",
    )
    replay.add_argument(
        "--timings",
        action="store_true",
        help="also report how fast the replay ran; such output differs from run to run",
    )
    replay.add_argument(
        "--explain",
        action="store_true",
        help="also print why prompt tokens were missed: shares by cause, of each policy",
    )
    replay.set_defaults(run=_replay)
    _add_convert(commands)


def _add_convert(commands: "argparse._SubParsersAction[Any]") -> None:
    convert: argparse.ArgumentParser = commands.add_parser(
        "convert",
        help="write a log or a trace as a trace of token ids",
        description="Read a trace of any format, an API's log for example, and write the `artifact` format, so that "
        "it is tokenized once; say how many of its prompt tokens an earlier request had. LOG is a file or folder, "
        "compressed or not, - for stdin, or generate:WORKLOAD.",
        epilog="example:\n  marconi convert log.jsonl --model ./my-model -o trace.jsonl.gz",
    )
    convert.add_argument("trace", metavar="LOG", help="a log or a trace")
    convert.add_argument("--model", metavar="DIR", help="the model's folder, with its tokenizer and chat template")
    convert.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="TRACE",
        help="compressed if it ends in .gz (default: LOG's name with the ending .trace.jsonl.gz, in this folder)",
    )
    convert.add_argument("--seed", type=int, default=0, metavar="N", help="of drawn times (default: 0)")
    add_trace(convert)
    convert.set_defaults(run=_convert)


def add_inputs(parser: argparse.ArgumentParser, memory: str, *, needs_memory: bool = True) -> None:
    """Add the options that `read_inputs` reads of a serial replay, and those of memory, which `memory` describes."""
    # `--memory -5GB` is a wrong amount, not an option.
    parser._negative_number_matcher = re.compile(r"-\d")
    parser.add_argument("trace", metavar="TRACE", help="a trace, - for stdin, or generate:WORKLOAD")
    parser.add_argument(
        "--model",
        required=True,
        metavar="NAME",
        help="a known model, here or on the hub, a config.json or its folder",
    )
    parser.add_argument("--memory", action=_GoesOn, required=needs_memory, metavar="LIST", help=memory)
    parser.add_argument(
        "--host-memory", metavar="AMOUNT", help="of a host tier below it, as --memory: 200GB (default: none)"
    )
    parser.add_argument(
        "--host-bandwidth", type=float, metavar="GB/S", help="from the host to the device (default: the device's)"
    )
    parser.add_argument("--device", default="h100", metavar="NAME", help="whose speed to take (default: h100)")
    parser.add_argument("--latency-table", type=Path, metavar="FILE", help="measured prefill times, CSV or JSON")
    parser.add_argument("--tensor-parallel", type=positive, default=1, metavar="N", help="workers (default: 1)")
    parser.add_argument(
        "--slo-s", type=float, default=1.0, metavar="S", help="objective of the time to first token (default: 1)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of drawn times and workloads (default: 0)")
    add_trace(parser)
    batching = Batching()
    parser.set_defaults(
        mode=Mode.SERIAL.value,
        max_running_requests=batching.max_running,
        max_prefill_tokens=batching.max_prefill_tokens,
    )


def add_shared(
    parser: argparse.ArgumentParser, memory: str, without_timings: str, *, needs_memory: bool = True
) -> None:
    """Add the options of a command that replays: its inputs, memory, mode, and where its results go."""
    add_inputs(parser, memory, needs_memory=needs_memory)
    parser.add_argument(
        "--storage-memory", metavar="AMOUNT", help="of a store of files behind the host tier: 2TB (default: none)"
    )
    parser.add_argument(
        "--storage-bandwidth",
        type=float,
        metavar="GB/S",
        help=f"from the store to the host (default: {FIRST_BYTES_PER_S / 1e9:g}, as a server until it has measured it)",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help=f"write the results there (- is stdout){without_timings}"
    )
    parser.add_argument("--mode", choices=("serial", "queueing"), default="serial", help="default: serial")
    parser.add_argument("--jobs", type=positive, metavar="N", help="processes (default: one a core)")
    batching = parser.add_argument_group("queueing mode")
    batching.add_argument("--max-running-requests", type=positive, default=256, metavar="N", help="default: 256")
    batching.add_argument(
        "--max-prefill-tokens", type=positive, default=16384, metavar="N", help="of one prefill (default: 16384)"
    )


def add_trace(parser: argparse.ArgumentParser) -> None:
    """Add the options of a trace, which `read_trace` reads beside `--model` and `--seed`."""
    trace = parser.add_argument_group("the trace")
    trace.add_argument("--format", metavar="NAME", help="default: what its beginning shows")
    trace.add_argument("--skip-bad", action="store_true", help="count bad records and continue")
    trace.add_argument(
        "--time-unit", choices=("s", "ms", "us"), help="of a log's times (default: told from their values)"
    )
    trace.add_argument("--session-rate", type=float, metavar="R", help="sessions a second, where times are relative")
    trace.add_argument("--max-sessions", type=positive, metavar="N", help="read or draw no more")
    trace.add_argument("--half", choices=("all", "tuning", "reporting"), default="all", help="of its sessions")
    trace.add_argument("--block-tokens", type=positive, metavar="N", help="tokens a block, of traces of tokens too")
    trace.add_argument(
        "--tokenizer",
        type=Path,
        metavar="FILE",
        help="a tokenizer.json, for traces of text, or a model's folder or hub name (of a log: default: --model)",
    )


def positive(text: str) -> int:
    """Read a whole number, 1 or more."""
    number = int(text) if text.isascii() and text.isdigit() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number, 1 or more, got {text!r}")
    return number


class _GoesOn(argparse.Action):
    """A list that grows where the option is given again."""

    def __call__(self, _parser: argparse.ArgumentParser, namespace: argparse.Namespace, text: Any, *_: object) -> None:
        before = getattr(namespace, self.dest)
        setattr(namespace, self.dest, text if before is None else f"{before},{text}")


class _ListPolicies(argparse.Action):
    """Print the policies and exit."""

    def __init__(self, option_strings: Sequence[str], dest: str, **options: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, default=argparse.SUPPRESS, help=options.get("help"))

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        width = max(map(len, known_policies()))
        for policy in known_policies().values():
            print(f"{policy.name:{width}}  {policy.summary}")
        parser.exit()


def _replay(args: argparse.Namespace) -> int:
    require_writable(args.json)
    storage = storage_of(args)
    default = DEFAULT_POLICIES if storage is None else STORED_POLICIES
    default = INT8_POLICIES if args.int8_checkpoints else default
    policies = parse_list(default if args.policy is None else args.policy)
    memories, host = parse_memories(args.memory), parse_host_memory(args.host_memory)
    require_memory_for(policies, memories)
    start_s = time.monotonic()
    inputs = read_inputs(args)

    def task(policy: PolicySpec, memory_bytes: int, host_bytes: int) -> Task:
        return Task(policy, memory_bytes, args.mamba_full_memory_ratio, host_bytes, args.int8_checkpoints, storage)

    for policy in policies:
        # Whatever the memory is; how much it is may take a replay to know.
        require_executable(inputs, task(policy, UNBOUNDED_BYTES, UNBOUNDED_BYTES if host else 0))
    memories_bytes, host_bytes, unbounded = resolve(memories, inputs, host)
    tasks = [task(policy, num_bytes, host_bytes) for num_bytes in memories_bytes for policy in policies]
    num_requests = num_replays(tasks) * len(inputs.trace.requests)
    num_processes = args.jobs or num_usable_cores()
    with metered("replay", num_requests) as meter:
        runs = run_tasks(inputs, tasks, num_processes, meter.advance)
    report = Report(inputs, unbounded, bounded(inputs, runs, num_processes))
    shown = [tables(report, args.timings), *([causes(report)] if args.explain else ())]
    deliver(Group(*shown), args.json, partial(report.to_json, args.timings))
    plural = "" if num_requests == 1 else "s"
    print(f"marconi: {num_requests:,} request{plural} replayed in {time.monotonic() - start_s:.1f} s", file=sys.stderr)
    return 0


def _convert(args: argparse.Namespace) -> int:
    path = args.output
    if path is None:
        if args.trace == STDIN or args.trace.startswith(GENERATE):
            raise ValueError(f"-o must name the file to write, {args.trace!r} names none")
        path = Path(f"{Path(args.trace).name.split('.')[0] or 'log'}.trace.jsonl.gz")
    require_writable(path, "-o")
    if path.exists() and Path(args.trace).exists() and path.samefile(args.trace):
        raise ValueError(f"-o must be another file than the one that is read, got {path}")
    trace = read_trace(args)
    write_trace(trace, path, "artifact")
    reuse = Reuse.of(trace)
    num_sessions = len({request.session for request in trace.requests})
    print(
        f"{path}: {len(trace.requests):,} requests in {num_sessions:,} sessions, {reuse.num_prompt_tokens:,} prompt "
        f"tokens; an earlier request had {reuse.num_shared_tokens / reuse.num_prompt_tokens:.2%} of them, which no "
        "cache exceeds"
    )
    return 0
