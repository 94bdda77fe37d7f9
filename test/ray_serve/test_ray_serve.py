"""Ray Serve runs two replicas, and sessions go where their states are; without events they do not."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import pytest

pytest.importorskip("ray.serve", reason="THE RAY EXTRA IS NOT INSTALLED, this test did not run: pip install '.[ray]'")

import httpx
import psutil

from marconi_ray.ingress import REASON, REPLICA
from router.gateway.stand_in import BLOCK_TOKENS

from . import folder
from .cluster import cluster, command_of, descendants, running, until

# A cluster is started, and two applications.
pytestmark = pytest.mark.timeout(1800)

SERVER = Path(__file__).with_name("stand_in_server.py")
TWO_CHOICES = "shorter of two queues"
NUM_SESSIONS = 24
LENGTH = 80
HIT = (LENGTH - 1) // BLOCK_TOKENS * BLOCK_TOKENS


@dataclass(frozen=True)
class Answer:
    replica: str
    server: str
    num_cached_tokens: int
    reason: str


def prompt(seed: int, length: int = LENGTH) -> list[int]:
    rng = Random(seed)  # noqa: S311 - no secret
    return [rng.randrange(128) for _ in range(length)]


def ask(client: httpx.Client, ids: list[int], **more: Any) -> Answer:
    answer = client.post("/generate", json={"input_ids": ids, **more})
    assert answer.status_code == 200, answer.text
    body = answer.json()
    return Answer(answer.headers[REPLICA], body["by"], body["meta_info"]["cached_tokens"], answer.headers[REASON])


def sessions(seed: int) -> list[list[int]]:
    return [prompt(seed * 1000 + number) for number in range(NUM_SESSIONS)]


def goes_on(ids: list[int]) -> list[int]:
    """The next turn."""
    return ids + prompt(sum(ids), 20)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with cluster() as address:
        yield address


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder.write(tmp_path_factory.mktemp("model"))


@contextmanager
def two_replicas(url: str, model: Path, *server_args: str) -> Iterator[httpx.Client]:
    options = {"num_replicas": 2, "num_gpus": 0, "profile": folder.PROFILE, "max_body_bytes": 1 << 20}
    with running(url, model=str(model), entry_point=[str(SERVER)], server_args=server_args, **options) as client:
        yield client


@pytest.fixture(scope="module")
def client(url: str, model: Path) -> Iterator[httpx.Client]:
    with two_replicas(url, model) as made:
        until(lambda: ask(made, prompt(0)).reason != TWO_CHOICES)
        yield made


def test_second_turns_go_where_the_first_were_and_hit(client: httpx.Client) -> None:
    first = [ask(client, ids) for ids in sessions(1)]
    second = [ask(client, goes_on(ids)) for ids in sessions(1)]
    assert [answer.replica for answer in second] == [answer.replica for answer in first]
    assert [answer.num_cached_tokens for answer in second] == [HIT] * NUM_SESSIONS
    assert len({answer.replica for answer in first}) == 2, "cold prefixes spread"


def test_many_sessions_at_once_keep_to_their_replicas(client: httpx.Client) -> None:
    with ThreadPoolExecutor(NUM_SESSIONS) as threads:
        first = list(threads.map(lambda ids: ask(client, ids), sessions(2)))
        second = list(threads.map(lambda ids: ask(client, goes_on(ids)), sessions(2)))
    assert [answer.num_cached_tokens for answer in first] == [0] * NUM_SESSIONS
    assert [answer.replica for answer in second] == [answer.replica for answer in first]
    assert [answer.num_cached_tokens for answer in second] == [HIT] * NUM_SESSIONS


def test_a_prompt_that_cannot_be_known_is_answered_by_one_of_two(client: httpx.Client) -> None:
    assert ask(client, prompt(3), image_data="...").reason == TWO_CHOICES


def test_a_stream_comes_in_pieces_and_its_next_turn_hits(client: httpx.Client) -> None:
    ids = prompt(4)
    with client.stream("POST", "/generate", json={"input_ids": ids, "stream": True}) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        *pieces, done = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
        replica = answer.headers[REPLICA]
    assert done == "[DONE]"
    assert [len(json.loads(piece)["text"]) for piece in pieces] == [8, 16, 24, 32]
    second = ask(client, goes_on(ids))
    assert (second.replica, second.num_cached_tokens) == (replica, HIT)


def test_a_client_that_goes_aborts_its_request(client: httpx.Client) -> None:
    with client.stream("POST", "/generate", json={"input_ids": prompt(5), "stream": True, "step_s": 5}) as answer:
        next(answer.iter_lines())
    until(lambda: client.get("/v1/models").json()["num_aborted"] == 1)


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "words"),
    [
        ("POST", "/generate", b'{"input_ids": [1, 2], "wrong": true}', 400, "says no"),
        ("POST", "/generate", b" " * (2 << 20), 413, "at most 1048576 bytes"),
        ("GET", "/generate", b"", 405, "must be POST, got GET"),
        ("POST", "/flush_cache", b"", 404, "the path must be one of"),
    ],
)
def test_a_wrong_request_gets_a_line(
    client: httpx.Client, method: str, path: str, body: bytes, status: int, words: str
) -> None:
    answer = client.request(method, path, content=body)
    assert answer.status_code == status
    assert words in answer.json()["error"]["message"]


def server_of(answer: Answer) -> psutil.Process:
    port = answer.server.split(":")[1]
    (found,) = [
        each
        for each in descendants()
        if f"--port {port} " in command_of(each) and "marconi.process" not in command_of(each)
    ]
    return found


def test_a_killed_server_loses_no_request_and_its_sessions_go_on_elsewhere(client: httpx.Client) -> None:
    first = [ask(client, ids) for ids in sessions(6)]
    server_of(first[0]).kill()
    second = [ask(client, goes_on(ids)) for ids in sessions(6)]
    assert all(answer.server != first[0].server for answer in second)
    new = count(10_000)
    until(lambda: len({ask(client, prompt(next(new))).replica for _ in range(8)}) == 2)


def test_a_killed_replica_loses_no_request_that_had_no_byte_and_leaves_no_server(client: httpx.Client) -> None:
    first = [ask(client, ids) for ids in sessions(7)]
    server = server_of(first[0])
    guard = server.parent()
    assert guard is not None
    replica = guard.parent()
    assert replica is not None
    assert "ServeReplica" in command_of(replica)
    with ThreadPoolExecutor(NUM_SESSIONS) as threads:
        asked = [threads.submit(ask, client, goes_on(ids), step_s=2.0) for ids in sessions(7)]
        until(lambda: any(connection.status == "ESTABLISHED" for connection in server.net_connections()))
        replica.kill()
        second = [each.result() for each in asked]
    assert {answer.server for answer in second} >= {
        answer.server for answer in first if answer.server != first[0].server
    }
    assert not psutil.wait_procs([server, guard], timeout=60)[1]


def test_without_events_sessions_are_split(url: str, model: Path, client: httpx.Client) -> None:
    del client
    with two_replicas(url, model, "--mute") as mute:
        first = [ask(mute, ids) for ids in sessions(8)]
        second = [ask(mute, goes_on(ids)) for ids in sessions(8)]
    assert {answer.reason for answer in first + second} == {TWO_CHOICES}
    assert [answer.replica for answer in second] != [answer.replica for answer in first]
    assert sum(answer.num_cached_tokens for answer in second) < HIT * NUM_SESSIONS
