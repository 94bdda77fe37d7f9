"""A prefill server with this cache and a decode server answer as one server does, and prompts are hit where they ended.

Every answer is compared with that of the same model on one server without a prefix cache. What the servers hand over
goes through a transfer on loopback (`loopback_transfer.py`).
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from .breaking import require_broken
from .client import generate, random_tokens
from .conftest import CONSENSUS, MTP, NEGATIVE_CONTROL, TWO_RANKS, EntryPoint, Launch, server_args
from .disaggregated import SERVER, Pair, disaggregated
from .reference import Reference
from .scenarios import EXTRA_BUFFER, NO_BUFFER, SCENARIOS, Exchange, Scenario, together
from .test_speculation import NEXTN

pytestmark = pytest.mark.slow

PAGE_TOKENS = 16
RETRIES = (("SGLANG_TEST_FORCE_OPTIMISTIC_PREFILL_RETRY_PROB", "1"),)


def launched(family: str, strategy: str, *more: str, name: str = "", env: tuple[tuple[str, str], ...] = ()) -> Launch:
    made = Launch(f"{family}-{strategy}{name}", family, (*server_args(strategy), *more), strategy, env, SERVER)
    return replace(made, family=family + MTP) if NEXTN[0] in more else made


USUAL = (launched("gdn", EXTRA_BUFFER), launched("mamba2", NO_BUFFER))
OTHERS = (
    launched("gdn", EXTRA_BUFFER, "--page-size", str(PAGE_TOKENS), name="-pages"),
    launched("mamba2", EXTRA_BUFFER, "--optimistic-prefill-attempts", "2", name="-retries", env=RETRIES),
    launched("gdn", EXTRA_BUFFER, *NEXTN, name="-drafts"),
    launched("mamba2", NO_BUFFER, *TWO_RANKS, name="-two-ranks", env=CONSENSUS),
    launched("gdn", EXTRA_BUFFER, "--enable-unified-memory", name="-one-pool"),
)
FEW = {"multi-turn", "concurrent", "chunked-prefill", "aborted"}
"""Scenarios of the others."""
every_launch = pytest.mark.parametrize("launch", [*USUAL, *OTHERS], indirect=True, ids=lambda each: each.name)


def is_asked(launch: Launch, scenario: Scenario) -> bool:
    return scenario.name in FEW or launch in USUAL


@pytest.fixture(scope="module")
def launch(request: pytest.FixtureRequest) -> Launch:
    """How both servers are started."""
    found: Launch = request.param
    return found


@pytest.fixture(scope="module")
def pair(
    launch: Launch, models: dict[str, Path], preload: EntryPoint, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    """Both servers."""
    with disaggregated(launch, models, preload, tmp_path_factory.mktemp("pair")) as running:
        yield running


@every_launch
@pytest.mark.parametrize(
    "scenario", [each for each in SCENARIOS if not each.is_long], ids=lambda scenario: scenario.name
)
def test_a_reused_state_gives_the_same_answer(
    scenario: Scenario, launch: Launch, pair: Pair, references: Callable[[str], Reference]
) -> None:
    references(launch.family).require_same(scenario, pair.url, launch.strategy)


@every_launch
def test_a_second_turn_is_hit_where_the_first_ones_prompt_ended(
    launch: Launch, pair: Pair, references: Callable[[str], Reference]
) -> None:
    """The prefill server never sees an answer."""
    httpx.post(f"{pair.url}/flush_cache?timeout=30", timeout=60.0).raise_for_status()
    page = PAGE_TOKENS if "--page-size" in launch.args else 1
    exchanges = []
    for length in range(30, 46):
        prompt = random_tokens(30_000 + length, length)
        answer = generate(pair.url, prompt, max_new_tokens=5)
        second = [*prompt, *answer.token_ids, *random_tokens(31_000 + length, 7)]
        exchanges += [Exchange(tuple(prompt), answer), Exchange(tuple(second), generate(pair.url, second))]
        assert exchanges[-1].completion.num_cached_tokens == length // page * page
    assert references(launch.family).divergences(exchanges) == []


@every_launch
def test_prompts_that_arrive_together_wait_for_one_of_them(
    launch: Launch, pair: Pair, references: Callable[[str], Reference]
) -> None:
    httpx.post(f"{pair.url}/flush_cache?timeout=30", timeout=60.0).raise_for_status()
    shared = random_tokens(33_000, 400)
    exchanges = together(pair.url, [shared + random_tokens(33_001 + index, 20 + index) for index in range(6)])
    assert references(launch.family).divergences(exchanges) == []
    hits = sorted(exchange.completion.num_cached_tokens for exchange in exchanges)
    # One has begun before another has its place on the decode server, the next may have before the first has ended:
    # from the third on, where they part is known.
    assert hits[3:] == [400, 400, 400]


@every_launch
def test_where_prefills_are_to_be_given_up_they_are(launch: Launch, pair: Pair) -> None:
    generate(pair.url, random_tokens(34_000, 40), max_new_tokens=2)
    are_given_up = "optimistic prefill yielded" in pair.prefill.log_path.read_text(errors="replace")
    assert are_given_up == (launch.env == RETRIES)


@every_launch
def test_the_decode_server_says_whose_cache_it_has_and_nothing_of_what_another_kept(launch: Launch, pair: Pair) -> None:
    assert "marconi: a decode server keeps no prefixes" in pair.decode.log_path.read_text(errors="replace")
    sampling = {"max_new_tokens": 2, "custom_params": {"marconi_checkpoints": [20]}}
    body = {"input_ids": random_tokens(35_000, 40), "sampling_params": sampling}
    answer = httpx.post(f"{pair.url}/generate", json=body, timeout=60.0).raise_for_status().json()
    assert "marconi_checkpoints" not in answer["meta_info"]


def test_negative_control_a_state_of_another_request_is_seen(
    preload: EntryPoint,
    models: dict[str, Path],
    references: Callable[[str], Reference],
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    broken = launched("gdn", EXTRA_BUFFER, env=(("FAULT", "1"),))
    with disaggregated(broken, models, preload, tmp_path) as pair:
        prompts = [random_tokens(32_000 + index, 40 + index) for index in range(8)]
        exchanges = [Exchange(tuple(prompt), generate(pair.url, prompt)) for prompt in prompts]
        num_broken = require_broken(pair.prefill.log_path)
    found = references("gdn").divergences(exchanges)
    said = f"{len(found)} of 8 answers RED of {num_broken} others' states; first, {found[:1]}"
    record_property(NEGATIVE_CONTROL, f"{broken.name}, handed over: {said}")
    assert found, "a server that hands another state over answered rightly: these tests cannot see one"
