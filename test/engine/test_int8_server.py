"""A server with checkpoints in int8: rounding changes answers that resume from one, and nothing else does.

On a server whose pool rounds nothing every answer equals that of a server without a prefix cache: live states are never
rounded, and each request resumes from its own state. On the real one an answer that resumes from a checkpoint is off by
the rounding, and every other answer is not.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from marconi.process import LAUNCH
from marconi_cpu.demo.server_process import ServerProcess

from .client import HTTP
from .conftest import EntryPoint, server_args
from .reference import MAX_LOGPROB_DIFFERENCE, Reference, difference
from .scenarios import EXTRA_BUFFER, NO_BUFFER, SCENARIOS, Exchange

pytestmark = pytest.mark.slow

INT8 = "--enable-int8-mamba-checkpoint"
LOSSLESS_SERVER = (str(Path(__file__).with_name("lossless_checkpoint_server.py")),)
ASKED = [each for each in SCENARIOS if not each.is_long]
MAX_ROUNDING = 0.5
"""Of a log-probability up to the first token that differs; a state that is lost makes more than 1 in most answers."""


def test_without_its_rounding_every_answer_is_exact(
    preload: EntryPoint, models: dict[str, Path], references: Callable[[str], Reference], tmp_path: Path
) -> None:
    args, entry_point = [*server_args(NO_BUFFER), INT8], preload(LOSSLESS_SERVER)
    with ServerProcess(models["mamba2"], args, log_path=tmp_path / "log", entry_point=entry_point) as server:
        for scenario in ASKED:
            references("mamba2").require_same(scenario, server.url, NO_BUFFER)


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
