"""Which replica takes a request, for a host that keeps the replicas, counts what runs on them, and calls them itself.

    update     the host's replicas and their metadata          -> workers of the dispatcher, subscriptions
    request    a call                                          -> the request to route
    choose     a request, among the replicas that may take it  -> the dispatcher's choice, or None: the host's own rule
    sent       where the host has sent it, whoever chose that  -> it counts as this replica's work
    answered, finished

The choice is None where the prompt's tokens are not known, and where no replica's events arrive: hits would be a guess.
A replica whose events were silent for `SILENT_S`, three snapshots, counts as empty until they are back. Nothing here
knows Ray.

Owner: the event loop that calls `start`.
"""

import json
import logging
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

from marconi.events.address import Keys, TcpAddress
from marconi.model.learned_latency import LearnedLatency
from marconi.router.core import RoutedRequest, RouterCore
from marconi.router.description import EventSource, describe
from marconi.router.dispatch import Ticket
from marconi.router.gateway.added import asking_for_state
from marconi.router.prompts import PromptKind, PromptReader
from marconi_ray.call import Call

logger = logging.getLogger(__name__)

SILENT_S: Final = 15.0


@dataclass(slots=True)
class _Request:
    """A request under way."""

    routed: RoutedRequest
    ticket: Ticket | None = None
    is_sent: bool = False


class Replicas(RouterCore):
    """The replicas of one host, and the requests on them; see the module."""

    def __init__(
        self, reader: PromptReader, latency: LearnedLatency, routing: str = "state-aware", keys: Keys | None = None
    ) -> None:
        """`ValueError` for a routing that is unknown."""
        super().__init__(reader, latency, routing, keys)
        self._events: dict[str, EventSource | None] = {}
        """The events of every replica; None where it publishes none."""
        self._subscribed: set[str] = set()
        self._kinds = frozenset(PromptKind)
        """The prompts that this router tokenizes as all replicas do; others are left to the host's rule."""
        self._hashes: tuple[str | None, int] | None = None
        """Model name and tokens of a block in the hashes of all replicas that are subscribed to."""
        self._requests: dict[str, _Request] = {}

    # Replicas

    def update(self, metadata: Mapping[str, Mapping[str, Any]]) -> None:
        """Set the replicas, each with `url`, `model_info`, `marconi` and `kinds`, or `why_no_events`, or nothing."""
        for name in [name for name in self._events if name not in metadata]:
            self._unsubscribe(name)
            del self._events[name]
            self.dispatcher.remove_worker(name)
        for name, of_replica in metadata.items():
            if name not in self._events:
                self._events[name] = self._event_source(name, of_replica)
                self.dispatcher.add_worker(name)
        self._subscribe()

    def has_events(self, name: str, now_s: float) -> bool:
        """True if a replica's events arrive, as of not long ago."""
        received_s = self.dispatcher.fleet.sync(name).received_s if name in self._subscribed else None
        return received_s is not None and now_s - received_s < SILENT_S

    def _event_source(self, name: str, metadata: Mapping[str, Any]) -> EventSource | None:
        events: EventSource | None = None
        if not metadata:
            why = "it does not describe its server"
        elif "why_no_events" in metadata:
            why = str(metadata["why_no_events"])
        else:
            try:
                found = describe(
                    str(metadata.get("url")), metadata.get("model_info"), metadata.get("marconi"), self.keys
                )
            except ValueError as wrong:
                why = str(wrong)
            else:
                why = found.why_no_events
                if found.num_ranks > 1:
                    why = f"a replica must run 1 data-parallel rank, got {found.num_ranks}"
                elif found.events:
                    events = found.events[0]
                self._kinds &= set(metadata.get("kinds", PromptKind))
                self.reader = self.reader.for_workers(self._kinds, found.model)
        if events is None:
            logger.warning("marconi: replica %s is routed to without its events: %s", name, why)
        return events

    def _subscribe(self) -> None:
        """Subscribe to all replicas that hash alike; to others once none of those is left: the model was replaced."""
        sources = {name: events for name, events in self._events.items() if events is not None}
        hashes = {name: (events.model, events.block_tokens) for name, events in sources.items()}
        if self._hashes not in hashes.values():
            self._hashes = next(iter(hashes.values()), None)
            if self._hashes is not None:
                self.set_hashes(*self._hashes)
        for name, events in sources.items():
            if name in self._subscribed or hashes[name] != self._hashes:
                continue
            try:
                self.feed.subscribe(name, events.sockets)
            except ValueError as taken:
                logger.warning("marconi: replica %s is routed to without its events: %s", name, taken)
                continue
            self._subscribed.add(name)

    def _unsubscribe(self, name: str) -> None:
        events = self._events[name]
        if events is not None and name in self._subscribed:
            self.feed.unsubscribe(events.sockets.worker)
            self._subscribed.discard(name)

    def _forget_silent(self, now_s: float) -> None:
        fleet = self.dispatcher.fleet
        for name in self._subscribed:
            received_s = fleet.sync(name).received_s
            if received_s is not None and now_s - received_s >= SILENT_S:
                logger.warning("marconi: no events of replica %s for %.0f s", name, now_s - received_s)
                fleet.remove_worker(name)
                fleet.add_worker(name)

    # Requests

    async def request(self, call: Call) -> RoutedRequest:
        """Read a call into the request to route; a body that is no JSON object is left to its server to refuse."""
        num_bytes = len(call.body)
        return await self.read(_route(call), await self.run(num_bytes, _object, call.body), num_bytes)

    def choose(self, name: str, routed: RoutedRequest, among: Collection[str]) -> str | None:
        """Choose the replica for a request, which counts as its work from now on; None leaves it to the host's rule.

        A request that has a replica already gets a new choice.
        """
        self._forget(name)
        now_s = time.monotonic()
        self._forget_silent(now_s)
        there = [each for each in among if each in self._events]
        request = self._requests[name] = _Request(routed)
        if not routed.is_known or not any(self.has_events(each, now_s) for each in there):
            return None
        request.ticket = self.dispatch(routed.prompt, there)
        return request.ticket.worker

    def sent(self, name: str, replica: str) -> None:
        """Note where a request was sent; a second time does nothing."""
        request = self._requests.get(name)
        if request is None or replica not in self._events:
            return
        if request.ticket is not None and request.ticket.worker != replica:
            self.ended(request.ticket)
            request.ticket, request.is_sent = None, False
        if request.ticket is None:
            request.ticket = self.dispatch(request.routed.prompt, [replica])
        if not request.is_sent and not request.routed.is_stream:
            self.expect_whole_answer(request.ticket)
        request.is_sent = True

    def why(self, name: str) -> str:
        """The reason of a choice; empty where the host chose."""
        request = self._requests.get(name)
        return "" if request is None or request.ticket is None else str(request.ticket.decision.reason)

    def added(self, name: str, call: Call) -> dict[str, Any]:
        """The fields that ask for a state where prompts on other replicas diverge from that of a request."""
        request = self._requests.get(name)
        if request is None or request.ticket is None or not request.ticket.decision.shared_tokens:
            return {}
        return asking_for_state(_route(call), _object(call.body), request.ticket.decision.shared_tokens)

    def answered(self, name: str) -> None:
        """Note that a request's answer has begun."""
        request = self._requests.get(name)
        if request is not None and request.ticket is not None:
            begin = self.stream_began if request.routed.is_stream else self.prefill_ended
            begin(request.ticket)

    def finished(self, name: str, replica: str | None = None) -> None:
        """End a request that finished, failed or was abandoned; on `replica`, if given, and not if it moved since."""
        request = self._requests.get(name)
        if request is not None and (replica is None or request.ticket is None or request.ticket.worker == replica):
            self._forget(name)

    @property
    def num_requests(self) -> int:
        """The number of requests under way."""
        return len(self._requests)

    def _forget(self, name: str) -> None:
        request = self._requests.pop(name, None)
        if request is not None and request.ticket is not None:
            self.ended(request.ticket)


def reachable(metadata: Mapping[str, Any], *, is_same_node: bool) -> Mapping[str, Any]:
    """A replica's metadata, with `why_no_events` where its events are on another node's loopback.

    The same address of this node may be another replica's.
    """
    marconi = metadata.get("marconi")
    ranks = marconi.get("ranks") if isinstance(marconi, dict) else None
    if is_same_node or not isinstance(ranks, list) or not any(map(_is_on_loopback, ranks)):
        return metadata
    return {**metadata, "why_no_events": "its events are on the loopback of another node: set events_keys"}


def _is_on_loopback(rank: Any) -> bool:
    events = rank.get("events") if isinstance(rank, dict) else None
    if not isinstance(events, dict):
        return False
    try:
        return TcpAddress.parse(str(events.get("events"))).is_loopback
    except ValueError:
        # A path in the file system of that node.
        return True


def _route(call: Call) -> str:
    return call.path.partition("?")[0]


def _object(body: bytes) -> dict[str, Any]:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
