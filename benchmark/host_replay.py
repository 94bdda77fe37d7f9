"""A trace through a server's real cache, stock SGLang's or ours, on pools of the host's memory and without a model.

Requests are served one after the other, each through match, lock, chunked prefill, decoding and release as SGLang's
scheduler does it (`rig`). What is timed is the cache's own work, by the wall clock: `match`, `insert`
and `plan` (ours alone) a call, `evict` a victim.

    python benchmark/host_replay.py --backend {stock,marconi} --trace FILE --kv-tokens N --state-slots M
                                    [--strategy extra_buffer|no_buffer] [--core python|rust] [--page N]
                                    [--session-rate R] [--half tuning|reporting] [--num-requests N]
                                    [--model NAME] [--eviction NAME] [--alpha A] [--json FILE]

`--core` is what holds stock's tree. `--model`, `--eviction` and `--alpha` say what ours takes a state to be worth.
"""

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from marconi.engine.launch.policies import PolicyChoice
from marconi.model import ModelProfile, load
from marconi.policy.base import Costs
from marconi.policy.catalog import SERVED
from marconi.policy.eviction.utility import ALPHA
from marconi.policy.request import Trace
from marconi.replay.progress import metered
from marconi.replay.trace import Half, ReadOptions, read
from rig.clock import TraceClock
from rig.driver import HostReplay
from rig.meter import Meter
from rig.pools import Core, HostPools, Strategy, marconi, stock

BACKENDS = ("stock", "marconi")


def pools(args: argparse.Namespace, trace: Trace) -> HostPools:
    """The pools that are asked for, with room in a row for the longest request."""
    page = args.page
    if page is None:
        # Blocks say nothing of how far prompts agree within one: no state inside one could be hit.
        page = trace.unit_tokens if args.strategy == Strategy.EXTRA_BUFFER else 1
    longest = max(request.num_prompt_tokens + max(request.num_output_tokens, 1) for request in trace.requests)
    return HostPools(
        num_kv_tokens=args.kv_tokens // page * page,
        num_state_slots=args.state_slots,
        max_context_tokens=longest + page,
        page_tokens=page,
        strategy=Strategy(args.strategy),
    )


def measure(trace: Trace, replay: HostReplay) -> dict[str, Any]:
    """What the cache gives, and what it takes."""
    meter, num_hit_tokens = Meter(replay.cache), 0
    with metered("replay", len(trace.requests)) as progress:
        for request in trace.requests:
            num_hit_tokens += replay.serve(request) or 0
            progress.advance(1)
    replay.check_invariants()
    num_prompt_tokens = sum(request.num_prompt_tokens for request in trace.requests)
    return {
        "requests": len(trace.requests),
        "too_large": replay.num_too_large,
        "prompt_tokens": num_prompt_tokens,
        "hit_tokens": num_hit_tokens,
        "recomputed_tokens": num_prompt_tokens - num_hit_tokens,
        "states_written": meter.num_states_written,
        "evictions": meter.num_victims,
        "us_per": meter.us_per,
    }


def build(args: argparse.Namespace, host: HostPools, model: ModelProfile, clock: TraceClock) -> Any:
    """The cache of the backend that is asked for."""
    if args.backend == "stock":
        return stock(host, Core(args.core))
    costs = Costs(model.kv_bytes_per_token, max(model.checkpoint_bytes, 1), model.prefix_flops)
    return marconi(host, PolicyChoice(args.eviction, args.alpha), costs, clock)


def parser() -> argparse.ArgumentParser:
    """Of the command line."""
    made = argparse.ArgumentParser(description="A trace through a server's real cache, without a model.")
    made.add_argument("--backend", choices=BACKENDS, required=True)
    made.add_argument("--trace", required=True, metavar="FILE")
    made.add_argument("--kv-tokens", type=int, required=True, metavar="N", help="KV of so many tokens")
    made.add_argument("--state-slots", type=int, required=True, metavar="N", help="so many states, with those in use")
    made.add_argument("--strategy", choices=[*Strategy], default=Strategy.EXTRA_BUFFER, help="default: extra_buffer")
    made.add_argument("--core", choices=[*Core], default=Core.RUST, help="of stock (default: rust)")
    made.add_argument("--page", type=int, metavar="N", help="tokens in a page (default: 1, of a block trace a block)")
    made.add_argument("--session-rate", type=float, metavar="R", help="sessions a second, where a trace says none")
    made.add_argument("--half", choices=[*Half], default=Half.ALL, help="default: all")
    made.add_argument("--num-requests", type=int, metavar="N", help="the first so many; default: all")
    made.add_argument("--model", default="qwen3-next-80b-a3b", metavar="NAME", help="default: qwen3-next-80b-a3b")
    made.add_argument("--eviction", choices=SERVED, default="best", help="default: best")
    made.add_argument("--alpha", type=float, default=ALPHA, metavar="A", help=f"of marconi (default: {ALPHA:g})")
    made.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Replay, print and write; exit status 2 for bad input."""
    args = parser().parse_args(argv)
    logging.disable(logging.INFO)
    # Operations on indices are small: threads that wait for each other take longer, and blur what is timed.
    torch.set_num_threads(1)
    try:
        options = ReadOptions(session_rate=args.session_rate, half=Half(args.half))
        whole = read(args.trace, options)
        if args.num_requests is not None and args.num_requests < 1:
            raise ValueError(f"--num-requests must be 1 or more, got {args.num_requests}")
        if args.page is not None and args.page < 1:
            raise ValueError(f"--page must be 1 or more, got {args.page}")
        trace = Trace(whole.name, whole.unit_tokens, whole.requests[: args.num_requests])
        model, host, clock = load(args.model), pools(args, trace), TraceClock()
        replay = HostReplay(build(args, host, model, clock), host, trace.unit_tokens, clock)
        document = {
            "benchmark": "host_replay",
            "backend": args.backend,
            "trace": trace.name,
            "half": str(args.half),
            "session_rate": args.session_rate,
            "seed": options.seed,
            "model": model.name,
            "kv_tokens": host.num_kv_tokens,
            "state_slots": args.state_slots,
            "page_tokens": host.page_tokens,
            "strategy": str(args.strategy),
            "core": str(args.core) if args.backend == "stock" else None,
            "eviction": str(args.eviction) if args.backend == "marconi" else None,
            "alpha": args.alpha if args.backend == "marconi" else None,
            **measure(trace, replay),
        }
        if args.json is not None:
            args.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    except (ValueError, OSError) as error:
        print(f"host_replay.py: error: {error}", file=sys.stderr)
        return 2
    Console().print(render(document))
    return 0


def render(document: dict[str, Any]) -> Table:
    """A line a figure."""
    title = f"{document['backend']} on {document['trace']}, {document['requests']:,} requests"
    table = Table("figure", box=SIMPLE, title=title)
    table.add_column("", justify="right")
    rate = 100 * document["hit_tokens"] / document["prompt_tokens"]
    table.add_row("token hit rate", f"{rate:.2f} %")
    for name in ("prompt_tokens", "hit_tokens", "recomputed_tokens", "states_written", "evictions", "too_large"):
        table.add_row(name.replace("_", " "), f"{document[name]:,}")
    table.add_row("states written a request", f"{document['states_written'] / document['requests']:.2f}")
    for work, us in document["us_per"].items():
        table.add_row(f"us per {work}", f"{us:,.1f}")
    return table


if __name__ == "__main__":
    sys.exit(main())
