"""A reused state gives the same tokens: every answer equals that of the same model without a prefix cache.

The negative control runs the same scenarios while the server breaks the states that hits copy, and must see them fail.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from marconi_cpu.demo.server_process import ServerProcess

from .breaking import broken_states
from .client import random_tokens
from .conftest import CONSENSUS, NEGATIVE_CONTROL, REPORTING, STANDARD, TWO_RANKS, Launch, server_args
from .matrix import HOST, ONE
from .reference import MAX_LOGPROB_DIFFERENCE, Reference
from .scenarios import EXTRA_BUFFER, NO_BUFFER, SCENARIOS, Exchange, Scenario

MAX_DIFFERENCE_TO_TRANSFORMERS = 1e-4
SHORT_CONV = server_args(NO_BUFFER)
LAUNCHES = (
    STANDARD["gdn", EXTRA_BUFFER],
    Launch("short-conv", "short-conv", (*SHORT_CONV, *ONE, *REPORTING), NO_BUFFER),
    pytest.param(
        Launch("short-conv-host-ranks", "short-conv", (*SHORT_CONV, *HOST, *TWO_RANKS), NO_BUFFER, CONSENSUS),
        marks=pytest.mark.slow,
    ),
)
"""The default; each other family and strategy, and pairs of these and more, are in `test_matrix.py`.

Short convolutions have one strategy, and no head for one more token.
"""


def is_asked(launch: Launch, _name: str, scenario: Scenario | None) -> bool:
    """All but what counts on eviction, where the host holds what is evicted."""
    return scenario is None or scenario.name != "evicted" or HOST[0] not in launch.args


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gdn", "mamba2", "short-conv"])
def test_the_reference_agrees_with_transformers(
    family: str, models: dict[str, Path], references: Callable[[str], Reference]
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    reference = references(family)
    torch_model = AutoModelForCausalLM.from_pretrained(models[family], dtype=torch.float32).eval()
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


@pytest.mark.slow
def test_the_reference_sees_any_token_and_log_probability_of_an_answer_that_are_others(
    references: Callable[[str], Reference], tmp_path: Path
) -> None:
    """One prefill of prompt and answer says what each step of an answer would have."""
    answering, prompt = references("gdn"), tuple(random_tokens(903, 150))
    right = answering.answer(prompt)
    reference = Reference(lambda: answering.url, tmp_path)
    for index in range(len(right.token_ids)):
        token_ids = list(right.token_ids)
        token_ids[index] += 1
        (line,) = reference.divergences([Exchange(prompt, replace(right, token_ids=tuple(token_ids)))])
        assert f"token {index} is {right.token_ids[index] + 1}, not {right.token_ids[index]}" in line
    for index in range(len(right.logprobs)):
        logprobs = list(right.logprobs)
        logprobs[index] += 2 * MAX_LOGPROB_DIFFERENCE
        (line,) = reference.divergences([Exchange(prompt, replace(right, logprobs=tuple(logprobs)))])
        assert "a log-probability is off by" in line
    assert reference.divergences([Exchange(prompt, right)]) == []


@pytest.mark.parametrize(
    "scenario",
    [pytest.param(each, marks=pytest.mark.slow if each.is_long else ()) for each in SCENARIOS],
    ids=lambda scenario: scenario.name,
)
def test_a_reused_state_gives_the_same_answer(
    scenario: Scenario, launch: Launch, server: ServerProcess, references: Callable[[str], Reference]
) -> None:
    references(launch.family).require_same(scenario, server.url, launch.strategy)


def test_negative_control_a_broken_state_turns_the_scenarios_red(
    launch: Launch,
    server: ServerProcess,
    references: Callable[[str], Reference],
    record_property: Callable[[str, object], None],
) -> None:
    red, blind = {}, []
    asked = [each for each in SCENARIOS if not each.is_long and is_asked(launch, "", each)]
    with broken_states(server):
        for scenario in asked:
            exchanges = scenario.ask(server.url)
            found = references(launch.family).divergences(exchanges)
            if found:
                red[scenario.name] = found
            elif any(exchange.completion.num_cached_tokens for exchange in exchanges):
                blind.append(scenario.name)
    example = next((f"{name}: {found[0]}" for name, found in red.items()), "none")
    said = f"{len(red)} of {len(asked)} scenarios RED ({', '.join(red)}); first, {example}"
    record_property(NEGATIVE_CONTROL, f"{launch.name}: {said}")
    assert red, "a server that breaks states answered rightly: the suite cannot see a broken state"
    assert not blind, f"these scenarios reused a broken state and did not notice: {blind}"
