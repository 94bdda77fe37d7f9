"""What Serve asks of a request router, asked of this one without a cluster: fakes for replicas, and real events."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray.serve", reason="THE RAY EXTRA IS NOT INSTALLED, this test did not run: pip install '.[ray]'")

import aiohttp
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, RequestMetadata
from ray.serve.request_router import PendingRequest, ReplicaID

from marconi.events.base import SHARED_ELSEWHERE
from marconi.events.hashes import HashSpace
from marconi.router.dispatch import prompt_of
from marconi_ray import request_router as module
from marconi_ray.call import Call, ResponseHead
from marconi_ray.deployment import SGLang
from marconi_ray.request_router import StateAwareRouter
from router.gateway.stand_in import BLOCK_TOKENS, MODEL, StandIn, living

from . import folder
from .test_replicas import said, until

OF = DeploymentID("SGLang", "app")
HERE = "this-node"
IDS = list(range(80))
MAX_ONGOING = 4


@dataclass
class Replica:
    """As Serve describes one."""

    name: str
    replica_metadata: dict[str, Any]
    node_id: str = HERE
    num_queued: int = 0
    availability_zone: str | None = None
    max_ongoing_requests: int = MAX_ONGOING
    multiplexed_model_ids: set[str] = field(default_factory=set)

    @property
    def replica_id(self) -> ReplicaID:
        return ReplicaID(self.name, OF)

    async def get_queue_len(self, *, deadline_s: float) -> int:
        del deadline_s
        return self.num_queued


def run(story: Awaitable[None]) -> None:
    async def within() -> None:
        await asyncio.wait_for(story, 60)  # type: ignore[arg-type]

    asyncio.run(within())


def call(ids: list[int], **more: Any) -> Call:
    return Call("POST", "/generate", (), json.dumps({"input_ids": ids, **more}).encode())


def pending(arg: Any, number: int = 1) -> PendingRequest:
    return PendingRequest(args=[arg], kwargs={}, metadata=RequestMetadata(str(number), str(number)))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return folder.write(tmp_path)


@asynccontextmanager
async def router_of(model: Path | str, *workers: StandIn) -> AsyncIterator[tuple[StateAwareRouter, list[Replica]]]:
    made = StateAwareRouter(
        deployment_id=OF, handle_source=DeploymentHandleSource.REPLICA, use_replica_queue_len_cache=True
    )
    made.initialize_state(model=str(model), profile=folder.PROFILE)
    async with living(*workers):
        replicas = [Replica(worker.name, await said(worker)) for worker in workers]
        made.update_replicas(replicas)  # type: ignore[arg-type]
        try:
            yield made, replicas
        finally:
            if made._replicas_known is not None:
                made._replicas_known.close()


async def holds(router: StateAwareRouter, worker: StandIn) -> None:
    """Have it hold the prompt's state, and the router know."""
    space = HashSpace.of(MODEL, None, None)
    worker.holding.keep(space, prompt_of(IDS, space, BLOCK_TOKENS).chain.hashes)
    known = router._replicas_known
    assert known is not None
    await until(lambda: known.dispatcher.fleet.index.holding(worker.name).num_entries >= len(IDS) // BLOCK_TOKENS)


def queue(router: StateAwareRouter, replicas: list[Replica], *lengths: int) -> None:
    """What replicas have to do, as they say and as the router knows it."""
    for replica, length in zip(replicas, lengths, strict=True):
        replica.num_queued = length
        router.on_new_queue_len_info(replica.replica_id, length)


def num_running(router: StateAwareRouter, name: str) -> int:
    assert router._replicas_known is not None
    return router._replicas_known.dispatcher.num_running(name)


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: HERE))


async def routed(router: StateAwareRouter, request: PendingRequest) -> str:
    chosen = await router._choose_replica_for_request(request)
    await asyncio.sleep(0)
    name: str = chosen.replica_id.unique_id
    return name


def test_a_call_goes_to_the_replica_that_holds_its_state_until_its_end_is_told(model: Path) -> None:
    async def story() -> None:
        workers = [StandIn(name) for name in "abc"]
        async with router_of(model, *workers) as (router, _):
            await holds(router, workers[1])
            asked = call([*IDS, 5, 6])
            assert await routed(router, pending(asked)) == "b"
            assert (asked.replica, asked.why) == ("b", "longest cached prefix")
            assert num_running(router, "b") == 1
            assert asked.answered is not None
            asked.answered()
            router.on_request_completed(ReplicaID("b", OF), "1")
            assert num_running(router, "b") == 0

    run(story())


def test_a_call_asks_for_a_state_where_only_another_replica_has_its_prefix(model: Path) -> None:
    async def story() -> None:
        workers = [StandIn(name) for name in "ab"]
        async with router_of(model, *workers) as (router, _):
            await holds(router, workers[1])
            known = router._replicas_known
            assert known is not None
            await until(lambda: known.has_events("a", time.monotonic()))
            asked = call([*IDS, 5, 6])
            asked.tried = frozenset("b")
            assert await routed(router, pending(asked)) == "a"
            num_tokens = (len(IDS) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
            assert asked.added == {"sampling_params": {"custom_params": {SHARED_ELSEWHERE: num_tokens}}}

    run(story())


def test_a_replica_adds_to_the_body_what_its_router_asks() -> None:
    async def story() -> None:
        worker = StandIn("a")
        async with living(worker), aiohttp.ClientSession(trust_env=False) as session:
            replica: Any = SimpleNamespace(_server=worker, _name="a", _client=lambda: session)
            for added in ({}, {"sampling_params": {"custom_params": {SHARED_ELSEWHERE: 8}}}):
                asked = Call("POST", "/generate", (), b'{"text": "0123456789"}', added)
                (head,) = [part async for part in SGLang.forward(replica, asked)]
                assert isinstance(head, ResponseHead)
                assert head.status == 200
                assert worker.asked[-1] == {"text": "0123456789"} | added

    run(story())


def test_where_the_holder_is_full_another_has_the_call_and_counts_it(model: Path) -> None:
    async def story() -> None:
        workers = [StandIn(name) for name in "ab"]
        async with router_of(model, *workers) as (router, replicas):
            await holds(router, workers[0])
            queue(router, replicas, MAX_ONGOING, 0)
            asked = call([*IDS, 5])
            assert await routed(router, pending(asked)) == "b"
            assert asked.why == "preferred replica at its limit"
            assert [num_running(router, name) for name in "ab"] == [0, 1]

    run(story())


def test_a_call_that_is_given_up_while_it_waits_is_counted_nowhere(model: Path) -> None:
    async def story() -> None:
        workers = [StandIn(name) for name in "ab"]
        async with router_of(model, *workers) as (router, replicas):
            await holds(router, workers[0])
            queue(router, replicas, MAX_ONGOING, MAX_ONGOING)
            waiting = asyncio.create_task(routed(router, pending(call([*IDS, 5]))))
            assert router._replicas_known is not None
            known = router._replicas_known
            await until(lambda: known.num_requests == 1)
            waiting.cancel()
            await until(lambda: known.num_requests == 0)
            assert [num_running(router, name) for name in "ab"] == [0, 0]

    run(story())


def test_a_replica_that_failed_a_call_is_not_asked_again_while_there_is_another(model: Path) -> None:
    async def story() -> None:
        workers = [StandIn(name) for name in "ab"]
        async with router_of(model, *workers) as (router, _):
            await holds(router, workers[0])
            nowhere_else = call([*IDS, 5])
            nowhere_else.tried = frozenset("ab")
            assert await routed(router, pending(nowhere_else, 3)) == "a"
            again = call([*IDS, 5])
            again.tried = frozenset("a")
            assert await routed(router, pending(again)) == "b"
            unknown = call(IDS, image_data="...")
            unknown.tried = frozenset("b")
            assert await routed(router, pending(unknown, 2)) == "a"

    run(story())


def test_a_dead_replica_is_forgotten_and_its_sessions_go_on_elsewhere(model: Path) -> None:
    async def story() -> None:
        workers = [StandIn(name) for name in "ab"]
        async with router_of(model, *workers) as (router, replicas):
            await holds(router, workers[0])
            router.on_replica_actor_died(replicas[0].replica_id)
            assert await routed(router, pending(call([*IDS, 5]))) == "b"
            router.on_request_completed(replicas[0].replica_id, "of the dead one")
            assert num_running(router, "b") == 1

    run(story())


@pytest.mark.parametrize("argument", ["no call", call(IDS, image_data="..."), Call("GET", "/v1/models")])
def test_what_cannot_be_known_goes_to_the_shorter_queue(model: Path, argument: Any) -> None:
    async def story() -> None:
        workers = [StandIn(name) for name in "ab"]
        async with router_of(model, *workers) as (router, replicas):
            await holds(router, workers[0])
            queue(router, replicas, 2, 1)
            assert await routed(router, pending(argument)) == "b"

    run(story())


def test_a_router_that_cannot_tokenize_says_so_once_and_goes_by_queues(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> None:
        workers = [StandIn(name) for name in "ab"]
        async with router_of(tmp_path, *workers) as (router, replicas):
            queue(router, replicas, 2, 1)
            for number in range(4):
                assert await routed(router, pending(call(IDS), number)) == "b"

    run(story())
    (line,) = [record.getMessage() for record in caplog.records if "marconi" in record.getMessage()]
    assert line.startswith("marconi: routing by two choices")
    assert "its tokenizer cannot be loaded here" in line


def test_events_on_another_nodes_loopback_are_not_listened_to(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        far = StandIn("far")
        async with router_of(model, far) as (router, replicas):
            moved = Replica("moved", replicas[0].replica_metadata, node_id="another-node")
            router.update_replicas([moved])  # type: ignore[list-item]
            asked = call(IDS)
            assert await routed(router, pending(asked)) == "moved"
            assert asked.why == "shorter of two queues"

    run(story())
    assert "its events are on the loopback of another node: set events_keys" in caplog.text
