"""What an operator sees and does: `GET /router`, `GET /metrics`, and workers that come and go.

GET    /router            the fleet, the index, and why the latest requests went where they did
POST   /router/workers    {"url": "http://..."}: another worker; 202, since it has still to say what it is
DELETE /router/workers    {"url": "http://..."}: no more requests to it; what it still answers is relayed
GET    /metrics           Prometheus
"""

import time
from collections.abc import Iterator
from dataclasses import asdict, fields, is_dataclass
from typing import Any

from aiohttp import web

from marconi import __version__
from marconi.router.gateway.access import require_administrator
from marconi.router.gateway.answers import refusal
from marconi.router.gateway.brain import Brain
from marconi.router.gateway.connections import Connections
from marconi.router.gateway.forward import Forwarding
from marconi.router.gateway.member import Member
from marconi.router.gateway.metrics import Metrics, Sample
from marconi.router.gateway.watching import Watching
from marconi.router.sync import State
from marconi.router.workers.description import worker_url


class Admin:
    """Answers the administrator."""

    def __init__(
        self, brain: Brain, watching: Watching, forwarding: Forwarding, metrics: Metrics, connections: Connections
    ) -> None:
        self._brain = brain
        self._connections = connections
        self._watching = watching
        self._forwarding = forwarding
        self._metrics = metrics
        self._token = brain.settings.token
        metrics.watch(self._samples)

    async def state(self, request: web.Request) -> web.Response:
        """`GET /router`."""
        require_administrator(request, self._token)
        brain = self._brain
        fleet = brain.dispatcher.fleet
        now_s = time.monotonic()
        return web.json_response(
            {
                "version": __version__,
                "routing": {"rule": brain.routing, **_parameters(brain.dispatcher.routing)},
                "workers": [self._worker(member, now_s) for member in brain.members.values()],
                "index": {
                    "block_tokens": fleet.index.block_tokens,
                    "num_blocks": fleet.index.num_blocks,
                    "num_guesses": len(fleet.guesses),
                    **asdict(fleet.index.stats),
                },
                "events": {**self._wire(), **asdict(fleet.stats)},
                "tokenizer": {
                    "here": sorted(brain.kinds),
                    "num_asked_of_workers": 0 if brain.remote is None else brain.remote.num_asked,
                    "num_not_answered": 0 if brain.remote is None else brain.remote.num_failed,
                },
                "prefill": {
                    "is_known": brain.latency.is_known,
                    "overhead_s": brain.latency.overhead_s,
                    "s_per_flop": brain.latency.s_per_flop,
                },
                "recent": self._forwarding.records.latest(),
            }
        )

    async def metrics(self, request: web.Request) -> web.Response:
        """`GET /metrics`."""
        require_administrator(request, self._token)
        return web.Response(body=self._metrics.text(), headers={"Content-Type": "text/plain; version=0.0.4"})

    async def add(self, request: web.Request) -> web.Response:
        """`POST /router/workers`."""
        url = await self._url(request)
        try:
            member = self._brain.add(url)
        except ValueError as known:
            raise refusal(409, str(known)) from None
        self._watching.watch(member)
        return web.json_response({"url": url}, status=202)

    async def remove(self, request: web.Request) -> web.Response:
        """`DELETE /router/workers`."""
        url = await self._url(request)
        if url not in self._brain.members:
            raise refusal(404, f"{url}: no worker of this router")
        await self._watching.leave(self._brain.remove(url))
        return web.json_response({"url": url})

    async def _url(self, request: web.Request) -> str:
        require_administrator(request, self._token)
        if request.content_type != "application/json":
            # A page in the administrator's browser can send other types unasked.
            raise refusal(400, f"Content-Type: {request.content_type}; application/json is right")
        try:
            body = await request.json()
            return worker_url(body["url"])
        except (ValueError, KeyError, TypeError, AttributeError) as wrong:
            words = str(wrong) if str(wrong).startswith("worker") else 'a body {"url": "http://..."} is right'
            raise refusal(400, words) from None

    def _worker(self, member: Member, now_s: float) -> dict[str, Any]:
        brain, described = self._brain, member.description
        fleet = brain.dispatcher.fleet
        known = member.url in brain.dispatcher.workers
        received_s = fleet.received_s(member.url) if known else None
        events = None if described is None else described.events
        return {
            "url": member.url,
            "condition": member.health.condition,
            "why": member.health.why,
            "model": None if described is None else described.model,
            "num_running": brain.dispatcher.num_running(member.url) if known else 0,
            "work_ahead_s": round(brain.dispatcher.work_ahead_s(member.url, now_s), 6) if known else 0.0,
            "num_failures": member.health.num_failures,
            "num_times_down": member.health.num_times_down,
            "events": None
            if events is None
            else {
                "told_as": events.sockets.worker,
                "address": events.sockets.events,
                "num_entries": fleet.index.holding(member.url).num_entries if known else 0,
                "sync": fleet.state(member.url) if known else State.UNKNOWN,
                "received_s_ago": None if received_s is None else round(now_s - received_s, 3),
            },
            "without_events": "" if described is None else described.without,
        }

    def _wire(self) -> dict[str, Any]:
        stats = self._brain.feed.subscriber.stats
        return {
            "num_messages": stats.num_messages,
            "num_replay_requests": stats.num_replay_requests,
            "num_snapshot_requests": stats.num_snapshot_requests,
            "dropped": {str(why): number for why, number in stats.dropped.items()},
        }

    def _samples(self) -> Iterator[Sample]:
        brain = self._brain
        fleet, now_s = brain.dispatcher.fleet, time.monotonic()
        yield Sample("index_blocks", "That anybody holds.", fleet.index.num_blocks)
        yield Sample("index_guesses", "States that are expected and not told yet.", len(fleet.guesses))
        if brain.remote is not None:
            asked, failed = brain.remote.num_asked, brain.remote.num_failed
            yield Sample("worker_tokenizations", "Prompts that a worker tokenized.", asked, is_counter=True)
            yield Sample("worker_tokenizations_failed", "Those without an answer.", failed, is_counter=True)
        yield Sample("connections", "Of clients.", self._connections.num_open)
        refused = self._connections.num_refused
        yield Sample("connections_refused", "Beyond as many as there may be.", refused, is_counter=True)
        for member in brain.members.values():
            of = {"worker": member.url}
            yield Sample("worker_up", "Whether it takes requests.", float(member.is_up), of)
            if member.url in brain.dispatcher.workers:
                yield Sample("worker_running", "Requests of it.", brain.dispatcher.num_running(member.url), of)
                yield Sample(
                    "worker_work_ahead_seconds",
                    "Prefills that it has not answered, by the model's times.",
                    brain.dispatcher.work_ahead_s(member.url, now_s),
                    of,
                )
                entries = fleet.index.holding(member.url).num_entries
                yield Sample("worker_entries", "Blocks of KV and states that it is known to hold.", entries, of)
        wire = self._brain.feed.subscriber.stats
        yield Sample("event_messages", "Batches and snapshots that were read.", wire.num_messages, is_counter=True)
        for why, number in wire.dropped.items():
            yield Sample("event_messages_dropped", "What could not be.", number, {"why": str(why)}, is_counter=True)
        for stats, what in ((fleet.stats, "events"), (fleet.index.stats, "index")):
            for name, value in asdict(stats).items():
                text = name.removeprefix("num_")
                yield Sample(f"{what}_{text}", f"{text.replace('_', ' ')}; see /router.", value, is_counter=True)


def _parameters(rule: object) -> dict[str, float]:
    """Its numbers, by their names, those of its parts among them."""
    found: dict[str, float] = {}
    for each in fields(rule) if is_dataclass(rule) else ():
        value = getattr(rule, each.name)
        found |= {each.name: value} if isinstance(value, int | float) else _parameters(value)
    return found
