"""The application: which path is answered by whom, in which order everything starts and stops, and its limits.

    /generate  /v1/completions  /v1/chat/completions            routed by what workers hold    forward.generate
    /v1/models  /model_info  /server_info  ...                  any worker's answer            forward.pass_on
    /health                                                     200 while a worker is up
    /router  /metrics                                           the administrator's            admin

Nothing else is forwarded: a worker's own administration (weights, profiles, its cache) is not for who reaches a router.
"""

import asyncio
import logging
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

import aiohttp
from aiohttp import web

from marconi.router.gateway.admin import Admin
from marconi.router.gateway.answers import error
from marconi.router.gateway.brain import Brain
from marconi.router.gateway.connections import CONNECTIONS, Connection, Connections
from marconi.router.gateway.forward import Forwarding
from marconi.router.gateway.metrics import Metrics
from marconi.router.gateway.upstream import tracing
from marconi.router.gateway.watching import Probes, Watching

logger = logging.getLogger(__name__)

ROUTED: Final = ("/generate", "/v1/completions", "/v1/chat/completions")
RESERVED: Final = ("/health", "/router", "/router/workers", "/metrics")
"""Answered where no connection is left for anything else."""
PASSED_ON: Final = ("/v1/models", "/model_info", "/get_model_info", "/server_info", "/get_server_info")
_KEEPALIVE_S: Final = 3.0
"""Of an idle connection to a worker: SGLang closes its end after 5 s, and what is sent just then is lost."""

Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class Router:
    """The parts of a running router."""

    brain: Brain
    watching: Watching
    forwarding: Forwarding
    admin: Admin


ROUTER: Final = web.AppKey("router", Router)


def application(brain: Brain, workers: tuple[str, ...], probes: Probes = tuple) -> web.Application:
    """A router in front of `workers`, URLs as `worker_url` gives them; it starts with the application.

    What a worker answers to `probes`, made anew for each look, says what of prompts is tokenized here.
    """
    settings = brain.settings
    app = web.Application(
        middlewares=[_in_one_line, _while_there_is_room],
        client_max_size=settings.max_body_bytes,
    )

    app[CONNECTIONS] = Connections(settings)

    async def run(app: web.Application) -> AsyncIterator[None]:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=settings.connect_timeout_s)
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S)
        async with aiohttp.ClientSession(
            connector=connector,
            timeout=timeout,
            # Cookies that a worker gives are of one client, and this session is of all.
            cookie_jar=aiohttp.DummyCookieJar(),
            # Otherwise the library asks for compressed answers, and how an answer is compressed is not relayed.
            headers={"Accept-Encoding": "identity"},
            auto_decompress=False,
            trust_env=False,
            read_bufsize=1 << 16,
            trace_configs=[tracing()],
        ) as session:
            metrics = Metrics()
            watching, forwarding = Watching(brain, session, probes), Forwarding(brain, session, settings, metrics)
            admin = Admin(brain, watching, forwarding, metrics, app[CONNECTIONS])
            app[ROUTER] = Router(brain, watching, forwarding, admin)
            brain.start(watching.tokenize)
            for url in workers:
                watching.watch(brain.add(url))
            try:
                yield
            finally:
                await watching.close()
                brain.close()

    _connect(app)
    app.cleanup_ctx.append(run)
    return app


def _connect(app: web.Application) -> None:
    add = app.router.add_route
    for path in ROUTED:
        add("POST", path, lambda request: request.app[ROUTER].forwarding.generate(request))
    for path in PASSED_ON:
        add("GET", path, lambda request: request.app[ROUTER].forwarding.pass_on(request))
    for path in ("/health", "/health_generate"):
        add("GET", path, _health)
    add("GET", "/router", lambda request: request.app[ROUTER].admin.state(request))
    add("POST", "/router/workers", lambda request: request.app[ROUTER].admin.add(request))
    add("DELETE", "/router/workers", lambda request: request.app[ROUTER].admin.remove(request))
    add("GET", "/metrics", lambda request: request.app[ROUTER].admin.metrics(request))


async def _health(request: web.Request) -> web.StreamResponse:
    return web.Response() if request.app[ROUTER].brain.up() else error(503, "no worker is up", {"Retry-After": "1"})


@web.middleware
async def _in_one_line(request: web.Request, handler: Handler) -> web.StreamResponse:
    """What goes wrong is told in one line of JSON, and never with a request's own words."""
    try:
        return await handler(request)
    except web.HTTPRequestEntityTooLarge:
        limit = request.app[ROUTER].brain.settings.max_body_bytes
        return error(413, f"the body has more than {limit} bytes, as many as it may have")
    except web.HTTPException as refused:
        if refused.content_type == "application/json":
            raise
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
async def _while_there_is_room(request: web.Request, handler: Handler) -> web.StreamResponse:
    """On a connection of the reserve only what that is for, once."""
    connection = request.protocol
    if not (isinstance(connection, Connection) and connection.is_reserved):
        return await handler(request)
    if request.path in RESERVED:
        answer = await handler(request)
    else:
        connections = request.app[CONNECTIONS]
        connections.refuse()
        answer = error(503, connections.why, {"Retry-After": "1"})
    answer.force_close()
    return answer
