"""What happens between the command line and the first process: every refusal, each in one line.

The two hooks sit on `ServerArgs`, through which `python -m sglang.launch_server`, `sglang serve` and
`sglang.Engine` all pass. On a command line a refusal is printed and exits with status 2; an `Engine` gets the
exception. Neither acts unless `radix_cache_backend` is ours.
"""

import errno
import logging
import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from marconi.engine import flags
from marconi.engine.endpoint import add_route
from marconi.engine.events.sockets import require_tellable
from marconi.engine.flags import BACKEND
from marconi.engine.model_files import require_loadable
from marconi.engine.touch import hook_into, require_hooked
from marconi.engine.version import Refusal, one_line, require_verified

logger = logging.getLogger(__name__)

_FROM_COMMAND_LINE = "_marconi_from_command_line"
_MAX_PORT = 65535
# Each puts another cache in the place of the unified radix cache, which is what this backend extends.
_OTHER_CACHES = ("enable_lmcache", "enable_flexkv", "enable_unified_cache_external_linker")


def on_add_cli_args(_result: None, parser: Any) -> None:
    """After `ServerArgs.add_cli_args`: our flags join SGLang's."""
    flags.add_to(parser)


def on_from_cli_args(server_args: Any, _cls: type, args: Any) -> None:
    """After `ServerArgs.from_cli_args`: read our flags and refuse what cannot be served."""
    if server_args.radix_cache_backend != BACKEND:
        for option in flags.given(args):
            logger.warning("marconi: %s has no effect without --radix-cache-backend %s", option, BACKEND)
        return
    with _one_line_errors():
        flags.take_from(args, os.environ)
        setattr(server_args, _FROM_COMMAND_LINE, True)
        _require_servable(server_args)
        add_route()
        _read_chats()
        _warn_of_workers(server_args.tokenizer_worker_num)
        if server_args.node_rank == 0:
            _require_free_port(server_args.host, server_args.port)


def around_resolve_once(resolve_once: Callable[[Any], None], server_args: Any) -> None:
    """Around `ServerArgs.resolve_once`: an Engine's arguments are checked, a command line's errors are one line."""
    if server_args.radix_cache_backend != BACKEND or getattr(server_args, "_resolution_finished", False):
        resolve_once(server_args)
    elif getattr(server_args, _FROM_COMMAND_LINE, False):
        with _one_line_errors(f"model {server_args.model_path!r}"):
            resolve_once(server_args)
    else:
        _require_servable(server_args)
        resolve_once(server_args)


def _require_servable(server_args: Any) -> None:
    import sglang.version

    from marconi.engine.ledger import server_touches

    require_verified(sglang.version.__version__, os.environ)
    require_hooked(server_touches())
    given = flags.from_environ(os.environ)
    for name in _OTHER_CACHES:
        if getattr(server_args, name):
            option = "--" + name.replace("_", "-")
            raise Refusal(f"{option} and --radix-cache-backend {BACKEND} are two caches: give one of them")
    _require_events(given, server_args)
    require_loadable(server_args.model_path, weights=server_args.load_format != "dummy")
    _guard_requests()


def _require_events(given: flags.Flags, server_args: Any) -> None:
    if given.events is None:
        return
    from sglang.srt.runtime_context import num_dp_ranks_of

    if server_args.kv_events_config:
        raise Refusal(
            "--kv-events-config and --marconi-events tell the same KV twice: give --marconi-events alone, whose events "
            "consumers of the other read"
        )
    if server_args.disable_radix_cache:
        raise Refusal("--marconi-events: with --disable-radix-cache there is nothing to tell; give one of them")
    require_tellable(given, num_ranks=num_dp_ranks_of(server_args), http_port=server_args.port)


def _guard_requests() -> None:
    # Here rather than in the plugin's entry point: only this process validates requests, and a server that does not
    # use the backend keeps its tokenizer manager as it is.
    from marconi.engine.request_touches import GUARD_TOUCHES

    hook_into(GUARD_TOUCHES)


def _read_chats() -> None:
    # Imports SGLang's chat endpoints, which an offline Engine does without.
    from marconi.engine.request_touches import CHAT_TOUCHES

    hook_into(CHAT_TOUCHES)


def _warn_of_workers(num_http_workers: int) -> None:
    if num_http_workers > 1:
        logger.warning(
            "marconi: --tokenizer-worker-num %d: SGLang loads no plugin in these processes, so they have no "
            "GET /marconi, and a request that no model can answer ends the scheduler, as in stock",
            num_http_workers,
        )


def _require_free_port(host: str | None, port: int) -> None:
    if not 0 <= port <= _MAX_PORT:
        raise Refusal(f"--port {port}: expected 0 to {_MAX_PORT}")
    address = host or "127.0.0.1"
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError as error:
            remedy = "a free --port" if error.errno == errno.EADDRINUSE else "another --host or --port"
            raise Refusal(f"cannot listen on {address}:{port} ({error.strerror}): give {remedy}") from None


@contextmanager
def _one_line_errors(subject: str = "") -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if _wants_tracebacks():
            raise
        about = f"{subject}: " if subject and not isinstance(error, Refusal) else ""
        print(f"marconi: error: {about}{one_line(error)}", file=sys.stderr, flush=True)
        raise SystemExit(2) from None


def _wants_tracebacks() -> bool:
    return logging.getLogger().isEnabledFor(logging.DEBUG)


class StartFailure(logging.Filter):
    """Makes one line of the traceback that a scheduler logs when it cannot load a model.

    Lives on the scheduler's logger from the moment the plugin is registered until the cache is built: what fails
    later is not the operator's input, and keeps its traceback.
    """

    LOGGER = "sglang.srt.managers.scheduler"
    _PREFIX = "Scheduler hit an exception: "

    def filter(self, record: logging.LogRecord) -> bool:
        """Shorten `record` in place; never drops one."""
        message = record.getMessage()
        if message.startswith(self._PREFIX) and self._is_ours() and not _wants_tracebacks():
            reason = message.strip().splitlines()[-1]
            record.msg = f"marconi: error: the model cannot be served: {reason} (--log-level debug shows where)"
            record.args = ()
        return True

    @staticmethod
    def _is_ours() -> bool:
        from sglang.srt.runtime_context import get_memory

        return get_memory().radix_cache_backend == BACKEND

    @classmethod
    def install(cls) -> None:
        """Put one on the scheduler's logger."""
        logging.getLogger(cls.LOGGER).addFilter(cls())

    @classmethod
    def remove(cls) -> None:
        """Take it off again."""
        logger = logging.getLogger(cls.LOGGER)
        for installed in [f for f in logger.filters if isinstance(f, cls)]:
            logger.removeFilter(installed)
