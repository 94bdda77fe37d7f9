"""The subcommand `marconi validate`: send a trace to a running server, replay what it was sent, and compare."""

import argparse
import sys
import threading
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from rich.console import Group
from rich.text import Text

from marconi.model import load
from marconi.policy.request import Trace
from marconi.replay.command import add_trace, positive
from marconi.replay.inputs import read_trace
from marconi.replay.progress import metered
from marconi.replay.report import deliver
from marconi.replay.result import require_writable
from marconi.validate.comparison import Comparison, Row
from marconi.validate.prediction import Prediction, Sent, replay_of
from marconi.validate.prompts import Prompts
from marconi.validate.server import OWN, RequestRefused, ServedCache, ServerClient

DEFAULT_MAX_NEW_TOKENS: Final = 16
DEFAULT_TOLERANCE_POINTS: Final = 0.5


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add the subcommand to those of the `marconi` command."""
    validate: argparse.ArgumentParser = commands.add_parser(
        "validate",
        help="hold the replay's prediction against a running server",
        description="Flush a server's cache, send it a trace, replay what it was sent on pools of the same size, and "
        "compare the cached tokens of every request. Exit status 0 if both agree, 1 if not. Nobody else should use the "
        "server meanwhile: if it has requests, or has begun others within the last minute, the command asks before it "
        "flushes, or refuses where nobody can answer. TRACE is as in `marconi replay`.",
        epilog="example:\n  marconi validate http://127.0.0.1:30000 generate:chat-short --max-requests 60",
    )
    validate.add_argument("url", metavar="URL", help="the server's address, for example http://127.0.0.1:30000")
    validate.add_argument("trace", metavar="TRACE", help="a trace, - for stdin, or generate:WORKLOAD")
    validate.add_argument(
        "--model", metavar="NAME", help="as in `marconi replay` (default: the server's own model path)"
    )
    validate.add_argument(
        "--concurrency", type=positive, default=1, metavar="N", help="requests sent beside each other (default: 1)"
    )
    validate.add_argument(
        "--tolerance",
        type=_points,
        metavar="POINTS",
        help="points of the prompt tokens that both may be apart in all (default: no request may differ; with "
        f"--concurrency above 1: {DEFAULT_TOLERANCE_POINTS:g})",
    )
    validate.add_argument(
        "--max-new-tokens",
        type=positive,
        default=DEFAULT_MAX_NEW_TOKENS,
        metavar="N",
        help=f"cut the trace's answers to so many (default: {DEFAULT_MAX_NEW_TOKENS})",
    )
    validate.add_argument("--max-requests", type=positive, metavar="N", help="send no more than the first N")
    validate.add_argument("--api-key", metavar="KEY", help="the server's API key, if it has one")
    validate.add_argument("--flush", action="store_true", help="flush without asking, even if others use the server")
    validate.add_argument(
        "--json", type=Path, metavar="FILE", help="write both sides of every request there (- is stdout)"
    )
    validate.add_argument("--seed", type=int, default=0, metavar="N", help="of drawn times and workloads (default: 0)")
    add_trace(validate)
    validate.set_defaults(run=_validate)


def _points(text: str) -> float:
    try:
        points = float(text)
    except ValueError:
        points = -1.0
    if not 0 <= points <= 100:
        raise argparse.ArgumentTypeError(f"must be a number of points from 0 to 100, got {text!r}")
    return points


def _validate(args: argparse.Namespace) -> int:
    require_writable(args.json)
    server = ServerClient(args.url, args.api_key)
    ranks, info = server.ranks(), server.info()
    cache = ServedCache.of(ranks, info)
    if args.model is None:
        args.model = str(info.get("model_path", ""))
    try:
        flops = load(args.model).prefix_flops
    except ValueError as error:
        raise ValueError(f"--model must name the server's model: {error}") from None
    trace = read_trace(args)
    if args.max_requests is not None:
        trace = Trace(trace.name, trace.unit_tokens, trace.requests[: args.max_requests])
    vocab_size = cache.settings.vocab_size
    if vocab_size is None:
        raise ValueError("the server does not say how many tokens its model knows: it runs another version of marconi")
    prompts = Prompts(trace, vocab_size)
    if not args.flush:
        _require_agreement(server)
    server.flush()
    sent, num_refused = _send(server, trace, prompts, args, cache.max_prompt_tokens)
    _remark_others(server, ranks, len(sent))
    predicted = Prediction(replay_of(cache, flops), [each for _, _, each in sent]).run()
    tolerance = args.tolerance
    if tolerance is None and args.concurrency > 1:
        tolerance = DEFAULT_TOLERANCE_POINTS
    rows = tuple(
        Row(index, rid, len(each.prompt), each.answer.num_cached_tokens, each.answer.line, *says)
        for (index, rid, each), says in zip(sent, predicted, strict=True)
    )
    comparison = Comparison(server.address, args.trace, args.concurrency, tolerance, num_refused, rows)
    is_close = comparison.tolerance_points is not None and comparison.agrees
    lines = ("", *(() if is_close else comparison.parted()), comparison.sentence())
    deliver(Group(comparison.table(), *map(Text, lines)), args.json, comparison.to_json)
    return 0 if comparison.agrees else 1


def _require_agreement(server: ServerClient) -> None:
    """Ask before others lose what is cached for them; `ValueError` unless the answer is yes."""
    num_active, num_recent = server.others()
    if not num_active and not num_recent:
        return
    used = f"requests running or waiting: {num_active:,}, begun by others within the last minute: {num_recent:,}"
    if sys.stdin.isatty():
        # Standard output may be the JSON.
        print(f"{server.address}: {used}. Flush its cache? [y/N] ", end="", file=sys.stderr, flush=True)
        if sys.stdin.readline().strip().lower() in ("y", "yes"):
            return
    raise ValueError(f"URL must be a server that nobody else uses, or --flush be given, got {used}")


def _send(
    server: ServerClient, trace: Trace, prompts: Prompts, args: argparse.Namespace, max_prompt_tokens: int | None
) -> tuple[list[tuple[int, str, Sent]], int]:
    """Each request that the server has answered, by its position and `rid`, and how many it has refused.

    At most `args.concurrency` at a time, in the trace's order; `ValueError` if it refuses all. A prompt of more than
    `max_prompt_tokens` is not sent: the server would refuse it, and take a slot and a token for the error.
    """
    run, lock = f"{OWN}{uuid.uuid4().hex[:8]}", threading.Lock()
    refused: list[str] = []

    def send(index: int) -> tuple[int, str, Sent] | None:
        request, rid = trace.requests[index], f"{run}-{index}"
        with lock:
            prompt = prompts.of(index)
        if max_prompt_tokens is not None and len(prompt) > max_prompt_tokens:
            refused.append(f"request {index}: {len(prompt):,} tokens, at most {max_prompt_tokens:,} are served")
            return None
        num_output_tokens = max(min(request.num_output_tokens, args.max_new_tokens), 1)
        try:
            answer = server.generate(rid, prompt, num_output_tokens, request.namespace)
        except RequestRefused as error:
            refused.append(f"request {index}: {error}")
            return None
        with lock:
            prompts.answered(index, answer.output)
        return index, rid, Sent(prompt, request.namespace, answer)

    sent = []
    with metered("ask the server", len(prompts)) as meter:
        for each in _in_turn(send, len(prompts), args.concurrency):
            meter.advance(1)
            if each is not None:
                sent.append(each)
    if refused:
        print(f"marconi: the server refused {len(refused):,} requests, the first: {refused[0][:200]}", file=sys.stderr)
    if not sent:
        raise ValueError(f"{server.address} answers none of the trace's {len(prompts):,} requests")
    return sent, len(refused)


def _in_turn(send: Any, num_requests: int, concurrency: int) -> Iterator[tuple[int, str, Sent] | None]:
    if concurrency == 1:
        yield from map(send, range(num_requests))
        return
    pool = ThreadPoolExecutor(concurrency)
    try:
        yield from pool.map(send, range(num_requests))
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _remark_others(server: ServerClient, before: Sequence[dict[str, Any]], num_own: int) -> None:
    """Say it if the server has served others meanwhile: what they left is in no replay."""
    (then,), (now,) = before, server.ranks()
    num_others = sum(now[name] - then[name] for name in ("num_requests", "num_requests_uncached")) - num_own
    if num_others > 0:
        print(f"marconi: the server has served {num_others:,} requests of others meanwhile", file=sys.stderr)
