"""The scheduler's end of online tuning: nothing waits, nothing is lost silently, and a death changes nothing else."""

import logging
import os
import signal
import time
from array import array
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from marconi.engine import tuner as module
from marconi.engine.tuner import OnlineTuner
from marconi.replay.online_tuner import Assignment

DEADLINE_S = 90.0


@pytest.fixture
def tuner(assignment: Assignment) -> Iterator[OnlineTuner]:
    made = OnlineTuner(assignment)
    yield made
    made.close()


def serve(tuner: OnlineTuner, num_requests: int) -> list[float]:
    """Documents that return under short prompts that do not; the alphas that were adopted."""
    rng = np.random.default_rng(1)
    documents = rng.integers(1000, size=(8, 800))
    adopted = []
    for index in range(num_requests):
        body = documents[rng.integers(8)] if index % 5 == 0 else rng.integers(1000, size=150)
        ids = array("q", np.append(body, rng.integers(1000, size=30)).tolist())
        tuner.observe(ids, len(ids) - 10, 0, float(index), (0.01, 1e-6))
        alpha = tuner.poll()
        if alpha is not None:
            adopted.append(alpha)
    return adopted


def wait_for(tuner: OnlineTuner, num_decisions: int) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while tuner.counts.num_decisions < num_decisions and tuner.counts.is_alive:
        assert time.monotonic() < deadline_s, f"{tuner.counts} after {DEADLINE_S} s"
        tuner.poll()
        time.sleep(0.05)


def test_decisions_come_back_and_are_remembered(tuner: OnlineTuner) -> None:
    serve(tuner, 900)
    wait_for(tuner, 1)
    assert tuner.counts.is_alive
    assert tuner.counts.num_records == 900
    decision = tuner.history[0]
    assert decision["previous"] == 0.0
    assert 0 < decision["score_of_recency"] < 1
    assert not decision["failure"]


def test_a_death_is_one_warning_and_nothing_is_sent_or_adopted_any_more(
    tuner: OnlineTuner, caplog: pytest.LogCaptureFixture
) -> None:
    os.kill(tuner.pid, signal.SIGKILL)
    tuner._reader.join(10)
    with caplog.at_level(logging.WARNING):
        assert serve(tuner, 50) == []
    assert not tuner.counts.is_alive
    (record,) = caplog.records
    assert "the tuner's process is gone" in record.message
    assert "exit status -9" in record.message


def test_a_process_that_does_not_read_costs_records_and_no_time(
    tuner: OnlineTuner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped, not dead: the pipe fills, then the queue, then requests are dropped and counted."""
    monkeypatch.setattr(module, "MAX_WAITING_TOKENS", 1_000_000)
    os.kill(tuner.pid, signal.SIGSTOP)
    ids = array("q", range(100_000))
    for index in range(200):
        tuner.observe(ids, 99_000, 0, float(index), (0.0, 0.0))
    assert tuner.counts.num_records_dropped > 0
    assert tuner.counts.num_records + tuner.counts.num_records_dropped == 200
    assert tuner.num_waiting_tokens <= 1_100_000
    os.kill(tuner.pid, signal.SIGCONT)
    deadline_s = time.monotonic() + DEADLINE_S
    while tuner.num_waiting_tokens:
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    assert tuner.poll() is None
    assert tuner.counts.is_alive


def test_the_process_ends_with_its_standard_input(assignment: Assignment) -> None:
    """As it does when the scheduler is killed: nobody is left to end it."""
    tuner = OnlineTuner(assignment)
    tuner._waiting.put(None)
    assert tuner._process.wait(DEADLINE_S) == 0
    tuner.close()


def test_an_assignment_that_cannot_be_served_ends_the_process_and_not_the_scheduler(assignment: Assignment) -> None:
    tuner = OnlineTuner(replace(assignment, num_slots=1))
    tuner._reader.join(DEADLINE_S)
    assert tuner.poll() is None
    assert not tuner.counts.is_alive


def test_closing_ends_the_process(tuner: OnlineTuner) -> None:
    tuner.close()
    assert tuner._process.returncode is not None
    assert tuner.poll() is None
