"""Random trees with all kinds of nodes, and their columns by definition: a recursion that looks at every node."""

import math
import random
from dataclasses import dataclass, field
from fractions import Fraction
from zlib import crc32

import msgspec

from marconi.policy.base import Eviction
from marconi.policy.request import pack
from marconi.tree import LeftBy, Node, RadixTree
from marconi.view.snapshot import Columns


@dataclass
class RandomTree:
    """A tree and random changes of it, by a seed."""

    seed: int
    max_ghosts: int = 20
    tree: RadixTree = field(init=False)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)  # noqa: S311 - a test's
        self.tree = RadixTree(max_ghosts=self.max_ghosts)
        self.now_s = 0.0

    def change(self) -> None:
        """Insert a path, evict a state, or lock one or give a lock back."""
        draw, tree = self.random, self.tree
        self.now_s += draw.random()
        states = [node for node in tree.nodes() if node.has_state]
        free = [node for node in states if not node.num_locks]
        verb = draw.random()
        if verb < 0.6 or not free:
            path = pack(draw.choices(range(2), k=draw.randint(1, 12)))
            num = len(path) // 4
            depths = sorted(draw.sample(range(1, num + 1), min(num, draw.randint(1, 2))))
            for node in tree.insert(path, depths, draw.choice((0, 0, 7))):
                node.last_hit_s = node.last_pass_s = self.now_s
                node.num_hits += draw.randint(0, 1)
                if draw.random() < 0.7:
                    node.left_by = LeftBy(draw.randint(1, 12), continued=False)
        elif verb < 0.9:
            tree.evict(draw.choice(free))
        elif any(node.num_locks for node in states):
            tree.unlock(draw.choice([node for node in states if node.num_locks]))
        else:
            tree.lock(draw.choice(free))
        tree.take_changed()


def worths_by_definition(order: Eviction, nodes: list[Node], now_s: float) -> list[int]:
    """Hundredths of the places in the order, by sorting tuples."""
    keys = {node: tuple(order.worths([node], now_s)[0].tolist()) for node in nodes}
    ranked = sorted(
        (node for node in nodes if keys[node][0] == keys[node][0]), key=lambda node: (keys[node], node.serial)
    )
    last = max(len(ranked) - 1, 1)
    of_node = {node: math.ceil(Fraction(100 * place, last)) for place, node in enumerate(ranked)}
    return [of_node.get(node, -1) for node in nodes]


def columns_by_definition(tree: RadixTree, order: Eviction | None = None, now_s: float = 0.0) -> Columns:
    """The columns of a tree that stands still, whose states have their places in `order`."""
    rows: list[tuple[int, int, int, int, int, int, float, int, int]] = []
    nodes: list[Node] = []

    def visit(node: Node, parent: int, path: bytes, start: int) -> None:
        path += node.key
        has_copy = node.host_copy is not None and node.host_copy.is_held
        bits = {
            1: node.is_live,
            2: node.has_state,
            4: node.is_hosted,
            8: has_copy,
            16: node.num_locks > 0,
            32: not node.is_live and not node.is_hosted,
        }
        role = "none"
        if node.has_state or has_copy:
            role = "way"
            if node.left_by is not None:
                role = "prompt" if node.depth <= node.left_by.num_prompt_tokens else "answer"
            if len(node.children) >= 2:
                role = "branch"
        rows.append(
            (
                parent,
                node.depth,
                len(node.key) // tree.unit_bytes * tree.unit_tokens,
                sum(bit for bit, is_so in bits.items() if is_so),
                ("none", "way", "prompt", "answer", "branch").index(role),
                node.num_hits,
                round(max(node.last_hit_s, node.last_pass_s), 3),
                -1,
                crc32(path, start),
            )
        )
        nodes.append(node)
        index = len(rows) - 1
        for child in node.children.values():
            visit(child, index, path, start)

    for namespace, root in tree.roots.items():
        visit(root, -1, b"", crc32(str(namespace).encode()) if namespace else 0)
    if not rows:
        return Columns(*([] for _ in range(9)))
    columns = Columns(*([*column] for column in zip(*rows, strict=True)))
    return (
        columns if order is None else msgspec.structs.replace(columns, worth=worths_by_definition(order, nodes, now_s))
    )
