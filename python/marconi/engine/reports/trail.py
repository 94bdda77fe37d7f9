"""Where a request is in the tree: the states that it resumed from and left, and the hash of the deepest still there.

The page finds a prefix by its hash (`view/snapshot.py`), so each line of `GET /marconi/requests` has one. A request
pays for a few references to nodes; hashes are computed when somebody asks, each once, as a prefix never changes.

A node stays the end of the same prefix as long as it is in the tree, as a state or as a ghost. One that was merged into
a node below it, or that the tree has forgotten, has no parent.

Owner: the scheduler's thread.
"""

from collections.abc import Sequence

from marconi.tree import Node
from marconi.view.snapshot import hash_of


class Trail:
    """The states of one request."""

    __slots__ = ("_known", "_namespace", "_nodes")

    def __init__(self, namespace: int, resumed_from: Node) -> None:
        """Begin at the state that the request resumed from, or at the root."""
        self._namespace = namespace
        self._nodes = [resumed_from]
        """In rising depth."""
        self._known: tuple[int, int] | None = None
        """The last hash, behind the serial number of its node; None until somebody asks."""

    def left(self, nodes: Sequence[Node]) -> None:
        """Add states that the request has left, in rising depth and beyond those before."""
        self._nodes += nodes

    def forget(self) -> None:
        """Drop the nodes: their tree is held no longer."""
        self._nodes.clear()

    @property
    def num_tokens_to_hash(self) -> int:
        """Tokens that `hash` has to look at; 0 if it is known."""
        end = self._end()
        return 0 if end is None or (self._known and self._known[0] == end.serial) else end.depth

    @property
    def hash(self) -> int | None:
        """The hash of the deepest prefix that the tree has; None if it has none."""
        end = self._end()
        if end is None:
            return None
        if self._known is None or self._known[0] != end.serial:
            self._known = end.serial, hash_of(end, self._namespace)
        return self._known[1]

    def _end(self) -> Node | None:
        return next((node for node in reversed(self._nodes) if node.parent is not None), None)
