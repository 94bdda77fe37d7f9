"""Every pair of what a server may be: its answers, its negative control, and nothing in use once all have ended."""

from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from sglang.srt.arg_groups import speculative_hook

from marconi.check.answer import answer
from marconi.check.line import CommandLine
from marconi.check.machine import Machine, Platform
from marconi.engine.launch.model import Model

from .breaking import broken_states
from .client import HTTP
from .conftest import NEGATIVE_CONTROL, Launch
from .matrix import BEYOND, FLAGS, MATRIX, NONE, PREFILL, REFUSED, Choice
from .reference import Reference
from .scenarios import SCENARIOS, Scenario

LAUNCHES = tuple(pytest.param(each, marks=pytest.mark.slow) for each in MATRIX)
OF_PREFILLS = {"branch-at-207", "branch-at-209", "at-a-prefills-end"}
"""Scenarios that drafts change nothing of."""
TO_THE_TOKEN = {"at-a-prefills-end", "thinking-dropped"}
"""Scenarios that count on states at any token."""
OF_THE_DEVICE = {"evicted", "aborted", "at-a-prefills-end", "thinking-dropped"}
"""Scenarios that count on what a flush or other prompts leave, where nothing comes back from the host."""
BROKEN = ("extension", "branch-at-208")
"""Scenarios whose prompts are the same whatever was answered."""


def is_asked(launch: Launch, name: str, scenario: Scenario | None) -> bool:
    """A scenario on every server that may be asked it, or on every second one where all of them may."""
    choice = launch.choice
    if scenario is None or choice is None:
        return True
    if scenario.name not in OF_PREFILLS | TO_THE_TOKEN | OF_THE_DEVICE:
        return choice.asks_every_second(SCENARIOS.index(scenario))
    left_out = set()
    left_out |= OF_PREFILLS if choice.drafts != NONE else set()
    left_out |= TO_THE_TOKEN if choice.page != "1" else set()
    left_out |= OF_THE_DEVICE if choice.has_host_tier else set()
    return scenario.name not in left_out


def test_every_scenario_that_no_server_leaves_out_meets_every_value_of_every_factor() -> None:
    every = {f"{name}={value}" for name, values in FLAGS.items() for value in values}
    for scenario in SCENARIOS:
        if not scenario.is_long and scenario.name not in OF_PREFILLS | TO_THE_TOKEN | OF_THE_DEVICE:
            asked = [launch.choice for launch in MATRIX if launch.choice and is_asked(launch, "", scenario)]
            assert {f"{name}={value}" for each in asked for name, value in each._asdict().items()} == every, scenario


def test_every_pair_is_in_a_launch_but_those_that_no_server_has() -> None:
    factors = [[f"{name}={value}" for value in values] for name, values in FLAGS.items()]
    every = {(one, other) for ones, others in combinations(factors, 2) for one in ones for other in others}
    covered = {pair for launch in MATRIX if launch.choice is not None for pair in launch.choice.pairs}
    assert covered == every - set(REFUSED) - set(BEYOND)


@pytest.mark.slow
@pytest.mark.usefixtures("loaded_plugins")
def test_check_refuses_each_pair_that_no_server_has_and_no_launch(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(Platform.CPU)
    # As `overlapping_server.py` has it.
    monkeypatch.setattr(speculative_hook, "_disable_overlap_schedule_for_cpu", lambda _: None)

    def reasons(choice: Choice) -> tuple[str, ...]:
        launch = choice.launch()
        role = ("--disaggregation-mode", PREFILL, "--disaggregation-transfer-backend", "mooncake")
        path = str(models[launch.family])
        args = ["--model-path", path, *launch.args, *((*role, *choice.prefill_flags) if choice.is_prefill else ())]
        try:
            return answer(CommandLine.parse(args), Model.find(path, None), machine).reasons
        except ValueError as error:
            return (str(error),)

    assert {launch.name: found for launch in MATRIX if launch.choice and (found := reasons(launch.choice))} == {}
    for pair, words in REFUSED.items():
        given = dict(each.split("=") for each in pair)
        said = [reasons(spread(211 * index, given)) for index in range(8)]
        assert all(said), f"{pair} is served"
        assert any(words in reason for each in said for reason in each), f"{pair} is refused for another reason: {said}"


def spread(number: int, given: dict[str, str]) -> Choice:
    """The server of that number among all of them, but for the values that are given."""
    chosen = {}
    for name, values in FLAGS.items():
        number, index = divmod(number, len(values))
        chosen[name] = [*values][index]
    return Choice(**chosen | given)


@pytest.mark.parametrize("scenario", [each for each in SCENARIOS if not each.is_long], ids=lambda each: each.name)
def test_a_reused_state_gives_the_same_answer(
    scenario: Scenario, launch: Launch, server: Any, references: Callable[[str], Reference]
) -> None:
    references(launch.family).require_same(scenario, server.url, launch.strategy)


def test_negative_control_a_broken_state_is_seen(
    launch: Launch,
    server: Any,
    references: Callable[[str], Reference],
    record_property: Callable[[str, object], None],
) -> None:
    with broken_states(server):
        exchanges = [each for scenario in SCENARIOS if scenario.name in BROKEN for each in scenario.ask(server.url)]
    found = references(launch.family).divergences(exchanges)
    record_property(NEGATIVE_CONTROL, f"{launch.name}: {len(found)} of {len(exchanges)} answers RED")
    assert found, "a server that breaks states answered rightly: the suite cannot see a broken state"


def test_nothing_is_in_use_once_all_have_ended(launch: Launch, server: Any) -> None:
    holder = getattr(server, "prefill", server)
    ranks = HTTP.get(f"{holder.url}/marconi", timeout=60.0).json()["ranks"]
    assert len(ranks) == (2 if "--dp-size" in launch.args else 1), "each cache says once what it holds"
    assert ranks[-1]["num_requests"] > 0
    for status in ranks:
        assert status["why_not_planned"] is None
        if status["joint_bytes"] is None:
            assert status["state_slots"]["in_use"] == status["kv_tokens"]["in_use"] == 0
        else:
            assert status["joint_bytes"]["free"] + status["joint_bytes"]["cached"] == status["joint_bytes"]["size"]
    log = server.log_path.read_text(encoding="utf-8", errors="replace")
    assert log.count(", eviction ") == len(ranks), "a line at the start for each cache"
