"""`extra_buffer_lazy`: one tracking slot a request and a second at a boundary, with planned states that need neither.

A running request takes 2 slots and not 3, so memory for states runs half as many requests more; answers are those of
the model without a prefix cache.
"""

from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from marconi.demo.server_process import ServerProcess
from marconi.engine.policies import CHUNK_END, JUDICIOUS
from marconi.engine.support import require_locked_states
from marconi.engine.version import Refusal

from .breaking import require_broken
from .conftest import BROKEN_STATE_SERVER, STANDARD, EntryPoint, Launch
from .reference import Reference
from .scenarios import EXTRA_BUFFER, SCENARIOS, Scenario

LAZY = "extra_buffer_lazy"


def lazy(family: str, *more: str) -> Launch:
    args = [LAZY if arg == EXTRA_BUFFER else arg for arg in STANDARD[family, EXTRA_BUFFER].args]
    return Launch("-".join([family, LAZY, *more]), family, (*args, *more), EXTRA_BUFFER)


LAUNCHES = (lazy("gdn"), lazy("mamba2"))


def is_asked(launch: Launch, scenario: Scenario) -> bool:
    return launch is LAUNCHES[0] or not scenario.is_long


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_a_reused_state_gives_the_same_answer(
    scenario: Scenario, launch: Launch, server: ServerProcess, references: Callable[[str], Reference]
) -> None:
    references(launch.family).require_same(scenario, server.url, launch.strategy)


@pytest.mark.slow
def test_nothing_is_in_use_once_all_have_ended(server: ServerProcess) -> None:
    (status,) = httpx.get(f"{server.url}/marconi", timeout=60.0).json()["ranks"]
    assert status["state_slots"]["in_use"] == status["kv_tokens"]["in_use"] == 0


@pytest.mark.slow
def test_control_a_broken_state_is_seen(
    preload: EntryPoint, models: dict[str, Path], tmp_path: Path, references: Callable[[str], Reference]
) -> None:
    with lazy("gdn").process(models, tmp_path / "log", entry_point=preload(BROKEN_STATE_SERVER)) as server:
        asked = [scenario.ask(server.url) for scenario in SCENARIOS[:4]]
        require_broken(server.log_path)
    assert any(references("gdn").divergences(exchanges) for exchanges in asked)


def test_where_sglang_keeps_states_itself_it_is_refused() -> None:
    require_locked_states(LAZY, JUDICIOUS)
    require_locked_states(EXTRA_BUFFER, CHUNK_END)
    with pytest.raises(Refusal, match="extra_buffer_lazy is only supported with --marconi-admission judicious"):
        require_locked_states(LAZY, CHUNK_END)
