"""The hash of a request's deepest prefix in the tree is the page's, whatever becomes of its nodes."""

import pytest

from marconi.engine.reports import explain
from marconi.engine.reports.explain import Explained, Explanations, uncached
from marconi.engine.reports.trail import Trail
from marconi.model.learned_latency import LearnedLatency
from marconi.tree import RadixTree
from marconi.view.snapshot import prefix_hash, snapshot
from tree.letters import at, insert, path


def test_the_deepest_state_that_is_there_is_named_through_splits_merges_and_evictions() -> None:
    tree = RadixTree(max_ghosts=1)
    trail = Trail(3, *insert(tree, "ab", namespace=3))
    trail.left(insert(tree, "abcdefgh", 5, 8, namespace=3))
    of = {depth: prefix_hash(path("abcdefgh"[:depth]), 3) for depth in (2, 5, 8)}
    assert trail.hash == of[8]
    insert(tree, "abcdefxy", namespace=3)
    assert trail.hash == of[8], "split"
    tree.evict(at(tree, "abcdefgh", 3))
    assert trail.hash == of[8], "a ghost"
    assert trail.hash in snapshot(tree).hash
    tree.evict(at(tree, "abcdefxy", 3))
    assert trail.hash == of[5], "the ghost was forgotten for another"
    insert(tree, "abcdefgh", namespace=3)
    tree.evict(at(tree, "abcde", 3))
    assert trail.hash == of[2], "merged into the node below"
    tree.evict(at(tree, "ab", 3))
    assert trail.hash is None


def test_a_request_that_hit_nothing_and_left_nothing_has_no_hash() -> None:
    tree = RadixTree()
    assert Trail(0, tree.match(path("ab"), 1).checkpoint).hash is None
    assert Trail(0, tree.root()).num_tokens_to_hash == 0


def test_prefixes_are_hashed_when_asked_a_few_at_a_time_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explain, "MAX_HASHED_TOKENS", 6)
    tree, explanations = RadixTree(), Explanations(LearnedLatency(float), float)
    explanations.note(Explained("uncached", 0.0, uncached(0, 5)))
    for text in ("abcd", "abef", "xyz", "q"):
        explanations.note(Explained(text, 0.0, uncached(0, 5), Trail(0, *insert(tree, text))))
    assert explanations.latest(1.0) is None, "8 tokens of three, and one is left"
    lines = explanations.latest(1.0)
    assert lines is not None
    expected = [f"{prefix_hash(path(text)):08x}" for text in ("q", "xyz", "abef", "abcd")]
    assert [line["prefix"] for line in lines] == [*expected, None]
    explanations.flushed()
    lines = explanations.latest(2.0)
    assert lines is not None
    assert {line["prefix"] for line in lines} == {None}
