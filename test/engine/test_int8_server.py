"""A server with checkpoints in int8: rounding changes answers that resume from one, and nothing else does.

On servers whose pool rounds nothing, one that drafts and one that only prefills among them, every answer equals that of
a server without a prefix cache: live states are never rounded, and each request resumes from its own state. On the real
one an answer that resumes from a checkpoint is off by the rounding, and every other answer is not.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from marconi.process import LAUNCH
from marconi_cpu.demo.server_process import ServerProcess

from .client import HTTP
from .conftest import MTP, EntryPoint, Launch, server_args
from .matrix import IN_TURN, NEXTN, NONE, OVERLAP, PREFILL, SERVER, TWO_POOLS, WHOLE, Choice
from .reference import MAX_LOGPROB_DIFFERENCE, Reference, difference
from .scenarios import EXTRA_BUFFER, NO_BUFFER, SCENARIOS, Exchange, Scenario

pytestmark = pytest.mark.slow

INT8 = "--enable-int8-mamba-checkpoint"
LAUNCHES = tuple(
    Launch(
        "int8-" + choice.name,
        choice.family + (MTP if choice.drafts != NONE else ""),
        (*server_args(choice.strategy), *drafts, INT8),
        choice.strategy,
        (("MARCONI_TEST_BESIDE", f"lossless_checkpoint_server.py {beside}"),),
        SERVER,
        choice,
    )
    for choice, drafts, beside in (
        (Choice("mamba2", NO_BUFFER, NONE, IN_TURN, TWO_POOLS, "1", "1", WHOLE), (), ""),
        (Choice("gdn", EXTRA_BUFFER, "NEXTN", OVERLAP, TWO_POOLS, "1", "1", WHOLE), NEXTN, "overlapping_server.py"),
        (Choice("gdn", EXTRA_BUFFER, NONE, OVERLAP, TWO_POOLS, "1", "1", PREFILL), (), "disaggregated_server.py"),
    )
)
ASKED = [each for each in SCENARIOS if not each.is_long]
MAX_ROUNDING = 0.5
"""Of a log-probability up to the first token that differs; a state that is lost makes more than 1 in most answers."""


@pytest.mark.parametrize("scenario", ASKED, ids=lambda scenario: scenario.name)
def test_without_its_rounding_every_answer_is_exact(
    scenario: Scenario, launch: Launch, server: Any, references: Callable[[str], Reference]
) -> None:
    references(launch.family).require_same(scenario, server.url, launch.strategy)


def test_every_live_slot_and_checkpoint_is_free_or_the_trees_once_all_have_ended(server: Any) -> None:
    assert "int8 mamba checkpoint pool" in server.log_path.read_text(errors="replace"), (
        "no checkpoint was in a pool of its own"
    )
    (rank,) = HTTP.get(f"{getattr(server, 'prefill', server).url}/marconi", timeout=60.0).json()["ranks"]
    assert rank["state_slots"]["in_use"] == rank["kv_tokens"]["in_use"] == 0
    assert rank["num_hook_faults"] == 0


def test_only_answers_that_resume_from_a_checkpoint_are_rounded(
    preload: EntryPoint, models: dict[str, Path], references: Callable[[str], Reference], tmp_path: Path
) -> None:
    reference = references("gdn")

    def off_by(exchange: Exchange) -> float:
        got = exchange.completion
        return difference(got, reference.answer(exchange.prompt, len(got.token_ids)))

    args, entry_point = [*server_args(EXTRA_BUFFER), INT8], preload(LAUNCH)
    with ServerProcess(models["gdn"], args, log_path=tmp_path / "log", entry_point=entry_point) as server:
        exchanges = [exchange for scenario in ASKED for exchange in scenario.ask(server.url)]
        (rank,) = HTTP.get(f"{server.url}/marconi", timeout=60.0).json()["ranks"]
    anew = [off_by(each) for each in exchanges if not each.completion.num_cached_tokens]
    resumed = sorted(off_by(each) for each in exchanges if each.completion.num_cached_tokens)
    assert max(anew) <= MAX_LOGPROB_DIFFERENCE, "a live state was rounded"
    assert resumed[len(resumed) // 2] > 10 * MAX_LOGPROB_DIFFERENCE, "control: the checks above see a rounded state"
    assert resumed[len(resumed) * 9 // 10] <= MAX_ROUNDING
    # Of 48 slots of full precision 28 are not needed by 8 running requests.
    assert rank["state_slots"]["size"] >= 1.8 * 28
    assert rank["num_hook_faults"] == 0
