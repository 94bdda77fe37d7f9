"""The tree before the last flush: how much of a prompt it knew, compared from where an earlier comparison ended.

It changes no more, and a node of the present tree stays the end of the same prefix. So the present node at which a
request diverges from all that is known remembers in which flushed node's span its prefix ends (`Node.flushed`), and the
next prompt that runs through it is compared from there:

    present    0 ------- end of a turn ------- what the request shares ---- diverges
    flushed    0 ------------------------------------------------------------------- known
                         compared from here

Of a conversation only its latest turns are compared, not its whole prompt at every turn. What the flushed tree did not
know of a present node's prefix it does not know beyond, and nothing is compared.

Owner: `misses.py`.
"""

from typing import Final

from marconi.policy.request import Request
from marconi.tree import Match, Node, RadixTree

_DIVERGED: Final = -1
"""In place of a serial number: the flushed tree did not know the whole prefix."""


class Flushed:
    """A flushed tree."""

    def __init__(self, tree: RadixTree) -> None:
        self._tree = tree
        self._found: dict[int, Node] = {}
        """By serial number, those that present nodes remember: these hold no flushed tree beyond the next flush."""

    def num_known_tokens(self, request: Request, match: Match) -> int:
        """Tokens of a request that were known; 0 where the present tree knows no fewer."""
        end = match.last
        if end.depth > match.num_seen_tokens:
            assert end.parent is not None
            end = end.parent
        above = end
        while above.flushed is None and above.parent is not None:
            above = above.parent
        depth, serial = above.flushed or (0, 0)
        if serial == _DIVERGED:
            return 0
        start = self._found[serial] if depth else self._tree.roots.get(request.namespace)
        if start is None:
            return 0
        node, known = self._tree.follow(request.path, start, depth)
        if end.depth:
            if known < end.depth:
                end.flushed = (end.depth, _DIVERGED)
                return 0
            while node.parent is not None and node.parent.depth >= end.depth:
                node = node.parent
            end.flushed = (end.depth, node.serial)
            self._found[node.serial] = node
        return known
