"""`Windows` holds exactly the tokens before states, whatever comes, goes, splits and joins."""

import random

import pytest

from marconi.tree import Node, RadixTree
from marconi.tree.windows import Change, Windows

from .letters import path

WINDOW = 8


class Recorder:
    """A `Memory` that keeps windows before states, and the tokens in them by path."""

    def __init__(self) -> None:
        self.states: set[Node] = set()
        self.windows = Windows(WINDOW, self.states.__contains__)
        self.num_now: dict[Node, int] = {}

    def keep(self, node: Node) -> None:
        self.states.add(node)
        self.note(self.windows.changed(node))

    def note(self, changes: list[Change]) -> None:
        for change in changes:
            assert change.num_before != change.num_now
            self.num_now[change.node] = change.num_now

    def held(self, node: Node) -> None:
        assert self.windows.num_held(node) == 0, "new KV is nobody's window yet"

    def dropped(self, node: Node) -> None:
        assert self.windows.num_held(node) == 0, "KV is freed behind its windows"

    def dropped_state(self, node: Node) -> None:
        self.states.discard(node)
        self.note(self.windows.changed(node))

    def split(self, upper: Node, lower: Node) -> None:
        before = self.num_now.get(lower, 0)
        self.windows.split(upper, lower)
        self.num_now[lower], self.num_now[upper] = self.windows.num_held(lower), self.windows.num_held(upper)
        assert self.num_now[lower] + self.num_now[upper] == before

    def joined(self, upper: Node, lower: Node) -> None:
        before = self.num_now.pop(upper, 0) + self.num_now.get(lower, 0)
        self.windows.joined(upper, lower)
        self.num_now[lower] = self.windows.num_held(lower)
        assert self.num_now[lower] == before


@pytest.mark.parametrize("seed", range(20))
def test_what_is_held_are_the_windows_before_all_states(seed: int) -> None:
    draw = random.Random(seed)  # noqa: S311 - not for secrets
    memory = Recorder()
    tree = RadixTree(1, memory=memory, max_ghosts=draw.choice((0, 1_000)))
    for step in range(300):
        text = "".join(draw.choice("ab") * draw.randrange(1, 6) for _ in range(6))
        depths = sorted(draw.sample(range(1, len(text) + 1), draw.randrange(1, 4)))
        for node in tree.insert(path(text), depths):
            if node not in memory.states:
                memory.keep(node)
        while len(memory.states) > 12:
            tree.evict(draw.choice(sorted(memory.states, key=lambda node: node.serial)))
        memory.windows.check_invariants(list(tree.nodes()))
        assert sum(memory.num_now.get(node, 0) for node in tree.nodes()) == memory.windows.num_tokens, step


def test_a_window_that_is_counted_wrong_is_found() -> None:
    memory = Recorder()
    tree = RadixTree(1, memory=memory)
    (node,) = tree.insert(path("abcdefghijkl"), [12])
    memory.keep(node)
    assert memory.windows.num_held(node) == memory.windows.num_tokens == WINDOW
    memory.windows.check_invariants([node])
    memory.states.clear()
    with pytest.raises(AssertionError, match="8 tokens in windows, not 0"):
        memory.windows.check_invariants([node])
