"""A server in whose state slots more requests run at once than SGLang would run, with answers as without a cache."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from marconi.process import LAUNCH
from marconi_cpu.demo.server_process import ServerProcess

from .breaking import broken_states
from .client import random_tokens
from .conftest import FAULT, MARCONI, STRATEGY_ARGS, EntryPoint, Launch
from .matrix import SERVER
from .reference import Reference
from .scenarios import CHUNKED_PREFILL_SIZE, EXTRA_BUFFER, MAX_KV_TOKENS, Exchange, together
from .test_faults_server import flush, status

pytestmark = pytest.mark.slow

NUM_SLOTS = 12
COUNTED_HERE, COUNTED_BY_SGLANG = 3, 5
ARGS = (
    *("--max-total-tokens", str(MAX_KV_TOKENS), "--max-mamba-cache-size", str(NUM_SLOTS)),
    *(*STRATEGY_ARGS[EXTRA_BUFFER], "--chunked-prefill-size", str(CHUNKED_PREFILL_SIZE)),
    *("--enable-cache-report", "--decode-log-interval", "1"),
)
LAUNCHES = (Launch("gdn-more-at-once", "gdn", (*MARCONI, *ARGS), entry_point=SERVER),)
TRUNK = random_tokens(95_000, 300)
PROMPTS = [TRUNK[: 200 + 50 * (index % 3)] + random_tokens(95_001 + index, 40 + index) for index in range(8)]


def ask(url: str) -> list[Exchange]:
    """Eight at once, and once more: they branch off a shared prompt, and go on from answers or from within them."""
    first = together(url, PROMPTS, max_new_tokens=48)
    answers = [each.completion.token_ids[: 20 if index % 2 else None] for index, each in enumerate(first)]
    longer = [[*each.prompt, *answer, *random_tokens(95_100, 15)] for each, answer in zip(first, answers, strict=True)]
    return [*first, *together(url, longer, max_new_tokens=48)]


def most_at_once(server: ServerProcess) -> int:
    log = server.log_path.read_text(errors="replace")
    return max(int(number) for number in re.findall(r"Decode batch.*?#running-req: (\d+)", log))


def test_more_requests_run_in_the_same_slots_and_answer_as_if_alone(
    server: ServerProcess, references: Callable[[str], Reference]
) -> None:
    asked = ask(server.url)
    assert sum(each.completion.num_cached_tokens > 0 for each in asked) >= len(PROMPTS)
    assert references("gdn").divergences(asked) == []
    assert most_at_once(server) == NUM_SLOTS // COUNTED_HERE
    there = status(server)
    assert there["num_hook_faults"] == 0
    assert there["state_slots"]["size"] == NUM_SLOTS
    assert "up to 4 requests run at once, 2 by SGLang's own count" in server.log_path.read_text(errors="replace")


def test_control_sglang_itself_runs_fewer(models: dict[str, Path], preload: EntryPoint, tmp_path: Path) -> None:
    with ServerProcess(models["gdn"], ARGS, log_path=tmp_path / "log", entry_point=preload(LAUNCH)) as server:
        together(server.url, PROMPTS, max_new_tokens=48)
        assert most_at_once(server) == NUM_SLOTS // COUNTED_BY_SGLANG


def test_control_a_state_that_is_lost_is_seen_in_the_answers(
    server: ServerProcess, references: Callable[[str], Reference]
) -> None:
    with broken_states(server):
        asked = ask(server.url)
    assert references("gdn").divergences(asked)


def test_where_planning_stops_ends_of_answers_are_kept_and_no_slot_is_lost(
    server: ServerProcess, references: Callable[[str], Reference]
) -> None:
    """SGLang could not track for so many: the server would end for want of slots."""
    file = server.log_path.parent / FAULT
    flush(server)
    file.write_text("prefill.hooks.on_init_new before all")
    asked = [*ask(server.url), *ask(server.url)]
    there = status(server)
    assert there["why_not_planned"] is not None
    assert most_at_once(server) == NUM_SLOTS // COUNTED_HERE
    assert references("gdn").divergences(asked) == []
    assert any(each.completion.num_cached_tokens for each in asked), "an answer's end was resumed from"
    log = server.log_path.read_text(errors="replace")
    assert "states are no longer planned, and kept ends of answers alone" in log
    file.write_text("")
    flush(server)
    slots = status(server)["state_slots"]
    assert slots["free"] == slots["size"] == NUM_SLOTS
