"""The comparison of ordinary traffic with its replay, on a server whose cache is a replay; nothing is launched."""

import importlib
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("sglang", reason="the server extra is not installed: pip install '.[server]'")

from marconi.engine.reports.explain import EXPLAIN
from validate.fake_server import CACHE, MODEL, Fake, Lie, honest

from .scripts import FOLDER, load


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(FOLDER)
    return load("validate")


def asked(script: Any, lie: Lie = honest) -> list[Any]:
    """Prompts that grow, as a server answers them."""
    oracle, fake, found = importlib.import_module("traffic.oracle"), Fake(CACHE, lie), []
    running = script.BY_NAME["extensions"].program(script.SMALL)
    try:
        wave = next(running)
        while True:
            answers = []
            for each in wave.asks:
                body = {"input_ids": [*each.prompt], "sampling_params": {"max_new_tokens": each.num_output_tokens}}
                _, answer = fake.post("/generate", body)
                output, meta = answer["output_ids"], answer["meta_info"]
                served = oracle.Served(each.prompt, tuple(output))
                found.append(script.Asked(served, meta["cached_tokens"], 0.0, explained=meta[EXPLAIN]))
                answers.append(output)
            wave = running.send(answers)
    except StopIteration:
        return found


def test_a_shape_that_is_served_as_it_is_replayed_agrees(script: Any) -> None:
    both = script.compared("there", "extensions", CACHE, MODEL, script.sent_of(asked(script)))
    assert both.tolerance_points is None, "they came one by one"
    assert both.agrees
    assert sum(row.num_cached_tokens for row in both.rows) > 0


def test_one_token_of_one_request_is_too_many_where_they_come_one_by_one(script: Any) -> None:
    sent = script.sent_of(asked(script, lambda number, num_cached: num_cached + (number == 3)))
    both = script.compared("there", "extensions", CACHE, MODEL, sent)
    assert not both.agrees
    assert [row.index for row in both.differing] == [3]
    assert script.Run("extensions", "short", 0, both).to_json()["agrees"] is False


def test_where_some_come_beside_each_other_the_sums_may_be_half_a_point_apart(script: Any) -> None:
    first, second, *others = script.sent_of(asked(script, lambda number, num_cached: num_cached + (number == 3)))
    ended = first.answer.steps.ended
    steps = replace(second.answer.steps, queued=ended._replace(number=ended.number - 0.5))
    sent = [first, replace(second, answer=replace(second.answer, steps=steps)), *others]
    both = script.compared("there", "extensions", CACHE, MODEL, sent)
    assert both.tolerance_points == script.TOLERANCE_POINTS
    assert both.differing
    assert both.agrees


def test_an_answer_without_its_explanation_is_refused(script: Any) -> None:
    with pytest.raises(script.WrongAnswer, match="an answer must be explained"):
        script.sent_of([replace(each, explained=None) for each in asked(script)])
