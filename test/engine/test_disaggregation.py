"""A prefill server with this cache and a decode server answer as one server does, and prompts are hit where they ended.

Every answer is compared with that of the same model on one server without a prefix cache. What the servers hand over
goes through a transfer on loopback (`loopback_transfer.py`).
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from .breaking import require_broken
from .client import HTTP, generate, random_tokens
from .conftest import NEGATIVE_CONTROL, EntryPoint, Launch, server_args
from .disaggregated import SERVER, Pair, disaggregated
from .matrix import MATRIX
from .reference import Reference
from .scenarios import EXTRA_BUFFER, Exchange, together

pytestmark = pytest.mark.slow

RETRIES = "--optimistic-prefill-attempts"
OF_THE_MATRIX = tuple(each for each in MATRIX if each.choice and each.choice.is_prefill)
GIVEN_UP = replace(
    OF_THE_MATRIX[0],
    name="mamba2-prefill-retries",
    args=(*OF_THE_MATRIX[0].args, RETRIES, "2"),
    env=(*OF_THE_MATRIX[0].env, ("SGLANG_TEST_FORCE_OPTIMISTIC_PREFILL_RETRY_PROB", "1")),
)
LAUNCHES = (*OF_THE_MATRIX, GIVEN_UP)


def test_a_second_turn_is_hit_where_the_first_ones_prompt_ended(
    launch: Launch, server: Pair, references: Callable[[str], Reference]
) -> None:
    """The prefill server never sees an answer."""
    HTTP.post(f"{server.url}/flush_cache?timeout=30", timeout=60.0).raise_for_status()
    page = int(launch.choice.page) if launch.choice else 1
    exchanges = []
    for length in (30, 31, 32, 33, 41, 47, 48, 49):
        prompt = random_tokens(30_000 + length, length)
        answer = generate(server.url, prompt, max_new_tokens=5)
        second = [*prompt, *answer.token_ids, *random_tokens(31_000 + length, 7)]
        exchanges += [Exchange(tuple(prompt), answer), Exchange(tuple(second), generate(server.url, second))]
        assert exchanges[-1].completion.num_cached_tokens == length // page * page
    assert references(launch.family).divergences(exchanges) == []


def test_prompts_that_arrive_together_wait_for_one_of_them(
    launch: Launch, server: Pair, references: Callable[[str], Reference]
) -> None:
    HTTP.post(f"{server.url}/flush_cache?timeout=30", timeout=60.0).raise_for_status()
    shared = random_tokens(33_000, 400)
    exchanges = together(server.url, [shared + random_tokens(33_001 + index, 20 + index) for index in range(6)])
    assert references(launch.family).divergences(exchanges) == []
    hits = sorted(exchange.completion.num_cached_tokens for exchange in exchanges)
    # One has begun before another has its place on the decode server, the next may have before the first has ended:
    # from the third on, where they part is known, and before it stands a state on trial.
    assert {*hits[3:]} <= {384, 400}


def test_where_prefills_are_to_be_given_up_they_are(launch: Launch, server: Pair) -> None:
    generate(server.url, random_tokens(34_000, 40), max_new_tokens=2)
    are_given_up = "optimistic prefill yielded" in server.prefill.log_path.read_text(errors="replace")
    assert are_given_up == (launch is GIVEN_UP)


def test_the_decode_server_says_whose_cache_it_has_and_nothing_of_what_another_kept(server: Pair) -> None:
    assert "marconi: a decode server keeps no prefixes" in server.decode.log_path.read_text(errors="replace")
    sampling = {"max_new_tokens": 2, "custom_params": {"marconi_checkpoints": [20]}}
    body = {"input_ids": random_tokens(35_000, 40), "sampling_params": sampling}
    answer = HTTP.post(f"{server.url}/generate", json=body, timeout=60.0).raise_for_status().json()
    assert "marconi_checkpoints" not in answer["meta_info"]


def test_negative_control_a_state_of_another_request_is_seen(
    preload: EntryPoint,
    models: dict[str, Path],
    references: Callable[[str], Reference],
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    args = (*server_args(EXTRA_BUFFER),)
    broken = Launch("gdn-prefill", "gdn", args, env=(("FAULT", "1"),), entry_point=SERVER)
    with disaggregated(broken, models, preload, tmp_path) as server:
        prompts = [random_tokens(32_000 + index, 40 + index) for index in range(8)]
        exchanges = [Exchange(tuple(prompt), generate(server.url, prompt)) for prompt in prompts]
        num_broken = require_broken(server.prefill.log_path)
    found = references("gdn").divergences(exchanges)
    said = f"{len(found)} of 8 answers RED of {num_broken} others' states; first, {found[:1]}"
    record_property(NEGATIVE_CONTROL, f"{broken.name}, handed over: {said}")
    assert found, "a server that hands another state over answered rightly: these tests cannot see one"
