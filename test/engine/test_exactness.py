"""A reused state gives the same tokens: every answer equals that of the same model without a prefix cache.

In fp32, so that equality is meant literally: token ids equal, log-probabilities within 1e-5. The negative control
runs the same scenarios on a server that breaks the state which a hit copies, and must see them fail.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from marconi.engine.server_process import ServerProcess

from .client import Completion, generate, random_tokens
from .conftest import BROKEN_STATE_SERVER, NEGATIVE_CONTROL, server_args
from .scenarios import EXTRA_BUFFER, NO_BUFFER, SCENARIOS, Exchange, Scenario

MAX_LOGPROB_DIFFERENCE = 1e-5
MAX_DIFFERENCE_TO_TRANSFORMERS = 1e-4


class Reference:
    """The same model without a prefix cache: what every answer has to equal. Remembers what it answered."""

    def __init__(self, url: str):
        self._url = url
        self._answers: dict[tuple[tuple[int, ...], int], Completion] = {}

    def answer(self, prompt: tuple[int, ...], num_tokens: int = 24) -> Completion:
        """The answer to `prompt`, computed from its first token."""
        asked = prompt, num_tokens
        if asked not in self._answers:
            completion = generate(self._url, prompt, max_new_tokens=num_tokens)
            assert completion.num_cached_tokens == 0, "the reference must not have a prefix cache"
            self._answers[asked] = completion
        return self._answers[asked]

    def divergences(self, exchanges: list[Exchange]) -> list[str]:
        """What differs between `exchanges` and the reference, a line for each answer that does."""
        found = []
        for index, exchange in enumerate(exchanges):
            got = exchange.completion
            expected = self.answer(exchange.prompt, len(got.token_ids))
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


@pytest.fixture(scope="class")
def model(request: pytest.FixtureRequest, models: dict[str, Path]) -> Path:
    return models[request.cls.family]


@pytest.fixture(scope="class", params=(EXTRA_BUFFER, NO_BUFFER))
def strategy(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="class")
def reference(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reference]:
    log_path = tmp_path_factory.mktemp("reference") / "log"
    with ServerProcess(model, ["--disable-radix-cache"], log_path=log_path) as server:
        yield Reference(server.url)


@pytest.fixture(scope="class")
def server(
    model: Path, strategy: str, tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> Iterator[ServerProcess]:
    options = {"entry_point": BROKEN_STATE_SERVER} if pytestconfig.getoption("--broken-states") else {}
    log_path = tmp_path_factory.mktemp("server") / "log"
    with ServerProcess(model, server_args(strategy), log_path=log_path, **options) as running:
        yield running


class Exactness:
    """The tests of one family of models; one reference serves them all."""

    family: ClassVar[str]

    def test_the_reference_agrees_with_transformers(self, model: Path, reference: Reference) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch_model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        for seed, num_tokens in ((900, 37), (901, 333), (902, 700)):
            prompt = random_tokens(seed, num_tokens)
            served = reference.answer(tuple(prompt))
            with torch.inference_mode():
                answer = torch_model.generate(
                    torch.tensor([prompt]),
                    max_new_tokens=len(served.token_ids),
                    min_new_tokens=len(served.token_ids),
                    do_sample=False,
                    output_logits=True,
                    return_dict_in_generate=True,
                )
            token_ids = answer.sequences[0, num_tokens:].tolist()
            steps = zip(answer.logits, token_ids, served.logprobs, strict=True)
            differences = [abs(logits[0].log_softmax(-1)[t].item() - logprob) for logits, t, logprob in steps]
            assert tuple(token_ids) == served.token_ids
            assert max(differences) <= MAX_DIFFERENCE_TO_TRANSFORMERS

    @pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
    def test_a_reused_state_gives_the_same_answer(
        self, scenario: Scenario, strategy: str, server: ServerProcess, reference: Reference
    ) -> None:
        exchanges = scenario.ask(server.url)
        assert reference.divergences(exchanges) == []
        if strategy in scenario.hits_under:
            hits = [exchange.completion.num_cached_tokens for exchange in exchanges]
            assert any(hits), "nothing was reused, so nothing was tested"

    def test_negative_control_a_broken_state_turns_the_scenarios_red(
        self, strategy: str, model: Path, reference: Reference, tmp_path: Path, pytestconfig: pytest.Config
    ) -> None:
        red, blind = {}, []
        with ServerProcess(
            model, server_args(strategy), log_path=tmp_path / "log", entry_point=BROKEN_STATE_SERVER
        ) as broken:
            for scenario in SCENARIOS:
                exchanges = scenario.ask(broken.url)
                found = reference.divergences(exchanges)
                if found:
                    red[scenario.name] = found
                elif any(exchange.completion.num_cached_tokens for exchange in exchanges):
                    blind.append(scenario.name)
        example = next((f"{name}: {found[0]}" for name, found in red.items()), "none")
        pytestconfig.stash.setdefault(NEGATIVE_CONTROL, []).append(
            f"{self.family}/{strategy}: {len(red)} of {len(SCENARIOS)} scenarios RED ({', '.join(red)}); "
            f"first, {example}"
        )
        assert red, "a server that breaks states answered rightly: the suite cannot see a broken state"
        assert not blind, f"these scenarios reused a broken state and did not notice: {blind}"


class TestGatedDeltaRule(Exactness):
    family = "gdn"


class TestMamba2(Exactness):
    family = "mamba2"
