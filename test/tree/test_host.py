"""The host tier's copies: random operations on both tiers, held against the set of paths that were copied."""

import random
from collections.abc import Callable, Iterator

import pytest

from marconi.tree import Freed, HostCopy, Node, RadixTree, check_invariants
from marconi.tree.host import HostCopies
from marconi.tree.invariants import check_host
from marconi.tree.node import ID_BYTES

from .letters import at, insert, outline, path, text_of

NUM_OPERATIONS = 1_500
NUM_LETTERS = 3
MAX_UNITS = 9
NUM_STATES = 10


def copies_of(tree: RadixTree) -> dict[str, HostCopy]:
    """By path, with its namespace in front."""
    return {
        f"{namespace}{text_of(node)}": node.host_copy
        for namespace, root in tree.roots.items()
        for node in root.walk()
        if node.host_copy is not None and node.host_copy.is_held
    }


def prefixes(texts: set[str]) -> set[str]:
    """The units that all of `texts` take together, each named by the path that ends in it."""
    return {text[:end] for text in texts for end in range(2, len(text) + 1)}


def facts(tree: RadixTree) -> dict[HostCopy, tuple[int, int, object]]:
    """What a rule reads of every copy that may be dropped."""
    return {
        copy: (copy.freed_tokens, copy.num_children, copy.state_above)
        for copy in copies_of(tree).values()
        if not copy.num_locks
    }


class Rows:
    """Where copies lie: of every hosted node the units of its span, as far as they were filled."""

    def __init__(self) -> None:
        self.units: dict[Node, list[str]] = {}
        self.states: set[Node] = set()

    def held(self, node: Node) -> None:
        self.units[node] = []

    def dropped(self, node: Node) -> None:
        del self.units[node]

    def dropped_state(self, node: Node) -> None:
        self.states.remove(node)

    def split(self, upper: Node, lower: Node) -> None:
        num_above = len(upper.key) // ID_BYTES
        self.units[upper], self.units[lower] = self.units[lower][:num_above], self.units[lower][num_above:]

    def joined(self, upper: Node, lower: Node) -> None:
        self.units[lower] = self.units.pop(upper) + self.units[lower]

    def fill(self, node: Node) -> None:
        """Copy what is missing of the path, from its front, and the state."""
        self.states.add(node)
        for above in (*reversed(list(nodes_above(node))), node):
            text = text_of(above)
            span = [text[: end + 1] for end in range(len(text) - len(above.key) // ID_BYTES, len(text))]
            self.units[above] += span[len(self.units[above]) :]

    def check(self, tree: RadixTree) -> None:
        """Raise `AssertionError` unless it holds what the hosted nodes stand for."""
        hosted = [node for root in tree.roots.values() for node in root.walk() if node.is_hosted]
        assert set(hosted) == self.units.keys()
        assert {node for node in hosted if node.has_copy} == self.states
        for node in hosted:
            text = text_of(node)
            assert self.units[node] == [text[: len(text) - left] for left in reversed(range(len(node.key) // ID_BYTES))]


def nodes_above(node: Node) -> Iterator[Node]:
    """Those above a node, the root aside, the deepest first."""
    while (above := node.parent) is not None and above.parent is not None:
        yield above
        node = above


class Tiers:
    """A tree with a host, and the paths that are to be on the host."""

    def __init__(self, max_ghosts: int, unit_tokens: int, seed: int) -> None:
        self.tree = RadixTree(unit_tokens, max_ghosts)
        self.rows = Rows()
        self.host = HostCopies(self.tree, self.rows)
        self.copied: set[str] = set()
        self.locked: list[HostCopy] = []
        self._rng = random.Random(seed)  # noqa: S311 - a workload, not a secret

    def operate(self) -> str:
        """One random operation, by name."""
        rng, tree = self._rng, self.tree
        states = [node for node in tree.nodes() if node.has_state]
        copies = sorted(copies_of(tree).items())
        draw = rng.random()
        if states and draw < 0.25:
            node = rng.choice(states)
            self.host.hold(node)
            self.copied.add(f"{self._namespace_of(node)}{text_of(node)}")
            if free := [text for text, copy in copies if not copy.num_locks and copy.node is not node][:1]:
                # Others give way before it is filled.
                self.host.drop(dict(copies)[free[0]])
                self.copied -= set(free)
            self.rows.fill(node)
            return "hold"
        free = [(text, copy) for text, copy in copies if not copy.num_locks]
        if free and (draw < 0.4 or len(copies) > NUM_STATES):
            text, copy = rng.choice(free)
            before, num_freed = self.host.num_tokens, copy.freed_tokens
            freed = self.host.drop(copy)
            self.copied.discard(text)
            assert freed == Freed(num_freed, 1)
            assert before - self.host.num_tokens == num_freed
            return "drop"
        if self.locked and draw < 0.5:
            self.host.unlock(self.locked.pop())
            return "unlock"
        if copies and draw < 0.55:
            self.locked.append(rng.choice(copies)[1])
            self.host.lock(self.locked[-1])
            return "lock"
        if copies and draw < 0.65:
            text, copy = rng.choice(copies)
            tree.insert(path(text[1:]), [copy.depth], int(text[0]))
            return "load"
        if states and (draw < 0.8 or len(states) > NUM_STATES):
            tree.evict(rng.choice(states))
            return "evict"
        text = "".join(chr(97 + rng.randrange(NUM_LETTERS)) for _ in range(rng.randint(1, MAX_UNITS)))
        depths = sorted(rng.sample(range(1, len(text) + 1), min(len(text), rng.choice((1, 1, 2)))))
        tree.insert(path(text), [depth * tree.unit_tokens for depth in depths], rng.randrange(2))
        return "insert"

    def check(self) -> None:
        """Raise `AssertionError` unless the host holds the copied paths, and nothing else."""
        tree, unit = self.tree, self.tree.unit_tokens
        check_invariants(tree)
        check_host(tree, self.host)
        self.rows.check(tree)
        copies = copies_of(tree)
        assert copies.keys() == self.copied
        assert self.host.num_tokens == unit * len(prefixes(self.copied))
        for text, copy in copies.items():
            alone = prefixes({text}) - prefixes(self.copied - {text})
            assert copy.freed_tokens == unit * len(alone)
            assert tree.match(path(text[1:]), copy.depth, int(text[0])).hosted is copy.node

    def _namespace_of(self, node: Node) -> int:
        while node.parent is not None:
            node = node.parent
        return next(namespace for namespace, root in self.tree.roots.items() if root is node)


def run(max_ghosts: int, unit_tokens: int) -> None:
    tiers = Tiers(max_ghosts, unit_tokens, seed=11)
    seen: set[str] = set()
    before = facts(tiers.tree)
    for index in range(NUM_OPERATIONS):
        tiers.host.take_changed()
        tiers.tree.take_changed()
        name = tiers.operate()
        seen.add(name)
        tiers.check()
        after = facts(tiers.tree)
        differing = {copy for copy in before.keys() | after.keys() if before.get(copy) != after.get(copy)}
        unnoted = differing - set(tiers.host.take_changed())
        assert not unnoted, f"operation {index}, {name}: not noted: {unnoted}"
        before = after
    assert seen == {"hold", "drop", "lock", "unlock", "load", "evict", "insert"}


@pytest.mark.parametrize(("max_ghosts", "unit_tokens"), [(0, 1), (3, 1), (40, 16)])
def test_the_host_holds_what_was_copied_whatever_the_device_does(max_ghosts: int, unit_tokens: int) -> None:
    run(max_ghosts, unit_tokens)


def keep_dead_kv(host: HostCopies, copy: HostCopy) -> Freed:
    copy.node.has_copy = False
    host.num_states -= 1
    host.use(copy)
    return Freed(0, 1)


@pytest.mark.parametrize(
    ("method", "fault"),
    [
        ("drop", keep_dead_kv),
        ("_note_only_leaf", lambda host, node: None),
        ("_note_nearest_below", lambda host, node: None),
    ],
)
def test_a_host_that_keeps_dead_kv_or_a_change_to_itself_is_caught(
    method: str, fault: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HostCopies, method, fault)
    with pytest.raises(AssertionError):
        run(max_ghosts=3, unit_tokens=1)


def test_a_copy_outlives_what_the_device_gives_up() -> None:
    tree = RadixTree(max_ghosts=9)
    host = HostCopies(tree)
    (end,) = insert(tree, "abcd")
    host.hold(end)
    tree.evict(end)
    assert outline(tree) == {"abcd": "ghost"}
    assert list(tree.ghosts) == []
    match = tree.match(path("abcdef"), 5)
    assert (match.checkpoint.depth, match.num_live_tokens, match.hosted, match.ghost) == (0, 0, end, end)
    host.drop(copies_of(tree)["0abcd"])
    assert list(tree.ghosts) == [end]
    assert tree.match(path("abcdef"), 5).hosted is None


def test_what_two_paths_share_is_on_the_host_once() -> None:
    tree = RadixTree()
    host = HostCopies(tree)
    for text in ("abcd", "abxyz"):
        host.hold(insert(tree, text)[0])
    assert (host.num_tokens, host.num_states) == (7, 2)
    assert host.drop(copies_of(tree)["0abcd"]) == Freed(2, 1)
    assert host.drop(copies_of(tree)["0abxyz"]) == Freed(5, 1)


def test_only_what_the_device_holds_can_be_copied_and_what_is_read_cannot_be_dropped() -> None:
    tree = RadixTree(max_ghosts=9)
    host = HostCopies(tree)
    insert(tree, "abcd")
    insert(tree, "abxy")
    with pytest.raises(AssertionError, match="has no state to copy"):
        host.hold(at(tree, "ab"))
    copy = host.hold(at(tree, "abcd"))
    host.lock(copy)
    with pytest.raises(AssertionError, match="is locked"):
        host.drop(copy)
    host.unlock(copy)
    host.drop(copy)
    with pytest.raises(AssertionError, match="dropped already"):
        host.drop(copy)
