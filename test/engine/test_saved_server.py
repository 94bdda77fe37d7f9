"""A server that is stopped and started again answers as one that never stopped, from the states that it saved."""

import json
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import save

from marconi.engine.persistence import files
from marconi.process import LAUNCH

from .client import HTTP, Completion, generate, random_tokens
from .conftest import BY_REQUESTS, STANDARD, EntryPoint, Launch
from .processes import is_gone
from .scenarios import EXTRA_BUFFER

NUM_CONVERSATIONS = 20
NUM_TURNS = 2
"""After the restart: 40 prompts."""
LEAST_HITS = 0.95
HOST = ("--enable-hierarchical-cache", "--hicache-ratio", "3")
ONE_POOL = ("--enable-unified-memory",)
STOPS_WITHIN_S = 60.0


class Traffic:
    """Conversations behind one system prompt, more than the pools hold: a turn of each, then of each the next."""

    def __init__(self) -> None:
        system = random_tokens(1000, 80)
        self._prompts = [system + random_tokens(1001 + number, 40) for number in range(NUM_CONVERSATIONS)]

    def turns(self, url: str, first: int, num_turns: int) -> list[Completion]:
        """Answers of `num_turns` turns of every conversation, the first of them numbered `first`."""
        answers = []
        for turn in range(first, first + num_turns):
            of_turn = [generate(url, prompt, max_new_tokens=8) for prompt in self._prompts]
            self.go_on(turn, of_turn)
            answers += of_turn
        return answers

    def go_on(self, turn: int, answers: Sequence[Completion]) -> None:
        """Every conversation has got its answer of `turn`, and asks something else."""
        for number, (prompt, answer) in enumerate(zip(self._prompts, answers, strict=True)):
            prompt += [*answer.token_ids, *random_tokens(2000 + 100 * turn + number, 12)]


def num_cached(answers: Sequence[Completion]) -> int:
    return sum(answer.num_cached_tokens for answer in answers)


def zero_states(folder: Path, num_tensors: int) -> int:
    """Make every state of a saved folder zero, as if its files had been written so. How many were not."""
    num_broken = 0
    index = folder / files.INDEX
    body = json.loads(index.read_text())["body"]
    for entry in body["states"]:
        with safe_open(folder / entry["name"], "pt") as opened:
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - no mapping
            metadata = opened.metadata()
        # KV comes first, then the `num_tensors` of the state, then the path.
        states = [tensors[str(number)] for number in range(len(tensors) - 1 - num_tensors, len(tensors) - 1)]
        num_broken += any(each.any() for each in states)
        for each in states:
            each.zero_()
        data = save(tensors, metadata)
        (folder / entry["name"]).write_bytes(data)
        entry["num_bytes"], entry["crc32"] = len(data), files.zlib.crc32(data)
    index.write_text(json.dumps({"crc32": files._crc_of(body), "body": body}))
    return num_broken


def loaded_or_refused(log: Path) -> None:
    """Wait until the log says so: with a host tier a server serves meanwhile."""
    deadline_s = time.monotonic() + STOPS_WITHIN_S
    while not re.search("marconi: loaded |the cache starts empty", log.read_text(errors="replace")):
        assert time.monotonic() < deadline_s
        time.sleep(0.1)


def checksums(folder: Path) -> list[int]:
    """Of every state of a saved folder, the most valuable first."""
    return [entry["crc32"] for entry in json.loads((folder / files.INDEX).read_text())["body"]["states"]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "memory"),
    [("gdn", HOST), ("mamba2", ONE_POOL)],
    ids=["gdn-host", "mamba2-one-pool"],
)
def test_a_restarted_server_hits_and_answers_as_one_that_never_stopped(
    family: str, memory: tuple[str, ...], models: dict[str, Path], preload: EntryPoint, tmp_path: Path
) -> None:
    base = STANDARD[family, EXTRA_BUFFER]
    common = (*base.args, *memory)
    folder = tmp_path / "saved"
    launch = Launch("saved", family, (*common, "--marconi-save-dir", str(folder)), env=BY_REQUESTS)

    def restarted(name: str, num_turns: int = 1) -> tuple[list[Completion], str]:
        """Answers after the restart, and the log."""
        log, traffic = tmp_path / name, Traffic()
        traffic.go_on(0, before)
        with launch.process(models, log, entry_point=preload(LAUNCH)) as running:
            loaded_or_refused(log)
            answers = traffic.turns(running.url, 1, num_turns)
        return answers, log.read_text(errors="replace")

    never_stopped = Launch("never-stopped", family, common, env=BY_REQUESTS)
    with never_stopped.process(models, tmp_path / "never", entry_point=preload(LAUNCH)) as running:
        traffic = Traffic()
        before = traffic.turns(running.url, 0, 1)
        expected = traffic.turns(running.url, 1, NUM_TURNS)
        assert HTTP.post(f"{running.url}/marconi/save", timeout=60.0).status_code == 404

    with launch.process(models, tmp_path / "first", entry_point=preload(LAUNCH)) as running:
        assert [each.token_ids for each in Traffic().turns(running.url, 0, 1)] == [each.token_ids for each in before]
        (on_demand,) = HTTP.post(f"{running.url}/marconi/save", timeout=60.0).json()["ranks"]
        assert on_demand["saved"]["num_states"] == on_demand["saved"]["num_held"] > 0
        saved_on_demand = checksums(folder / "rank-0")
        os.kill(running.pid, signal.SIGTERM)
        assert is_gone(running.pid, within_s=STOPS_WITHIN_S)
    first_log = (tmp_path / "first").read_text(errors="replace")
    assert "marconi: saved " in first_log, first_log[-3000:]
    rank = folder / "rank-0"
    assert checksums(rank) == saved_on_demand, "the same bits, in the same order"

    answers, log = restarted("again", NUM_TURNS)
    assert "marconi: loaded " in log
    assert [each.token_ids for each in answers] == [each.token_ids for each in expected]
    assert num_cached(answers) >= LEAST_HITS * num_cached(expected)
    expected = expected[:NUM_CONVERSATIONS]
    assert num_cached(answers[:NUM_CONVERSATIONS]) >= LEAST_HITS * num_cached(expected) > 0

    whole = tmp_path / "whole"
    shutil.copytree(rank, whole)
    if memory is ONE_POOL:
        _require_cold_after_damage(rank, restarted, expected)

    # The control: states that are wrong and not refused give other answers, so equal ones say something.
    shutil.rmtree(rank)
    shutil.copytree(whole, rank)
    assert zero_states(rank, num_tensors=1 if memory is HOST else 2), "the control broke no state"
    answers, log = restarted("wrong")
    assert "marconi: loaded " in log
    assert [each.token_ids for each in answers] != [each.token_ids for each in expected]


def _require_cold_after_damage(
    rank: Path, restarted: Callable[[str], tuple[list[Completion], str]], expected: Sequence[Completion]
) -> None:
    """A byte is flipped: refused by its file's name, and the server starts cold."""
    damaged = sorted(rank.glob("*.safetensors"))[-1]
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 1
    damaged.write_bytes(data)
    answers, log = restarted("damaged")
    assert f"{damaged} must have the CRC-32" in log
    assert answers[0].num_cached_tokens == 0
    assert [each.token_ids for each in answers] == [each.token_ids for each in expected]
    assert num_cached(answers) < LEAST_HITS * num_cached(expected)
