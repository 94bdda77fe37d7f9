"""A reused state gives the same tokens: every answer equals that of the same model without a prefix cache.

In fp32, so that equality is meant literally: token ids equal, log-probabilities within 1e-5. The negative control
runs the same scenarios on a server that breaks the state which a hit copies, and must see them fail.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from marconi.engine.server_process import ServerProcess

from .conftest import BROKEN_STATE_SERVER, NEGATIVE_CONTROL, Reference, server_args
from .scenarios import EXTRA_BUFFER, NO_BUFFER, SCENARIOS, Exchange, Scenario

MAX_LOGPROB_DIFFERENCE = 1e-5
FAMILIES = ("gdn", "mamba2")
STRATEGIES = (EXTRA_BUFFER, NO_BUFFER)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=STRATEGIES)
def strategy(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def reference(family: str, models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reference]:
    log_path = tmp_path_factory.mktemp("reference") / "log"
    with ServerProcess(models[family], ["--disable-radix-cache"], log_path=log_path) as server:
        yield Reference(server.url)


@pytest.fixture(scope="module")
def server(
    family: str,
    strategy: str,
    models: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
    pytestconfig: pytest.Config,
) -> Iterator[ServerProcess]:
    options = {"entry_point": BROKEN_STATE_SERVER} if pytestconfig.getoption("--broken-states") else {}
    log_path = tmp_path_factory.mktemp("server") / "log"
    with ServerProcess(models[family], server_args(strategy), log_path=log_path, **options) as running:
        yield running


def divergences(exchanges: list[Exchange], reference: Reference) -> list[str]:
    """What differs between `exchanges` and the reference, a line for each answer that does."""
    found = []
    for index, exchange in enumerate(exchanges):
        got, expected = exchange.completion, reference.answer(exchange.prompt)
        where = f"request {index} ({len(exchange.prompt)} tokens, {got.num_cached_tokens} cached)"
        if got.token_ids != expected.token_ids:
            pairs = enumerate(zip(got.token_ids, expected.token_ids, strict=True))
            first = next(i for i, (a, b) in pairs if a != b)
            found.append(f"{where}: token {first} is {got.token_ids[first]}, not {expected.token_ids[first]}")
            continue
        difference = max(abs(a - b) for a, b in zip(got.logprobs, expected.logprobs, strict=True))
        if difference > MAX_LOGPROB_DIFFERENCE:
            found.append(f"{where}: a log-probability is off by {difference:.1e}")
    return found


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_a_reused_state_gives_the_same_answer(
    scenario: Scenario, strategy: str, server: ServerProcess, reference: Reference
) -> None:
    exchanges = scenario.ask(server.url)
    assert divergences(exchanges, reference) == []
    if strategy in scenario.hits_under:
        assert any(e.completion.num_cached_tokens for e in exchanges), "nothing was reused, so nothing was tested"


def test_negative_control_a_broken_state_turns_the_scenarios_red(
    family: str,
    strategy: str,
    models: dict[str, Path],
    reference: Reference,
    tmp_path: Path,
    pytestconfig: pytest.Config,
) -> None:
    red, blind = {}, []
    with ServerProcess(
        models[family], server_args(strategy), log_path=tmp_path / "log", entry_point=BROKEN_STATE_SERVER
    ) as broken:
        for scenario in SCENARIOS:
            exchanges = scenario.ask(broken.url)
            found = divergences(exchanges, reference)
            if found:
                red[scenario.name] = found
            elif any(exchange.completion.num_cached_tokens for exchange in exchanges):
                blind.append(scenario.name)
    example = next((f"{name}: {found[0]}" for name, found in red.items()), "none")
    pytestconfig.stash.setdefault(NEGATIVE_CONTROL, []).append(
        f"{family}/{strategy}: {len(red)} of {len(SCENARIOS)} scenarios RED ({', '.join(red)}); first, {example}"
    )
    assert red, "a server that breaks states answered every scenario rightly: the suite cannot see a broken state"
    assert not blind, f"these scenarios reused a broken state and did not notice: {blind}"
