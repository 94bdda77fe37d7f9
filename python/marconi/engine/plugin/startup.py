"""From the command line to the first process: our flags join SGLang's, and what cannot be served is refused.

The hooks sit on `ServerArgs`, through which `python -m sglang.launch_server`, `sglang serve` and `sglang.Engine` all
pass. A refusal is an exception, which an `Engine` gets; on a command line it is printed in one line, with exit status
2. Without our `radix_cache_backend` our flags are refused, and nothing else happens.
"""

import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import sglang.version

from marconi.engine.cpu_platform import is_active
from marconi.engine.faults import OF_PROCESS, Faults
from marconi.engine.http.endpoint import add_routes
from marconi.engine.launch import flags, support
from marconi.engine.launch.flags import BACKEND
from marconi.engine.plugin import upstream
from marconi.engine.plugin.touch import hook_into, require_hooked
from marconi.engine.version import Refusal, require_verified


def on_add_cli_args(_result: None, parser: Any) -> None:
    """After `ServerArgs.add_cli_args`: our flags join SGLang's."""
    flags.add_to(parser)


def on_from_cli_args(server_args: Any, _cls: type, args: Any) -> None:
    """After `ServerArgs.from_cli_args`: read our flags and refuse what cannot be served."""
    if server_args.radix_cache_backend != BACKEND:
        for option, text in flags.given(args).items():
            _end(f"{option} {text} has no effect without --radix-cache-backend {BACKEND}: give both or neither")
        return
    try:
        flags.take_from(args, os.environ)
        _require_servable(server_args)
        hook_into(upstream.HTTP)
    except Refusal as refusal:
        _end(str(refusal))
    add_routes()


def _end(reason: str) -> NoReturn:
    print(f"marconi: error: {reason}", file=sys.stderr, flush=True)
    raise SystemExit(2) from None


def before_resolve_once(server_args: Any) -> None:
    """Before `ServerArgs.resolve_once`: an `Engine` has no command line, and its arguments are checked as well."""
    if server_args.radix_cache_backend != BACKEND:
        return
    if getattr(server_args, "_resolution_finished", False):
        # A record that is resolved comes by again in every child, before it sizes any pool.
        hook_into(upstream.RUNNING, upstream.INT8)
        return
    _require_servable(server_args)
    # Only now: it loads the models' configurations, and no other process needs them.
    from marconi.engine.launch import split

    split.choose(server_args)


def around_int8_checkpoint(refuse: Callable[[Any], None], server_args: Any) -> None:
    """Around SGLang's step that refuses int8 checkpoints under other caches than its own: this one serves them."""
    if server_args.radix_cache_backend != BACKEND:
        refuse(server_args)


def _require_servable(server_args: Any) -> None:
    require_verified(sglang.version.__version__, os.environ)
    require_hooked(*upstream.of_every_process(is_active()))
    given = flags.from_environ(os.environ)
    support.require(support.against_arguments(server_args, given))
    OF_PROCESS.set(Faults())
    # Here rather than in the plugin's entry point: only this process validates requests, and a server that does not
    # use the backend keeps its tokenizer manager as it is.
    hook_into(upstream.REQUESTS)
    if given.explain_text:
        hook_into(upstream.TEXT)
