"""The request router of a Ray Serve deployment of SGLang servers.

    ranks of a request    1. the replica that is expected to give its first token first, from the states it holds
                          2. the others, the shortest queue first, where the first has as many requests as it may have
    Ray's own rule        two replicas at random, the shorter queue of both: for a call that is no `Call`, for a prompt
                          that cannot be known, and where no replica's events arrive

A replica describes its events once, when it is ready (`record_replica_metadata`): stats would come seconds later
(`request_routing_stats_period_s`), and a server that restarts is a new replica. Each handle has a router, which knows
of the others' requests what Ray does: the length of queues.

Ray tries the ranks in order (`_select_from_candidate_replicas`). The replica that got a request is known when its
future is set, and its end when `on_request_completed` is called.
"""

import asyncio
import logging
import random
from functools import partial
from pathlib import Path
from typing import Any, Final

import ray
from ray.serve.request_router import (
    LocalityMixin,
    MultiplexMixin,
    PendingRequest,
    ReplicaID,
    RequestRouter,
    RunningReplica,
)

from marconi.events.address import Keys
from marconi.router.model import latency_of
from marconi_ray.call import Call
from marconi_ray.options import Options
from marconi_ray.replicas import Replicas, reachable

logger = logging.getLogger(__name__)

_TWO_CHOICES: Final = "shorter of two queues"
_FULL: Final = "preferred replica at its limit"


class StateAwareRouter(LocalityMixin, MultiplexMixin, RequestRouter):
    """Sends a call where the most of its prompt need not be computed again; see the module."""

    _replicas_known: Replicas | None = None

    def initialize_state(self, **kwargs: Any) -> None:
        """Read `Options.for_router`; where that fails, log a line and use Ray's own rule."""
        # One entry for each request until it is sent or given up, since Ray does not call back for these.
        self._sending: dict[str, asyncio.Future[Any]] = {}
        self._is_started = False
        try:
            options = Options.of(kwargs)
            keys = None if options.events_keys is None else Keys.read(Path(options.events_keys))
            latency = latency_of(options.model, options.profile, options.device)
            self._replicas_known = Replicas(options.reader(), latency, options.routing, keys)
        except (ValueError, OSError) as wrong:
            # Raised in here it would leave a handle that never answers.
            logger.error("marconi: routing by two choices, since the router cannot know prompts: %s", wrong)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Set the replicas."""
        super().update_replicas(replicas)
        self._update()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Remove a replica."""
        super().on_replica_actor_died(replica_id)
        self._update()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Rank the replicas for a request; see the module."""
        call = _call_of(pending_request)
        if call is None or pending_request is None:
            return self._two_choices(pending_request)
        chosen = await self._by_state(call, pending_request)
        replicas = _untried(self.curr_replicas.values(), call)
        first = [each for each in replicas if each.replica_id.unique_id == chosen]
        call.replica = chosen
        if not first:
            call.why = _TWO_CHOICES
            return self._two_choices(pending_request, call)
        pending_request.routing_context.should_backoff = True
        return [first, [each for each in replicas if each not in first]]

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """End a request whose answer has ended in any way."""
        if self._replicas_known is not None:
            self._replicas_known.finished(internal_request_id, replica_id.unique_id)

    async def _by_state(self, call: Call, pending: PendingRequest) -> str | None:
        known = self._replicas_known
        if known is None:
            return None
        routed = await known.request(call)
        if pending.future.done():
            return None
        name = pending.metadata.internal_request_id
        among = [each.replica_id.unique_id for each in _untried(self.curr_replicas.values(), call)]
        chosen = known.choose(name, routed, among)
        call.why, call.added = known.why(name), known.added(name, call)
        if self._sending.get(name) is not pending.future:
            self._sending[name] = pending.future
            pending.future.add_done_callback(partial(self._sent, name, call))
        return chosen

    def _sent(self, name: str, call: Call, future: "asyncio.Future[RunningReplica]") -> None:
        """Note that a request has its replica, or that its client has disconnected before."""
        if self._sending.get(name) is future:
            del self._sending[name]
        known = self._replicas_known
        assert known is not None
        if future.cancelled() or future.exception() is not None:
            known.finished(name)
            return
        chosen, call.replica = call.replica, future.result().replica_id.unique_id
        if chosen not in (None, call.replica):
            call.why = _FULL
        loop = asyncio.get_running_loop()
        call.answered = lambda: loop.call_soon_threadsafe(known.answered, name)  # type: ignore[assignment]
        known.sent(name, call.replica)

    def _two_choices(self, pending: PendingRequest | None, call: Call | None = None) -> list[list[RunningReplica]]:
        if pending is not None and pending.metadata.multiplexed_model_id:
            ids = self.apply_multiplex_routing(pending)
        else:
            ids = self.apply_locality_routing(pending)
        there = [self.curr_replicas[each] for each in ids if each in self.curr_replicas]
        replicas = there if call is None else _untried(there, call)
        return [random.sample(replicas, min(2, len(replicas)))] if replicas else []

    def _update(self) -> None:
        known = self._replicas_known
        if known is None:
            return
        if not self._is_started:
            self._is_started = True
            known.start()
        own = ray.get_runtime_context().get_node_id()
        known.update(
            {
                replica_id.unique_id: reachable(replica.replica_metadata, is_same_node=replica.node_id == own)
                for replica_id, replica in self.curr_replicas.items()
            }
        )


def _call_of(pending: PendingRequest | None) -> Call | None:
    if pending is None:
        return None
    return next((each for each in (*pending.args, *pending.kwargs.values()) if isinstance(each, Call)), None)


def _untried(replicas: Any, call: Call) -> list[RunningReplica]:
    """The replicas that have not failed a call, or all where each has."""
    there = list(replicas)
    return [each for each in there if each.replica_id.unique_id not in call.tried] or there
