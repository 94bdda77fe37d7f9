"""No body of a request ends a server: thousands of them, near those that it answers, against a real one.

`MARCONI_FUZZ_BODIES` says how many (`make fuzz`: 2,000). Four are sent at a time, so that they share batches.
"""

import json
import os
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from marconi.engine.http.hints import KEY
from marconi_cpu.demo.server_process import ServerProcess
from request_bodies import CONTEXT_TOKENS, PLAIN, SESSIONS, bodies

from .client import HTTP
from .conftest import MARCONI, StartServer

NUM_AT_A_TIME = 4
NUM_BODIES = int(os.environ.get("MARCONI_FUZZ_BODIES", "200"))
POOLS = ("--max-total-tokens", "2048", "--max-mamba-cache-size", "24", "--max-running-requests", "4")
EXPECTED_STATUS = {200, 400, 413, 422, 500}

pytestmark = [pytest.mark.timeout(3600), pytest.mark.slow]


def with_bodies(num: int, path: str) -> Any:
    """Groups of bodies for `path`, the same in every run; what ends a server needs no smaller example."""
    group = st.lists(bodies(path), min_size=NUM_AT_A_TIME, max_size=NUM_AT_A_TIME)
    configured = settings(
        max_examples=max(num // NUM_AT_A_TIME, 1),
        derandomize=True,
        database=None,
        deadline=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    return lambda test: configured(given(group=group)(test))


class Answering:
    """A server under test, with what it answered."""

    def __init__(self, server: ServerProcess):
        self.server = server
        self.statuses: Counter[int] = Counter()
        # A connection each: a server ends that of a request that it could not read.
        connections = httpx.Limits(max_keepalive_connections=0)
        self._client = httpx.Client(base_url=server.url, timeout=120.0, trust_env=False, limits=connections)
        self._pool = ThreadPoolExecutor(NUM_AT_A_TIME)
        self.open_sessions()
        self._plain = self.plain()

    def close(self) -> None:
        self._pool.shutdown()
        self._client.close()

    def open_sessions(self) -> None:
        for name in SESSIONS:
            self._client.post("/open_session", json={"capacity_of_str_len": 1000, "session_id": name})

    def plain(self) -> Any:
        response = self._client.post("/generate", json=PLAIN["generate"])
        assert response.status_code == 200, response.text
        return response.json()["output_ids"]

    def survives(self, path: str, group: list[str]) -> None:
        """Send `group` together; a plain request is then answered as before."""

        def status(body: str) -> int:
            headers = {"content-type": "application/json"}
            return self._client.post(f"/{path}", content=body, headers=headers).status_code

        try:
            statuses = list(self._pool.map(status, group))
            assert self._plain == self.plain()
        except (httpx.HTTPError, AssertionError) as error:
            shown = "\n".join(group)
            pytest.fail(f"{type(error).__name__}: {error}{self.server.reason()}; after one of\n{shown}", pytrace=False)
        assert set(statuses) <= EXPECTED_STATUS, (statuses, group)
        self.statuses.update(statuses)


@pytest.fixture(scope="module")
def answering(models: dict[str, Path], start_server: StartServer) -> Iterator[Answering]:
    args = (*MARCONI, *POOLS, "--context-length", str(CONTEXT_TOKENS), "--chunked-prefill-size", "32")
    answering = Answering(start_server(models["gdn"], args))
    yield answering
    answering.close()


ENDED_ONE: tuple[dict[str, Any], ...] = (
    {"sampling_params": {"custom_params": 5}},
    {"sampling_params": {"custom_params": f"a text with {KEY} in it"}},
    {"sampling_params": {"top_k": 10**12}},
    {"sampling_params": {"repetition_penalty": 1.2}},
    {"sampling_params": {"min_new_tokens": 1, "stop_token_ids": [99999, -1]}},
    {"sampling_params": {"logit_bias": {"5": 1e39}, "top_k": 5}},
    {"sampling_params": {"logit_bias": {"5": 5e8}, "temperature": 1e-5, "repetition_penalty": 1e-38, "top_p": 0.5}},
    {"sampling_params": {"regex": "a", "min_new_tokens": 3, "top_p": 0.5}},
    {"return_logprob": True, "logprob_start_len": -5},
    {"input_ids": [99999], "image_data": "an image"},
    {"sampling_params": {"max_new_tokens": 0}, "token_indices_to_pool": [100]},
    {"positional_embed_overrides": []},
    {"session_params": {"id": "s1", "rid": ["r"]}},
    {"session_params": {"id": "s1"}, "rid": "first"},
    {"session_params": {"id": "s1", "rid": "first", "offset": 1.5}},
    {"session_params": {"id": "s1", "rid": "first"}, "rid": "again"},
    {"session_params": {"id": "s1", "rid": "first"}, "rid": "again"},
    {"session_params": {"id": "s1", "rid": "first", "replace": True}, "rid": "second"},
    {"session_params": {"id": "s1", "replace": True}, "rid": "third"},
)
"""What is added to a plain body, in this order."""


def test_bodies_that_ended_a_server_end_it_no_more(answering: Answering) -> None:
    for added in ENDED_ONE:
        sampling = {"max_new_tokens": 3, "ignore_eos": True, **added.get("sampling_params", {})}
        body = {**PLAIN["generate"], **added, "sampling_params": sampling}
        answering.survives("generate", [json.dumps(body)])


@with_bodies(NUM_BODIES, "generate")
def test_no_body_of_generate_ends_the_server(answering: Answering, group: list[str]) -> None:
    answering.survives("generate", group)


@with_bodies(NUM_BODIES // 4, "v1/completions")
def test_no_body_of_completions_ends_the_server(answering: Answering, group: list[str]) -> None:
    answering.survives("v1/completions", group)


@with_bodies(NUM_BODIES // 4, "v1/chat/completions")
def test_no_body_of_a_chat_ends_the_server(answering: Answering, group: list[str]) -> None:
    answering.survives("v1/chat/completions", group)


def test_nothing_is_lost_after_all_of_them(answering: Answering) -> None:
    """Runs last: every KV token and every state slot is free or cached, and some bodies were answered."""
    for name in SESSIONS:
        HTTP.post(f"{answering.server.url}/close_session", json={"session_id": name}, timeout=60.0)
    answering.plain()
    (rank,) = HTTP.get(f"{answering.server.url}/marconi", timeout=60.0).json()["ranks"]
    for pool in (rank["kv_tokens"], rank["state_slots"]):
        assert pool["free"] + pool["cached"] == pool["size"], pool
    print(f"answers by status: {dict(answering.statuses)}")
    assert answering.statuses[200] > 0.2 * answering.statuses.total()
