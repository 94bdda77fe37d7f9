"""A trial serves what the real cache would have served."""

import pickle
from dataclasses import replace

import pytest

from marconi.tree.snapshot import take_snapshot
from marconi.tuning import Trial, Window, pack_window, run_trials

from . import traffic


def window_after(num_before: int, num_in_window: int) -> tuple[Window, list[int]]:
    """A window, and what the real cache, at 0.5, went on to hit in it."""
    stream = traffic.documents_under_chatter(1, num_before + num_in_window)
    live = traffic.new_cache(0.5, traffic.BLOCK_CACHES)
    for request in stream[:num_before]:
        live.serve(request)
    snapshot = take_snapshot(live.served.tree)
    hits = [live.serve(request) for request in stream[num_before:]]
    return pack_window(snapshot, stream[num_before:]), hits


def test_the_trial_of_the_live_value_is_what_really_happened() -> None:
    window, hits = window_after(200, 300)
    num_prompt = sum(request.num_prompt_tokens for request in window.requests())
    assert run_trials(window, traffic.setup(traffic.BLOCK_CACHES), [0.5]) == [Trial(0.5, sum(hits) / num_prompt)]


def test_a_trial_starts_from_the_real_tree() -> None:
    window, _ = window_after(200, 300)
    empty = replace(window, snapshot=take_snapshot(traffic.new_cache().served.tree))
    ((_, score),) = run_trials(window, traffic.setup(traffic.BLOCK_CACHES), [0.5])
    ((_, from_nothing),) = run_trials(empty, traffic.setup(traffic.BLOCK_CACHES), [0.5])
    assert score > from_nothing


def test_values_differ_and_repeat_exactly() -> None:
    window, _ = window_after(200, 300)
    values = (0.0, 0.5, 8.0, None)
    trials = run_trials(window, traffic.setup(), values)
    assert len({score for _, score in trials}) > 1
    assert run_trials(pickle.loads(pickle.dumps(window)), traffic.setup(), values) == trials  # noqa: S301
    assert [run_trials(window, traffic.setup(), [value])[0] for value in values] == trials


def test_requests_arrive_whole_and_in_order() -> None:
    stream = traffic.chats_under_long_reads(3, 50)
    window = pack_window(take_snapshot(traffic.new_cache().served.tree), stream[::-1])
    assert list(window.requests()) == stream
    assert len(window) == 50


def test_an_empty_window_has_no_requests() -> None:
    window = pack_window(take_snapshot(traffic.new_cache().served.tree), [])
    assert not list(window.requests())
    assert run_trials(window, traffic.setup(), [0.0]) == [Trial(0.0, 0.0)]


def test_states_that_running_requests_held_can_be_evicted_in_a_trial() -> None:
    stream = traffic.documents_under_chatter(1, 500)
    live = traffic.new_cache()
    for request in stream[:200]:
        live.serve(request)
    sources = [live.served.match(request).checkpoint for request in stream[200:240]]
    for source in sources:
        live.served.tree.lock(source)
    assert any(source.is_locked and source.has_state for source in sources)
    window = pack_window(take_snapshot(live.served.tree), stream[240:])
    assert not any(node.is_locked for node in window.snapshot.restore().nodes())


@pytest.mark.parametrize("value", [-1.0, float("inf")])
def test_a_value_that_the_rule_refuses_is_its_own_error(value: float) -> None:
    window, _ = window_after(20, 20)
    with pytest.raises(ValueError, match="weight"):
        run_trials(window, traffic.setup(), [value])
