"""A router that runs until it is told to stop, and then lets go of nothing: what is under way is answered first.

    SIGINT, SIGTERM    no new connections; requests under way have `_DRAIN_S` to end; a second one ends them

Workers that cannot be reached when it starts are waited for; one that is there and cannot be this router's worker ends
it with the line that says why, as any wrong option does.
"""

import asyncio
import contextlib
import gc
import logging
import resource
import signal
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from aiohttp import web

from marconi.router.gateway.app import application
from marconi.router.gateway.brain import Brain
from marconi.router.gateway.connections import Runner, most_connections
from marconi.router.gateway.watching import Probes
from marconi.router.workers.health import Condition

_DRAIN_S: Final = 30.0
_BACKLOG: Final = 1024


def serve(brain: Brain, workers: tuple[str, ...], probes: Probes, say: Callable[[str], None]) -> int:
    """Serve until a signal; the exit status. `ValueError` for a worker that is none, `OSError` for an address."""
    _take_all_sockets()
    if most_connections() < brain.settings.max_connections:
        say(f"marconi: the limit of open files has room for {most_connections()} connections (ulimit -n)")
        brain.settings = replace(brain.settings, max_connections=most_connections())
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    try:
        import uvloop
    except ImportError:
        return asyncio.run(_serve(brain, workers, probes, say))
    return uvloop.run(_serve(brain, workers, probes, say))


async def _serve(brain: Brain, workers: tuple[str, ...], probes: Probes, say: Callable[[str], None]) -> int:
    settings = brain.settings
    runner = Runner(application(brain, workers, probes), _DRAIN_S)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, _stop, stop)
    stopping = asyncio.create_task(stop.wait())
    looking = asyncio.create_task(_refused(brain))
    try:
        await runner.setup()
        site = web.TCPSite(runner, settings.host, settings.port, backlog=_BACKLOG)
        await site.start()
        # What is there now stays: the collector need not look at it again.
        gc.collect()
        gc.freeze()
        for host, port, *_ in runner.addresses:
            say(f"marconi: router on http://{host}:{port}, {len(workers)} worker{'' if len(workers) == 1 else 's'}")
        await asyncio.wait((looking, stopping), return_when=asyncio.FIRST_COMPLETED)
        if looking.done() and (why := looking.result()) is not None:
            raise ValueError(why)
        await stopping
        say("marconi: router stops; a second signal ends what is under way")
    finally:
        looking.cancel()
        stopping.cancel()
        await runner.cleanup()
    return 0


def _take_all_sockets() -> None:
    """As many files as this process may have: a stream takes two."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _stop(stop: asyncio.Event) -> None:
    if stop.is_set():
        raise KeyboardInterrupt
    stop.set()


async def _refused(brain: Brain) -> str | None:
    """Why the first worker that is there is refused, or None once each was looked at."""
    while True:
        conditions = [member.health.condition for member in brain.members.values()]
        for member in brain.members.values():
            if member.health.condition is Condition.REFUSED:
                return member.health.why
        if Condition.UNKNOWN not in conditions:
            return None
        await asyncio.sleep(0.05)
