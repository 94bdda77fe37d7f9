"""Where on a path states stand, without walking it.

A path of blocks is cut into segments of `SEGMENT_BLOCKS`. The *anchor* of a position is the block before its segment
(the root of the namespace for the first). Every anchor knows the marked positions of its segment, on whatever branch:
those with a state, or with one in a partial block behind them. A request asks the anchors on its own path, one in
`SEGMENT_BLOCKS` blocks, and looks at what is marked there.
"""

SEGMENT_BLOCKS = 128


class Segments:
    """Marked positions by anchor, and partial blocks with states by the full block before them; all are rows."""

    __slots__ = ("marked", "tails")

    def __init__(self) -> None:
        self.marked: dict[int, dict[int, int]] = {}
        """Anchor -> row -> its index in the path."""
        self.tails: dict[int, dict[int, int]] = {}
        """Full block -> partial block with a state -> tokens in it."""

    def mark(self, anchor: int, row: int, index: int) -> None:
        """Say that there is something at a full block."""
        self.marked.setdefault(anchor, {})[row] = index

    def unmark(self, anchor: int, row: int) -> None:
        """Say that there is nothing any more."""
        rows = self.marked[anchor]
        del rows[row]
        if not rows:
            del self.marked[anchor]

    def add_tail(self, row: int, tail: int, num_tokens: int) -> None:
        """A state stands in the partial block `tail` behind the full block `row`."""
        self.tails.setdefault(row, {})[tail] = num_tokens

    def remove_tail(self, row: int, tail: int) -> None:
        """It does no more."""
        tails = self.tails[row]
        del tails[tail]
        if not tails:
            del self.tails[row]
