"""The operator's routes: `GET /router`, `GET /metrics`, health, adding and removing workers, and pages for a browser.

GET    /router            the fleet, the index, and why each of the latest requests has its worker
POST   /router/workers    {"url": "http://..."}: add a worker; 202, since it has yet to be described
DELETE /router/workers    {"url": "http://..."}: no more requests to it; its answers under way are relayed
GET    /metrics           Prometheus
GET    /health            of the router itself, for anyone

The fleet in a browser, with a link to the live page of every rank of every worker:

GET    /router/ui                      a page that draws what `GET /router` answers (`page/fleet.html`)
GET    /router/ui/INDEX/page           the page of a rank's worker, as the worker made it (`GET /marconi/ui`)
GET    /router/ui/INDEX/ui/frame       what that page asks for: frames,
GET    /router/ui/INDEX/ui/history     the last hour
GET    /router/ui/INDEX/requests       and the latest requests

Ranks are numbered in the order of `GET /router`. The router asks workers with the key that it has for them, so a
browser needs the router's token alone, as a password: it asks for one, and sends it by itself. That is taken for
reading the fleet only, so no other page in that browser can change it.
"""

import asyncio
import math
import time
from collections import deque
from dataclasses import asdict, fields, is_dataclass
from importlib.resources import files
from typing import Any, Final

import aiohttp
from aiohttp import web

from marconi import __version__
from marconi.page.inlined import inlined
from marconi.router.description import worker_url
from marconi.router.gateway.access import require_administrator, require_reader
from marconi.router.gateway.checks import HealthChecks
from marconi.router.gateway.errors import HttpRefusal, error
from marconi.router.gateway.gateway import Gateway
from marconi.router.gateway.stats import Metrics, Record
from marconi.router.gateway.worker import Rank
from marconi.router.sync import State

PAGES: Final = {
    "page": "/marconi/ui",
    "ui/frame": "/marconi/ui/frame",
    "ui/history": "/marconi/ui/history",
    "requests": "/marconi/requests",
}
"""The end of a path of a rank's page here -> its path at the worker."""
_TIMEOUT_S: Final = 30.0


class Admin:
    """Handles the administrator's requests."""

    def __init__(
        self,
        gateway: Gateway,
        session: aiohttp.ClientSession,
        checks: HealthChecks,
        metrics: Metrics,
        records: deque[Record],
    ) -> None:
        self._gateway = gateway
        self._session = session
        self._checks = checks
        self._metrics = metrics
        self._records = records
        self._token = gateway.settings.token
        folder = files("marconi.router.gateway").joinpath("page")
        self._page = inlined(folder, "fleet.html", ["fleet.js"], ["fleet.css"])

    async def state(self, request: web.Request) -> web.Response:
        """Handle `GET /router`."""
        require_reader(request, self._token)
        gateway, remote = self._gateway, self._gateway.remote
        fleet, wire = gateway.dispatcher.fleet, gateway.feed.subscriber.stats
        now_s = time.monotonic()
        return web.json_response(
            {
                "version": __version__,
                "time_s": round(time.time(), 3),
                "routing": {"rule": gateway.routing, **_parameters(gateway.dispatcher.routing)},
                "workers": [self._rank(rank, now_s) for rank in self._ranks()],
                "index": {
                    "block_tokens": fleet.index.block_tokens,
                    "num_blocks": fleet.index.num_blocks,
                    "num_guesses": len(fleet.guesses),
                    **asdict(fleet.index.stats),
                },
                "events": {
                    "num_messages": wire.num_messages,
                    "num_replay_requests": wire.num_replay_requests,
                    "num_snapshot_requests": wire.num_snapshot_requests,
                    "dropped": {str(why): number for why, number in wire.dropped.items()},
                    **asdict(fleet.stats),
                    "guesses": fleet.guesses.fates,
                },
                "tokenizer": {
                    "here": sorted(gateway.kinds),
                    "num_asked_of_workers": 0 if remote is None else remote.num_asked,
                    "num_not_answered": 0 if remote is None else remote.num_failed,
                },
                "prefill": {
                    "is_known": gateway.latency.is_known,
                    "overhead_s": gateway.latency.overhead_s,
                    "s_per_flop": gateway.latency.s_per_flop,
                },
                "traffic": self._metrics.traffic.state(),
                "recent": [asdict(record) for record in reversed(self._records)],
            }
        )

    async def metrics(self, request: web.Request) -> web.Response:
        """Handle `GET /metrics`."""
        require_administrator(request, self._token)
        return web.Response(body=self._metrics.text(), headers={"Content-Type": "text/plain; version=0.0.4"})

    async def health(self, _request: web.Request) -> web.Response:
        """Handle `GET /health`: 200 while a worker is up and the index is fed."""
        why = "" if self._gateway.up() else "no worker is up"
        if not why and (not_fed := self._gateway.feed.why_not_fed):
            why = f"what workers hold is not known: {not_fed}"
        answer = error(503, why, {"Retry-After": "1"}) if why else web.Response()
        self._metrics.health_checks.labels(str(answer.status)).inc()
        return answer

    async def add(self, request: web.Request) -> web.Response:
        """Handle `POST /router/workers`."""
        url = await self._url(request)
        try:
            worker = self._gateway.add(url)
        except ValueError as known:
            raise HttpRefusal(409, str(known)) from None
        self._checks.start(worker)
        return web.json_response({"url": url}, status=202)

    async def remove(self, request: web.Request) -> web.Response:
        """Handle `DELETE /router/workers`."""
        url = await self._url(request)
        if url not in self._gateway.workers:
            raise HttpRefusal(404, f"url must be a worker of this router, got {url}")
        await self._checks.stop(self._gateway.remove(url))
        return web.json_response({"url": url})

    async def _url(self, request: web.Request) -> str:
        require_administrator(request, self._token)
        if request.content_type != "application/json":
            # A page in the administrator's browser can send other types without a preflight.
            raise HttpRefusal(400, f"Content-Type must be application/json, got {request.content_type}")
        try:
            body = await request.json()
            return worker_url(body["url"])
        except (ValueError, KeyError, TypeError, AttributeError) as wrong:
            words = str(wrong) if str(wrong).startswith("worker") else 'the body must be {"url": "http://..."}'
            raise HttpRefusal(400, words) from None

    async def fleet(self, request: web.Request) -> web.Response:
        """Handle `GET /router/ui`."""
        require_reader(request, self._token)
        return web.Response(text=self._page, content_type="text/html")

    async def of_worker(self, request: web.Request) -> web.Response:
        """Handle `GET /router/ui/INDEX/PAGE`, a page of `PAGES`."""
        require_reader(request, self._token)
        ranks, index = self._ranks(), request.match_info["index"]
        if not (index.isascii() and index.isdigit() and int(index) < len(ranks)):
            raise HttpRefusal(404, f"{request.path}: the rank must be 0 to {len(ranks) - 1}, got {index}")
        rank = ranks[int(index)]
        url = f"{rank.worker.url}{PAGES[request.match_info['page']]}?dp_rank={rank.number or 0}"
        try:
            async with (
                asyncio.timeout(_TIMEOUT_S),
                self._session.get(url, headers=self._gateway.settings.worker_headers) as answer,
            ):
                body = await answer.read()
        except (aiohttp.ClientError, TimeoutError) as problem:
            return web.Response(status=502, text=f"{rank.name} does not answer: {type(problem).__name__}")
        return web.Response(body=body, status=answer.status, headers={"Content-Type": answer.content_type})

    def _ranks(self) -> list[Rank]:
        return [rank for worker in self._gateway.workers.values() for rank in worker.ranks]

    def _rank(self, rank: Rank, now_s: float) -> dict[str, Any]:
        worker, name = rank.worker, rank.name
        description = worker.description
        fleet = self._gateway.dispatcher.fleet
        is_known = name in self._gateway.ranks
        received_s = fleet.sync(name).received_s if is_known else None
        report = fleet.sync(name).load_report if is_known else None
        events = rank.events
        return {
            "name": name,
            "url": worker.url,
            "dp_rank": rank.number,
            "condition": worker.health.condition,
            "why": worker.health.why,
            "model": None if description is None else description.model,
            **(self._load(name, now_s) if is_known else {"num_running": 0, "work_ahead_s": 0.0}),
            "load": None if report is None else {**asdict(report.load), "age_s": round(now_s - report.made_s, 3)},
            "num_failures": worker.health.num_failures,
            "num_health_checks": worker.health.num_checks,
            "num_times_down": worker.health.num_times_down,
            "events": None
            if events is None
            else {
                "name_in_events": events.sockets.worker,
                "address": events.sockets.events,
                "num_entries": fleet.index.holding(name).num_entries if is_known else 0,
                "sync": fleet.sync(name).state if is_known else State.UNKNOWN,
                "received_s_ago": None if received_s is None else round(now_s - received_s, 3),
            },
            "without_events": "" if description is None else description.why_no_events,
        }

    def _load(self, name: str, now_s: float) -> dict[str, Any]:
        """The work of a rank, its pace, and how well both were known of late."""
        dispatcher = self._gateway.dispatcher
        load = dispatcher.load(name, now_s)
        return {
            "num_running": load.num_running,
            "work_ahead_s": round(load.wait_s(now_s), 6),
            "limit": load.limit if math.isfinite(load.limit) else None,
            "held_s": round(load.held.mean_s(now_s), 6),
            "turnover": round(dispatcher.fleet.sync(name).turnover.share, 3),
            "pace": round(dispatcher.paces.of(name, now_s), 3),
            "latest": self._gateway.placed[name].state(),
        }


def _parameters(rule: object) -> dict[str, float]:
    """The numbers of a rule and of its parts, by name."""
    found: dict[str, float] = {}
    for each in fields(rule) if is_dataclass(rule) else ():
        value = getattr(rule, each.name)
        found |= {each.name: value} if isinstance(value, int | float) else _parameters(value)
    return found
