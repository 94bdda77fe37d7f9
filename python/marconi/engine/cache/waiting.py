"""The paths above waiting requests, as SGLang's order by weight walks them (`--schedule-policy dfs-weight`).

SGLang walks everything below the root at every step of its scheduler. Of this tree that would be what is remembered of
evicted prefixes, too, where nobody waits: up to a million nodes. So it is given a copy of the paths of those that wait,
and nothing else:

    tree     root -- a -- b (2 wait)          copy    root -- a -- b
                 |     `- ghosts                          `-- d
                 |- c -- ghosts
                 `- d (1 waits)

Branches of equal weight come in the order in which requests wait.
"""

from collections.abc import Iterable

from marconi.tree import Node


class Above:
    """A node of the copy."""

    __slots__ = ("children",)

    def __init__(self) -> None:
        self.children: dict[Node, Above] = {}


def paths_above(nodes: Iterable[Node | None]) -> tuple[Above, list[Above]]:
    """The root of the copy, and where each of `nodes` is in it; the root for None."""
    root = Above()
    copies: dict[Node, Above] = {}

    def copy_of(node: Node | None) -> Above:
        missing = []
        while node is not None and node not in copies:
            missing.append(node)
            node = node.parent
        above = root if node is None else copies[node]
        for each in reversed(missing):
            copies[each] = above.children[each] = Above()
            above = copies[each]
        return above

    return root, [copy_of(node) for node in nodes]
