"""The HTTP server: its routes, the order in which its parts start and stop, and its errors.

    /generate  /v1/completions  /v1/chat/completions            routed by what workers hold    forward.generate
    /v1/models  /model_info  /server_info  ...                  any worker's answer            forward.pass_on
    /health                                                     200 while a worker is up and the index is fed
    /router  /router/ui  /metrics                               the administrator's            admin

Nothing else is forwarded: a worker's own administration (weights, profiles, its cache) is not for clients of a router.

    SIGINT, SIGTERM    no new connections; requests under way have `_DRAIN_S` to end; a second one ends them

At its start the server waits for workers that cannot be reached; one that is there and is refused ends it with the line
that says why, as a wrong option does.
"""

import asyncio
import contextlib
import gc
import logging
import resource
import signal
import time
import traceback
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

from aiohttp import web

from marconi.record import TraceRecorder
from marconi.router.gateway.admin import PAGES, Admin
from marconi.router.gateway.checks import HealthChecks, Probes
from marconi.router.gateway.connections import CONNECTIONS, Connection, Connections, most_connections, running
from marconi.router.gateway.errors import HttpRefusal, error
from marconi.router.gateway.forward import Forwarding
from marconi.router.gateway.gateway import Gateway
from marconi.router.gateway.stats import Metrics, Record
from marconi.router.gateway.upstream import client_session
from marconi.router.gateway.worker import Condition
from marconi.router.prompts import MESSAGES, ROUTES

logger = logging.getLogger(__name__)

RESERVED: Final = ("/health", "/router", "/router/workers", "/metrics")
"""Paths that are answered on a connection of the reserve."""
PASSED_ON: Final = ("/v1/models", "/model_info", "/get_model_info", "/server_info", "/get_server_info")
_DRAIN_S: Final = 30.0
_BACKLOG: Final = 1024
_OBJECTS_A_COLLECTION: Final = 10_000

Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class Router:
    """The parts of a running router."""

    gateway: Gateway
    checks: HealthChecks
    forwarding: Forwarding


ROUTER: Final = web.AppKey("router", Router)


def application(gateway: Gateway, workers: tuple[str, ...], probes: Probes = tuple) -> web.Application:
    """A router in front of `workers`, URLs as `worker_url` gives them, made on the loop that it starts on.

    Workers' answers to `probes` decide what prompts are tokenized here.
    """
    settings = gateway.settings
    recorder = None if settings.record is None else TraceRecorder(settings.record, time.monotonic(), "--record")
    records: deque[Record] = deque(maxlen=settings.num_recent)
    session, connections = client_session(settings.connect_timeout_s), Connections(settings)
    metrics, checks = Metrics(gateway, connections), HealthChecks(gateway, session, probes)
    forwarding = Forwarding(gateway, session, metrics, records, recorder)
    admin = Admin(gateway, session, checks, metrics, records)

    async def run(_: web.Application) -> AsyncIterator[None]:
        async with session:
            gateway.start(checks.tokenize)
            for url in workers:
                checks.start(gateway.add(url))
            try:
                yield
            finally:
                await checks.close()
                gateway.close()
                if recorder is not None:
                    recorder.close()

    app = web.Application(middlewares=[_reserve, _errors_in_one_line], client_max_size=settings.max_body_bytes)
    app[CONNECTIONS] = connections
    app[ROUTER] = Router(gateway, checks, forwarding)
    app.cleanup_ctx.append(run)
    app.add_routes(
        [
            *(web.route("POST", path, forwarding.generate) for path in ROUTES),
            *(web.route("GET", path, forwarding.pass_on) for path in PASSED_ON),
            web.route("POST", f"{MESSAGES}/count_tokens", forwarding.pass_on),
            *(web.route("GET", path, admin.health) for path in ("/health", "/health_generate")),
            web.route("GET", "/router", admin.state),
            web.route("GET", "/router/ui", admin.fleet),
            web.route("GET", f"/router/ui/{{index}}/{{page:{'|'.join(PAGES)}}}", admin.of_worker),
            web.route("POST", "/router/workers", admin.add),
            web.route("DELETE", "/router/workers", admin.remove),
            web.route("GET", "/metrics", admin.metrics),
        ]
    )
    return app


@web.middleware
async def _errors_in_one_line(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer errors in one line of JSON, never with a request's own words."""
    try:
        return await handler(request)
    except web.HTTPRequestEntityTooLarge:
        return error(413, f"the body must have at most {request.client_max_size} bytes")
    except HttpRefusal as refused:
        return error(refused.status, str(refused), refused.headers)
    except web.HTTPException as refused:
        headers = {name: refused.headers[name] for name in ("Allow",) if name in refused.headers}
        return error(refused.status, f"{request.method} {request.path}: {refused.reason}", headers)
    except ConnectionResetError:
        # The client has gone, and a write was the first to see it: as where the connection sees it first. Anything
        # else is a fault to the library, which logs its traceback.
        raise asyncio.CancelledError from None
    except Exception as fault:
        # Where it happened, not the fault's own words: those may be a prompt's.
        place = "".join(traceback.format_tb(fault.__traceback__))
        logger.error("marconi: %s %s: %s\n%s", request.method, request.path, type(fault).__name__, place)
        return error(500, f"a fault of this router's ({type(fault).__name__}); its log says more")


@web.middleware
async def _reserve(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer one of the reserved paths, and nothing else, on a connection of the reserve, then close it."""
    connection = request.protocol
    if not (isinstance(connection, Connection) and connection.is_reserved):
        return await handler(request)
    connection.end_wait()
    if request.path in RESERVED:
        answer = await handler(request)
    else:
        connections = request.app[CONNECTIONS]
        connections.refuse()
        answer = error(503, connections.why, {"Retry-After": "1"})
    answer.force_close()
    return answer


# The process


def serve(gateway: Gateway, workers: tuple[str, ...], probes: Probes, say: Callable[[str], None]) -> int:
    """Serve until a signal; the exit status. `ValueError` for a refused worker, `OSError` for an address."""
    _raise_file_limit()
    if most_connections() < gateway.settings.max_connections:
        say(f"marconi: the limit of open files has room for {most_connections()} connections (ulimit -n)")
        gateway.settings = replace(gateway.settings, max_connections=most_connections())
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    try:
        import uvloop
    except ImportError:
        return asyncio.run(_serve(gateway, workers, probes, say))
    return uvloop.run(_serve(gateway, workers, probes, say))


async def _serve(gateway: Gateway, workers: tuple[str, ...], probes: Probes, say: Callable[[str], None]) -> int:
    settings = gateway.settings
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, _stop, stop)
    stopping = asyncio.create_task(stop.wait())
    refused = asyncio.create_task(_why_refused(gateway))
    try:
        async with running(application(gateway, workers, probes), _DRAIN_S) as runner:
            await web.TCPSite(runner, settings.host, settings.port, backlog=_BACKLOG).start()
            collect_seldom()
            for host, port, *_ in runner.addresses:
                say(f"marconi: router on http://{host}:{port}, {len(workers)} worker{'' if len(workers) == 1 else 's'}")
            await asyncio.wait((refused, stopping), return_when=asyncio.FIRST_COMPLETED)
            if refused.done() and (why := refused.result()) is not None:
                raise ValueError(why)
            await stopping
            say("marconi: router stops; a second signal ends what is under way")
    finally:
        refused.cancel()
        stopping.cancel()
    return 0


def collect_seldom() -> None:
    """Exempt all objects that there are from Python's garbage collector, and have it run 14 times less often.

    What there is at the start stays for good. Of what comes later hardly anything is a cycle, and each collection walks
    the prompts under way: at every 700 objects, Python's default, one decision in nine waits for it.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_OBJECTS_A_COLLECTION)


def _raise_file_limit() -> None:
    """Let this process open as many files as it may: a stream takes two."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _stop(stop: asyncio.Event) -> None:
    if stop.is_set():
        raise KeyboardInterrupt
    stop.set()


async def _why_refused(gateway: Gateway) -> str | None:
    """The reason for which the first worker is refused, or None once each was checked."""
    while True:
        healths = [worker.health for worker in gateway.workers.values()]
        for health in healths:
            if health.condition is Condition.REFUSED:
                return health.why
        if all(health.condition is not Condition.UNKNOWN for health in healths):
            return None
        await asyncio.sleep(0.05)
