"""Which replica takes a request, for a host that keeps the replicas, counts what runs on them, and calls them itself.

    update     the host's replicas, and what each said of itself    -> workers of the dispatcher, events that are heard
    request    a call                                               -> its prompt, or that nobody can know it
    choose     a request, among the replicas that may take it       -> the dispatcher's, or None: the host's own rule
    went       where the host has sent it, whoever chose that       -> on this replica's account
    answered, left

None where the prompt's tokens are not known, and where nobody's events are heard: hits would be a guess. A replica that
was not heard for `SILENT_S`, three snapshots, is taken to hold nothing until it is heard again. Nothing here knows Ray.

Owner: the event loop that calls `start`.
"""

import json
import logging
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

from marconi.events.address import Keys
from marconi.model.learned_latency import LearnedLatency
from marconi.router.core import Core, RoutedRequest
from marconi.router.dispatch import Ticket
from marconi.router.prompts.base import PromptReader
from marconi.router.ray_serve.call import Call
from marconi.router.workers.description import EventsOf, describe

logger = logging.getLogger(__name__)

SILENT_S: Final = 15.0


@dataclass(slots=True)
class _Sent:
    """A request under way."""

    request: RoutedRequest
    ticket: Ticket | None = None
    is_sent: bool = False


class Replicas(Core):
    """One host's; see the module."""

    def __init__(
        self, reader: PromptReader, latency: LearnedLatency, routing: str = "state-aware", keys: Keys | None = None
    ) -> None:
        """`ValueError` for a routing that is unknown."""
        super().__init__(reader, latency, routing, keys)
        self._events: dict[str, EventsOf | None] = {}
        """Of every replica; None where it tells none."""
        self._heard: set[str] = set()
        """Replicas that are listened to."""
        self._agreed: tuple[str | None, int] | None = None
        """What block hashes are of: the model's name and the tokens of a block, the same for all that are heard."""
        self._requests: dict[str, _Sent] = {}

    # Replicas

    def update(self, told: Mapping[str, Mapping[str, Any]]) -> None:
        """The replicas from now on, and what each said: `url`, `model_info`, `marconi`; nothing; or why `unheard`."""
        for name in [name for name in self._events if name not in told]:
            self._listen_no_more(name)
            del self._events[name]
            self.dispatcher.remove_worker(name)
        for name, said in told.items():
            if name not in self._events:
                self._events[name] = self._described(name, said)
                self.dispatcher.add_worker(name)
        self._agree()

    def hears(self, name: str, now_s: float) -> bool:
        """Whether what a replica holds is known, as of not long ago."""
        heard_s = self.dispatcher.fleet.received_s(name) if name in self._heard else None
        return heard_s is not None and now_s - heard_s < SILENT_S

    def _described(self, name: str, said: Mapping[str, Any]) -> EventsOf | None:
        events: EventsOf | None = None
        if not said:
            without = "it says nothing of its server"
        elif "unheard" in said:
            without = str(said["unheard"])
        else:
            try:
                described = describe(str(said.get("url")), said.get("model_info"), said.get("marconi"), self.keys)
            except ValueError as wrong:
                without = str(wrong)
            else:
                events, without = described.events, described.without
        if events is None:
            logger.warning("marconi: replica %s is routed to without its events: %s", name, without)
        return events

    def _agree(self) -> None:
        """Listen to all that hash alike; to others once none of those is left, as when a model is replaced."""
        telling = {name: events for name, events in self._events.items() if events is not None}
        spaces = {name: (events.model, events.block_tokens) for name, events in telling.items()}
        if self._agreed not in spaces.values():
            self._agreed = next(iter(spaces.values()), None)
            if self._agreed is not None:
                self.agree_on(*self._agreed)
        for name, events in telling.items():
            if name in self._heard or spaces[name] != self._agreed:
                continue
            try:
                self.feed.follow(name, events.sockets)
            except ValueError as taken:
                logger.warning("marconi: replica %s is routed to without its events: %s", name, taken)
                continue
            self._heard.add(name)

    def _listen_no_more(self, name: str) -> None:
        events = self._events[name]
        if events is not None and name in self._heard:
            self.feed.leave(events.sockets.worker)
            self._heard.discard(name)

    def _forget_silent(self, now_s: float) -> None:
        fleet = self.dispatcher.fleet
        for name in self._heard:
            heard_s = fleet.received_s(name)
            if heard_s is not None and now_s - heard_s >= SILENT_S:
                logger.warning("marconi: nothing was heard of replica %s for %.0f s", name, now_s - heard_s)
                fleet.remove_worker(name)
                fleet.add_worker(name)

    # Requests

    async def request(self, call: Call) -> RoutedRequest:
        """A call as it is routed; of a body that is no JSON object its server says what is wrong with it."""
        num_bytes = len(call.body)
        return await self.read(call.path.partition("?")[0], await self.run(num_bytes, _object, call.body), num_bytes)

    def choose(self, name: str, request: RoutedRequest, among: Collection[str]) -> str | None:
        """The replica that should take a request, which is on its account from now on; None: the host's own rule.

        A request that was chosen for before is chosen for anew.
        """
        self._forget(name)
        now_s = time.monotonic()
        self._forget_silent(now_s)
        there = [each for each in among if each in self._events]
        sent = self._requests[name] = _Sent(request)
        if not request.is_known or not any(self.hears(each, now_s) for each in there):
            return None
        sent.ticket = self.dispatch(request.prompt, there)
        return sent.ticket.worker

    def went(self, name: str, replica: str) -> None:
        """Where a request was sent; a second time does nothing."""
        sent = self._requests.get(name)
        if sent is None or replica not in self._events:
            return
        if sent.ticket is not None and sent.ticket.worker != replica:
            self.ended(sent.ticket)
            sent.ticket, sent.is_sent = None, False
        if sent.ticket is None:
            sent.ticket = self.dispatch(sent.request.prompt, [replica])
        if not sent.is_sent and not sent.request.is_stream:
            self.answers_whole(sent.ticket)
        sent.is_sent = True

    def why(self, name: str) -> str:
        """Why a request goes where it does; empty where it was the host that chose."""
        sent = self._requests.get(name)
        return "" if sent is None or sent.ticket is None else str(sent.ticket.decision.reason)

    def answered(self, name: str) -> None:
        """A request's answer has begun."""
        sent = self._requests.get(name)
        if sent is not None and sent.ticket is not None:
            begin = self.first_token if sent.request.is_stream else self.prefill_is_over
            begin(sent.ticket)

    def left(self, name: str, replica: str | None = None) -> None:
        """A request has finished, failed or was given up: on `replica`, if told, and not if it has moved since."""
        sent = self._requests.get(name)
        if sent is not None and (replica is None or sent.ticket is None or sent.ticket.worker == replica):
            self._forget(name)

    @property
    def num_requests(self) -> int:
        """Under way."""
        return len(self._requests)

    def _forget(self, name: str) -> None:
        sent = self._requests.pop(name, None)
        if sent is not None and sent.ticket is not None:
            self.ended(sent.ticket)


def _object(body: bytes) -> dict[str, Any]:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
