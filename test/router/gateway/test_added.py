"""A request's body gets what its router adds, and nothing else of it changes."""

import asyncio
import json
from typing import Any

import pytest

from marconi.events.base import SHARED_ELSEWHERE
from marconi.router.gateway.added import RANK, asking_for_state, with_fields

from .house import house
from .stand_in import BLOCK_TOKENS, Fault, StandIn

ASKS = {SHARED_ELSEWHERE: 192}
SYSTEM = "You are the assistant of a shop that sells everything but patience. " * 3
"""Whole blocks of the stand-ins' bytes, and some."""


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32-le"])
@pytest.mark.parametrize(
    "text",
    [
        '{"text": "é}", "a": {}}',
        ' {"routed_dp_rank": 0, "n": 12345678901234567890123} \n',
        "{ }",
        '{"x": NaN, "data_parallel_rank": 5, "routed_dp_rank": null}',
    ],
)
def test_a_body_keeps_all_else_that_it_says(text: str, encoding: str) -> None:
    made = with_fields(text.encode(encoding), {RANK: 3, "custom_params": ASKS})
    expected = {**json.loads(text), RANK: 3, "custom_params": ASKS}
    assert repr(json.loads(made)) == repr(expected) or json.loads(made).items() == expected.items()
    if encoding == "utf-8":
        assert made.startswith(text.rstrip().removesuffix("}").rstrip().encode())
    assert with_fields(text.encode(encoding), {}) == text.encode(encoding)


@pytest.mark.parametrize(
    ("route", "body", "added"),
    [
        ("/generate", {}, {"sampling_params": {"custom_params": ASKS}}),
        ("/generate", {"sampling_params": None}, {"sampling_params": {"custom_params": ASKS}}),
        (
            "/generate",
            {"sampling_params": {"top_k": 1, "custom_params": {"mine": 2, SHARED_ELSEWHERE: 1}}},
            {"sampling_params": {"top_k": 1, "custom_params": {"mine": 2, **ASKS}}},
        ),
        ("/generate", {"sampling_params": [{"top_k": 1}]}, {}),
        ("/generate", {"sampling_params": {"custom_params": [1]}}, {}),
        ("/generate", {"sampling_params": "wrong"}, {}),
        ("/v1/completions", {"custom_params": {"mine": 2}}, {"custom_params": {"mine": 2, **ASKS}}),
        ("/v1/chat/completions", {"sampling_params": [1]}, {"custom_params": ASKS}),
        ("/v1/chat/completions", {"custom_params": "wrong"}, {}),
    ],
)
def test_a_state_is_asked_for_where_sglang_reads_it_unless_the_body_is_wrong_there(
    route: str, body: dict[str, Any], added: dict[str, Any]
) -> None:
    assert asking_for_state(route, body, 192) == added


def asked_by(body: dict[str, Any]) -> int | None:
    position: int | None = body.get("sampling_params", {}).get("custom_params", {}).get(SHARED_ELSEWHERE)
    return position


@pytest.mark.parametrize("tells", [True, False])
def test_a_worker_that_gets_a_copy_is_asked_for_a_state_where_the_fleets_prompts_diverge(tells: bool) -> None:
    """Of a request that its first worker did not answer as well; no worker without events is asked."""

    async def story() -> None:
        workers = [StandIn("a", tells=tells), StandIn("b", tells=tells)]
        async with house(*workers) as home:
            first = await home.ask(SYSTEM + "Sell me a lamp.")
            holder = next(worker for worker in workers if worker.name == first.json["by"])
            (other,) = (worker for worker in workers if worker is not holder)
            if tells:
                await home.until_told(*workers)
            holder.fault = Fault.REFUSES
            again = await home.ask(SYSTEM + "Sell me a chair.", sampling_params={"top_k": 1})
            assert (again.status, again.json["by"]) == (200, other.name)
            assert [asked_by(body) for body in holder.asked] == [None] * len(holder.asked)
            (body,) = other.asked
            assert body["sampling_params"].pop("top_k") == 1
            expected = (len(SYSTEM) + len("Sell me a ")) // BLOCK_TOKENS * BLOCK_TOKENS if tells else None
            assert asked_by(body) == expected

    asyncio.run(asyncio.wait_for(story(), 60))
