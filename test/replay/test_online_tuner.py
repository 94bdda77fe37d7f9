"""The tuner's process decides what the same tuner would decide in line, and ends when the server is gone."""

import io
import json
import subprocess
import sys
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from marconi.policy.admission.plan import Judicious
from marconi.policy.eviction.base import Need
from marconi.policy.eviction.lru import SeparateLru
from marconi.replay.online_tuner import Assignment, Shadow, costs_of, decisions, serve
from marconi.replay.policies.tuned import ServerCaches
from marconi.replay.pools import JointPool, Pools
from marconi.tree import RadixTree
from marconi.tuning import Objective
from marconi.tuning.record import Encoder, forget, read

BLOCK = 16
"""Tokens in a block of `assignment`."""
PROCESS = (
    sys.executable,
    "-c",
    "import os, runpy; os.nice = int; runpy.run_module('marconi.replay.online_tuner', run_name='__main__')",
)
"""The tuner's, but at an ordinary priority: at the lowest it gets nothing of a busy machine."""


def traffic(num_requests: int, seed: int = 1) -> bytes:
    """Eight documents of 800 tokens are asked about again and again, under short prompts that never return."""
    rng = np.random.default_rng(seed)
    encoder = Encoder(BLOCK)
    documents = rng.integers(1000, size=(8, 800))
    stream = b""
    for index in range(num_requests):
        asks = index % 5 == 0
        body = documents[rng.integers(8)] if asks else rng.integers(1000, size=150)
        tokens = np.append(body, rng.integers(1000, size=30)).astype(np.int64)
        stream += encoder.encode(tokens, len(tokens) - 10, 0, float(index), (0.01, 1e-6))
    return stream


def told(stream: bytes, assignment: Assignment) -> list[dict[str, object]]:
    sink = io.StringIO()
    serve(io.BytesIO(assignment.to_json().encode() + b"\n" + stream), sink)
    return [json.loads(line) for line in sink.getvalue().splitlines()]


def test_the_process_decides_what_the_tuner_in_line_decides(assignment: Assignment) -> None:
    stream = traffic(1500)
    expected = list(decisions(read(io.BytesIO(stream), BLOCK), Shadow(assignment)))
    process = subprocess.run(
        PROCESS,
        input=assignment.to_json().encode() + b"\n" + stream,
        capture_output=True,
        timeout=120,
        check=True,
    )
    lines = [json.loads(line) for line in process.stdout.splitlines()]
    assert len(lines) == len(expected) >= 3
    assert [line["alpha"] for line in lines] == [decision.value for decision in expected]
    assert [line["score"] for line in lines] == [decision.scores[decision.value] for decision in expected]


@pytest.mark.parametrize("num_bytes_told", [0, 60, -9])
def test_a_server_that_ends_in_the_middle_of_what_it_says_is_no_fault(
    num_bytes_told: int, assignment: Assignment
) -> None:
    """As it does when it is killed."""
    whole = assignment.to_json().encode() + b"\n" + traffic(3)
    process = subprocess.run(
        PROCESS,
        input=whole[:num_bytes_told],
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert (process.returncode, process.stderr) == (0, b"")


@pytest.mark.parametrize("objective", Objective)
def test_every_objective_is_scored(objective: Objective, assignment: Assignment) -> None:
    lines = told(traffic(800), replace(assignment, objective=objective, ttft_budget_s=1e-4))
    assert lines
    assert all(0 <= line["score"] <= 1 and not line["failure"] for line in lines)  # type: ignore[operator]


def test_a_budget_that_every_prefill_meets_leaves_nothing_to_win(assignment: Assignment) -> None:
    """Negative control of the budget: with 100 s no value is better than another."""
    lines = told(traffic(800), replace(assignment, objective=Objective.P95_TTFT, ttft_budget_s=100.0))
    assert {(line["score"], line["alpha"]) for line in lines} == {(0.0, 0.0)}


def test_a_flush_empties_the_shadow_and_keeps_its_alpha(assignment: Assignment) -> None:
    shadow = Shadow(assignment)
    shadow.apply(2.0)
    stream = traffic(50)
    list(decisions(read(io.BytesIO(stream), BLOCK), shadow))
    assert shadow._server.served.tree.num_tokens > 0
    list(decisions(read(io.BytesIO(forget()), BLOCK), shadow))
    assert shadow._server.served.tree.num_tokens == 0
    shadow.apply(2.0)
    shadow.forget()
    assert shadow._rule.weight == 2.0


def test_the_shadow_of_a_server_with_one_pool_has_as_many_bytes(assignment: Assignment) -> None:
    assignment = replace(assignment, num_bytes=6_000)
    shadow = Shadow(assignment)
    list(decisions(read(io.BytesIO(traffic(50)), BLOCK), shadow))
    server = shadow._server
    server.check_invariants()
    assert isinstance(server.pools, JointPool)
    assert server.pools.num_bytes == 6_000
    assert server.served.counters.num_evictions[Need.BYTES] > 0
    assert Assignment.from_json(assignment.to_json()).num_bytes == 6_000


def test_a_server_that_holds_a_tree_loses_nothing_of_it() -> None:
    caches = ServerCaches(Judicious(), partial(Pools, 1000, 10))
    tree = RadixTree()
    tree.insert(np.arange(60, dtype="<u4").tobytes(), [40, 60])
    server = caches(tree, SeparateLru())
    server.check_invariants()
    assert (server.pools.num_free_tokens, server.pools.num_free_slots) == (940, 8)


@pytest.mark.parametrize(("num_tokens", "num_slots"), [(59, 10), (1000, 1)])
def test_a_tree_that_the_pools_do_not_hold_is_refused(num_tokens: int, num_slots: int) -> None:
    tree = RadixTree()
    tree.insert(np.arange(60, dtype="<u4").tobytes(), [40, 60])
    with pytest.raises(ValueError, match="60 tokens and 2 states"):
        ServerCaches(Judicious(), partial(Pools, num_tokens, num_slots))(tree, SeparateLru())


def test_an_assignment_survives_its_line(assignment: Assignment) -> None:
    assert Assignment.from_json(assignment.to_json()) == assignment


def test_only_the_configuration_may_hold_what_json_does_not_know(assignment: Assignment) -> None:
    line = replace(assignment, hf_config={"dtype": np.dtype("f4")}).to_json()
    assert Assignment.from_json(line).hf_config == {"dtype": "float32"}
    with pytest.raises(TypeError, match="not JSON serializable"):
        replace(assignment, state_bytes=np.int64(200)).to_json()  # type: ignore[arg-type]


def test_a_configuration_that_cannot_be_read_is_told_of_and_served(caplog: pytest.LogCaptureFixture) -> None:
    costs = costs_of({"model_type": "abacus"}, 3, 200)
    assert (costs.kv_bytes_per_token, costs.state_bytes, costs.flops(7)) == (3, 200, 7.0)
    (record,) = caplog.records
    assert "FLOPs are taken to grow with the tokens alone (config.json: unknown model_type 'abacus'" in record.message
