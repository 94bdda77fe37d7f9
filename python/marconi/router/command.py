"""The subcommand `marconi router`: its options, and a router that runs until it is stopped.

Running the command imports the router, which needs an extra.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import Any, Final

from marconi.events.address import Keys
from marconi.router.gateway.settings import LIMITS, Settings

_EXTRA: Final = "pip install '.[router]' in its checkout"
_TOKEN_ENV: Final = "MARCONI_ROUTER_TOKEN"  # noqa: S105 - a name
_API_KEY_ENV: Final = "MARCONI_ROUTER_WORKER_API_KEY"
ROUTINGS: Final = ("round-robin", "least-loaded", "sticky-hash", "kv-only", "state-aware")


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add the subcommand to those of the `marconi` command."""
    router = commands.add_parser(
        "router",
        help="serve one endpoint in front of several servers, and send each request where its prefix is cached",
        description="Serve the routes of SGLang servers (/v1/chat/completions, /v1/messages, /v1/completions, "
        "/generate, streamed or not) and send each request to the server with the longest prefix of its prompt up to a "
        "kept state. "
        "GET /router shows the fleet and the reason for each choice; GET /metrics is for Prometheus.",
        epilog="example:\n  marconi router --model Qwen/Qwen3-Next-80B-A3B-Instruct "
        "--workers http://127.0.0.1:30001,http://127.0.0.1:30002",
    )
    router.add_argument(
        "--workers", required=True, metavar="URLS", help="separated by commas: http://127.0.0.1:30001,..."
    )
    router.add_argument(
        "--model",
        required=True,
        metavar="DIR_OR_NAME",
        help="folder or hub name of the workers' model, for its tokenizer, chat template and config.json",
    )
    router.add_argument("--profile", metavar="NAME", help="a known model, if --model has no config.json")
    router.add_argument(
        "--device",
        default="h100",
        metavar="NAME",
        help="the workers' device, whose prefill times are assumed until some are measured (default: h100)",
    )
    router.add_argument("--host", default="127.0.0.1", help="default: 127.0.0.1")
    router.add_argument("--port", type=int, default=30000, metavar="N", help="default: 30000; 0 for any")
    router.add_argument("--routing", choices=ROUTINGS, default="state-aware", help="default: state-aware")
    router.add_argument("--session-header", metavar="NAME", help="names a session, for sticky-hash and ties")
    router.add_argument(
        "--record",
        type=Path,
        metavar="FILE",
        help="record each served request as lengths and keyed hashes, no tokens, for `marconi plan FILE`; at 64 MiB it "
        "becomes FILE.1",
    )
    add_prompt_flags(router.add_argument_group("flags that change prompts: give the workers' values"))
    access = router.add_argument_group("access")
    access.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help=f"file with the administrator's token, at least 16 characters, which /router and /metrics then require; "
        f"required if other hosts can reach the router. Environment: {_TOKEN_ENV}, the token itself.",
    )
    access.add_argument(
        "--worker-api-key-file",
        type=Path,
        metavar="FILE",
        help=f"file with the workers' --api-key, for the router's own requests. Environment: {_API_KEY_ENV}.",
    )
    access.add_argument(
        "--events-keys", type=Path, metavar="FILE", help="the fleet's CURVE .key_secret, the same as the workers'"
    )
    access.add_argument(
        "--tenant-header",
        metavar="NAME",
        help="a header that each request must have: tenants share no prefix. Your authenticating proxy sets it.",
    )
    limits = router.add_argument_group("limits")
    for name, limit in LIMITS.items():
        words = f"{limit.metadata['help']} (default: {limit.default:.0f})"
        limits.add_argument(f"--{name.replace('_', '-')}", type=type(limit.default), metavar="N", help=words)
    router.set_defaults(run=_run)


def add_prompt_flags(parser: "argparse._ActionsContainer") -> None:
    """Add SGLang's flags that change prompts, which `model.reader_of` reads."""
    parser.add_argument("--chat-template", metavar="FILE_OR_NAME")
    parser.add_argument("--hf-chat-template-name", metavar="NAME")
    parser.add_argument("--default-chat-template-kwargs", metavar="JSON")
    parser.add_argument("--lora-paths", nargs="*", default=(), metavar="NAME=PATH")


def _run(args: argparse.Namespace) -> int:
    try:
        from marconi.router.description import worker_url
        from marconi.router.gateway.app import serve
        from marconi.router.gateway.gateway import Gateway
        from marconi.router.model import latency_of, reader_of
        from marconi.router.prompts.check import probes
    except ImportError as absent:
        raise ValueError(f"`marconi router` needs {absent.name}, which is not installed: {_EXTRA}") from None

    # transformers loads torch where it is installed: 2 s and 0.6 GB, which no id needs. It is kept out here alone, in a
    # process that is nothing but a router: others (Ray's, a test's) may need torch themselves.
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    given = {name: getattr(args, name) for name in LIMITS if getattr(args, name) is not None}
    settings = Settings(
        host=args.host,
        port=args.port,
        token=_secret(args.token_file, _TOKEN_ENV),
        worker_api_key=_secret(args.worker_api_key_file, _API_KEY_ENV),
        tenant_header=args.tenant_header,
        session_header=args.session_header,
        record=args.record,
        **given,
    )
    workers = tuple(dict.fromkeys(worker_url(text) for text in args.workers.split(",") if text.strip()))
    if not workers:
        raise ValueError(f"--workers must be URLs like http://127.0.0.1:30001, got {args.workers!r}")
    keys = None if args.events_keys is None else Keys.read(args.events_keys)
    reader = reader_of(args.model, args)
    if reader.why_not:
        _say(f"marconi: {reader.why_not}; workers tokenize")
    latency = latency_of(args.model, args.profile, args.device)
    gateway = Gateway(reader, latency, settings, args.routing, keys)
    return serve(gateway, workers, lambda: probes(reader), _say)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _secret(path: Path | None, variable: str) -> str | None:
    """Read a secret from a file, or else the environment: on a command line every user of the host could read it."""
    if path is None:
        return os.environ.get(variable)
    secret = path.read_text(encoding="utf-8").strip()
    if not secret:
        raise ValueError(f"{path}: must hold a token, got an empty file")
    return secret
