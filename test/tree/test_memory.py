"""A tree tells its memory where every token's KV went: split, joined, dropped, never lost and never twice."""

import random
from collections.abc import Sequence

import pytest

from marconi.policy.request import pack, unpack
from marconi.tree import Node, RadixTree, check_invariants
from marconi.tree.node import ID_BYTES


class Ledger:
    """Keeps the ids of every span, as a pool keeps their KV, and the number of tokens that were dropped."""

    def __init__(self) -> None:
        self.ids: dict[Node, list[int]] = {}
        self.num_dropped = 0
        self.num_dropped_states = 0

    def held(self, node: Node) -> None:
        assert node not in self.ids, "held twice"
        self.ids[node] = unpack(node.key)

    def dropped(self, node: Node) -> None:
        self.num_dropped += len(self.ids.pop(node))

    def dropped_state(self, node: Node) -> None:
        assert not node.has_state
        self.num_dropped_states += 1

    def split(self, upper: Node, lower: Node) -> None:
        ids = self.ids[lower]
        size = len(upper.key) // ID_BYTES
        self.ids[upper], self.ids[lower] = ids[:size], ids[size:]

    def joined(self, upper: Node, lower: Node) -> None:
        self.ids[lower] = self.ids.pop(upper) + self.ids[lower]


class Forgetful(Ledger):
    """A memory that misses when spans are joined."""

    def joined(self, upper: Node, lower: Node) -> None:
        del self.ids[upper]


def check(tree: RadixTree, ledger: Ledger) -> None:
    check_invariants(tree)
    assert {node: unpack(node.key) for node in tree.nodes()} == ledger.ids
    assert sum(map(len, ledger.ids.values())) == tree.num_tokens
    assert all(root.children for root in tree.roots.values()), "a namespace of nothing is kept"


def drive(ledger: Ledger, ids_per_unit: int, max_ghosts: int, num_steps: int) -> RadixTree:
    """Insert and evict at random, checking after every step."""
    rng = random.Random(f"{ids_per_unit} {max_ghosts}")  # noqa: S311
    tree = RadixTree(ids_per_unit, max_ghosts, ids_per_unit, ledger, max_ghost_tokens=8 * ids_per_unit)
    for _ in range(num_steps):
        held = [node for node in tree.nodes() if node.has_state and node.num_children <= 1]
        if held and (len(held) > 6 or rng.random() < 0.4):
            tree.evict(rng.choice(held))
        else:
            num_units = rng.randint(1, 6)
            units: Sequence[int] = [rng.randrange(3) for _ in range(num_units)]
            ids = [unit * 10 + rng.randrange(1 + (ids_per_unit > 1)) for unit in units for _ in range(ids_per_unit)]
            depths = sorted({rng.randint(1, num_units) * ids_per_unit, num_units * ids_per_unit})
            tree.insert(pack(ids), depths, rng.randrange(2))
        check(tree, ledger)
    return tree


@pytest.mark.parametrize("max_ghosts", [0, 5])
@pytest.mark.parametrize("ids_per_unit", [1, 4])
def test_a_memory_that_follows_the_tree_holds_every_span_once(ids_per_unit: int, max_ghosts: int) -> None:
    ledger = Ledger()
    tree = drive(ledger, ids_per_unit, max_ghosts, num_steps=1000)
    assert ledger.num_dropped > 100
    assert ledger.num_dropped_states > 100
    assert tree.num_tokens % ids_per_unit == 0


def test_a_memory_that_misses_a_change_is_caught() -> None:
    with pytest.raises(AssertionError):
        drive(Forgetful(), ids_per_unit=1, max_ghosts=0, num_steps=1000)


def test_a_page_is_shared_as_a_whole_or_not_at_all() -> None:
    """Two paths of pages of four that part within the second page share the first."""
    tree = RadixTree(unit_tokens=4, ids_per_unit=4)
    tree.insert(pack([1, 2, 3, 4, 5, 6, 7, 8]), [8])
    other = pack([1, 2, 3, 4, 5, 6, 0, 0])
    match = tree.match(other, 8)
    assert (match.num_live_tokens, match.diverges, match.num_span_tokens_left) == (4, True, 4)
    tree.insert(other, [8])
    assert sorted(node.depth for node in tree.nodes()) == [4, 8, 8]


def test_a_namespace_that_knows_nothing_is_forgotten() -> None:
    """A tenant that is gone leaves nothing, and looking one up makes nothing."""
    tree = RadixTree(max_ghosts=1)
    for tenant in range(3):
        (node,) = tree.insert(pack([1, 2]), [2], tenant)
        tree.evict(node)
    assert tree.match(pack([1, 2]), 2, 9).num_seen_tokens == 0
    assert list(tree.roots) == [2]
