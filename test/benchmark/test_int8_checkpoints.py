"""The benchmark of checkpoints in int8, without servers: what it counts of the answers that it gets."""

from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest

from .scripts import load

pytest.importorskip("sglang", reason="the server extra is not installed: pip install '.[server]'")


@pytest.fixture
def script() -> ModuleType:
    return load("int8_checkpoints")


def said(script: ModuleType, answer: tuple[int, ...], logprobs: tuple[float, ...], num_cached: int) -> Any:
    return script.Said((1, 2, 3), answer, logprobs, num_cached)


def test_answers_are_compared_up_to_the_first_token_that_differs(script: ModuleType) -> None:
    exact = said(script, (5, 6, 7, 8), (-1.0, -1.0, -1.0, -1.0), 2)
    same = said(script, (5, 6, 7, 8), (-1.0, -1.5, -1.0, -1.0), 2)
    other = said(script, (5, 9, 7, 9), (-1.25, -9.0, -9.0, -9.0), 2)
    found = script.figures_of([(exact, same), (exact, other)])
    assert (found.num_answers, found.num_answers_that_differ) == (2, 1)
    assert (found.num_tokens, found.num_tokens_that_differ, found.share_of_tokens) == (8, 2, 0.25)
    assert found.errors == (0.0, 0.0, 0.0, 0.25, 0.5)
    assert (found.error_at(0.5), found.error_at(1.0)) == (0.0, 0.5)
    assert found.num_different_anew == 0


def test_an_answer_that_resumes_from_nothing_and_differs_is_counted_apart(script: ModuleType) -> None:
    exact, other = said(script, (5,), (-1.0,), 0), said(script, (6,), (-1.0,), 0)
    resumed = said(script, (5,), (-1.0,), 2), said(script, (5,), (-1.0,), 2)
    found = script.figures_of([(exact, other), (exact, exact), resumed])
    assert (found.num_answers, found.num_answers_that_differ, found.num_different_anew) == (1, 0, 1)


def test_a_chat_goes_on_from_what_was_said(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "ask", lambda _, prompt: script.Said(tuple(prompt), (7, 7), (0.0, 0.0), 0))
    turns = script.chat("any", 3)
    assert turns == script.chat("any", 3)
    assert len(turns) == script.TURNS
    assert all(after.prompt[: len(before.prompt) + 2] == (*before.prompt, 7, 7) for before, after in pairwise(turns))
