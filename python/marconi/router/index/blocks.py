"""The blocks that any worker holds: a forest of rows, by the block before each.

A row is a number; what is known of it stands in columns, so that a million blocks are a few dozen large objects. The
garbage collector walks only the masks, and not even those where a process calls `gc.freeze` after making it. Of a row:

    held      who holds its KV                              a mask of holdings
    rooted    who holds its KV and that of all before it     likewise; always a part of the parent's, and of `held`
    states    who holds a state right after it               likewise, only of rows that have one

`rooted` makes a lookup cheap: along a chain it only ever loses bits, so where a worker's KV ends is found by bisection,
exactly, holes or not. In return a block that is removed from the middle of a path takes the bit from all below it,
and gives it back when it returns; each costs what hangs below, for this worker. Workers evict from the ends, so that
is rare, and a holding with nothing loose never looks.

A block that is named before it is told of (as a parent, or by its state) has a row without a known parent. A row is
*placed*, with its index in the path, when somebody has it rooted for the first time, and stays so: what is before a
block never changes. A row goes with its last holder, state and child. Owned by `FleetIndex`.
"""

from array import array

from marconi.router.index.coldest import Coldest
from marconi.router.index.holding import Holding
from marconi.router.index.segments import SEGMENT_BLOCKS, Segments

NONE = -1
NOBODY = 0
"""A row that stays empty: that of any block that is not known."""
UNKNOWN = -2
"""The parent of a row that is not told of yet."""
ROOT = -3
"""The parent of a namespace's root."""
FREE = -4
"""The parent of a row that is not in use."""
UNPLACED = -2

_GROWTH_ROWS = 4096


class Space:
    """The blocks of one namespace, by their hash."""

    __slots__ = ("namespace", "root", "rows")

    def __init__(self, namespace: bytes, root: int) -> None:
        self.namespace = namespace
        self.root = root
        self.rows: dict[int, int] = {}


class Blocks:
    """The columns, and what keeps them true."""

    def __init__(self) -> None:
        self.hash = array("Q")
        self.parent = array("i")
        self.first_child = array("i")
        self.next = array("i")
        self.previous = array("i")
        self.index = array("i")
        """In its path: 0 for the first block, -1 for a root, `UNPLACED` until known."""
        self.anchor = array("i")
        self.tail_tokens = array("i")
        """Of a partial block; 0 for a full one."""
        self.held: list[int] = []
        self.rooted: list[int] = []
        self.states: dict[int, int] = {}
        self.root = array("i")
        """Of its namespace."""
        self.segments = Segments()
        self.coldest = Coldest()
        self.spaces: dict[bytes, Space] = {}
        self._space_of_root: dict[int, Space] = {}
        self.free: list[int] = []
        """Rows that are not in use; they have neither holders nor relatives."""
        self.take()  # `NOBODY`

    @property
    def num_rows(self) -> int:
        """In use, roots among them."""
        return len(self.hash) - len(self.free) - 1

    def space_of(self, namespace: bytes) -> Space:
        """The namespace's blocks, begun if there are none."""
        space = self.spaces.get(namespace)
        if space is None:
            space = Space(namespace, self.take())
            row = space.root
            self.root[row], self.parent[row], self.index[row], self.anchor[row] = row, ROOT, -1, row
            self.rooted[row] = -1  # nothing comes before the first block: everybody has it
            self.spaces[namespace] = self._space_of_root[row] = space
        return space

    def add(self, space: Space, block_hash: int, parent: int, tail_tokens: int = 0) -> int:
        """A new row."""
        row = self.take()
        space.rows[block_hash] = row
        self.hash[row], self.root[row], self.tail_tokens[row] = block_hash, space.root, tail_tokens
        self.parent[row] = parent
        if parent >= 0:
            self.link(parent, row)
        return row

    def adopt(self, parent: int, row: int) -> bool:
        """Learn what is before a row; False if that cannot be, since it comes after the row itself."""
        if self.index[parent] == UNPLACED:  # all before a placed row are placed, and this one is not
            above = parent
            while above >= 0:
                if above == row:
                    return False
                above = self.parent[above]
        self.parent[row] = parent
        self.link(parent, row)
        return True

    def root_below(self, row: int, holding: Holding) -> None:
        """The KV before `row`, which is held, is whole now: so it is for all that is held in one piece below."""
        bit, held, rooted = holding.bit, self.held, self.rooted
        stack = [row]
        while stack:
            row = stack.pop()
            rooted[row] |= bit
            holding.num_loose -= 1
            if self.index[row] == UNPLACED:
                self.place(row)
            child = self.first_child[row]
            while child >= 0:
                if held[child] & bit:
                    stack.append(child)
                child = self.next[child]

    def remove_kv(self, row: int, holding: Holding) -> None:
        """The holding has the row's KV no more, and has struck it out already."""
        bit, rooted = holding.bit, self.rooted
        self.held[row] &= ~bit
        if rooted[row] & bit:
            rooted[row] &= ~bit
            if self.first_child[row] >= 0:
                self._uproot_below(row, holding)
        else:
            holding.num_loose -= 1
        self.prune(row)

    def strike(self, row: int, bit: int) -> None:
        """As `remove_kv`, of a holding that is answered for no more: all of it goes, in any order."""
        self.held[row] &= ~bit
        self.rooted[row] &= ~bit
        self.prune(row)

    def add_state(self, row: int, bit: int) -> None:
        """A state stands after the row."""
        mask = self.states.get(row, 0)
        self.states[row] = mask | bit
        if not mask and self.index[row] >= 0:
            self._mark(row)

    def remove_state(self, row: int, bit: int) -> None:
        """It does no more."""
        mask = self.states[row] & ~bit
        if mask:
            self.states[row] = mask
            return
        del self.states[row]
        if self.index[row] >= 0:
            self._unmark(row)
        self.prune(row)

    def place(self, row: int) -> None:
        """Learn where in its path a row stands; the one before it is placed."""
        parent = self.parent[row]
        index = self.index[row] = self.index[parent] + 1
        self.anchor[row] = self.anchor[parent] if index % SEGMENT_BLOCKS else parent
        if row in self.states:
            self._mark(row)

    def prune(self, row: int) -> None:
        """Free a row that nothing needs, and those above it that were there for its sake."""
        while self.first_child[row] < 0 and not self.held[row] and row not in self.states:
            parent, space = self.parent[row], self._space_of_root[self.root[row]]
            if parent == ROOT:
                self.end(space)
                return
            del space.rows[self.hash[row]]
            if parent >= 0:
                self._unlink(parent, row)
                self.coldest.hand_up(row, parent)
            self._give(row)
            if parent < 0:
                self.end(space)
                return
            row = parent
        if self.first_child[row] < 0 and self.parent[row] != ROOT:
            self.coldest.offer(row)

    def end(self, space: Space) -> None:
        """Forget a namespace, if nothing is left of it."""
        if not space.rows:
            del self.spaces[space.namespace], self._space_of_root[space.root]
            self._give(space.root)

    def is_leaf(self, row: int) -> bool:
        """Whether a row is in use, is no root, and has nothing below it."""
        return self.first_child[row] < 0 and self.parent[row] > ROOT

    def take(self) -> int:
        """A row that is not in use, to be filled."""
        if not self.free:
            self._grow()
        return self.free.pop()

    def take_run(self, num_rows: int) -> list[int] | None:
        """Consecutive rows that are not in use, to be filled; None if those that are free next are not consecutive."""
        while len(self.free) < num_rows:
            self._grow()
        run = self.free[: -num_rows - 1 : -1]
        if run != list(range(run[0], run[0] + num_rows)):
            return None
        del self.free[-num_rows:]
        return run

    def link(self, parent: int, row: int) -> None:
        """Write a row down as a child."""
        first = self.first_child[parent]
        self.next[row], self.previous[row] = first, NONE
        if first >= 0:
            self.previous[first] = row
        self.first_child[parent] = row

    def _grow(self) -> None:
        start = len(self.hash)
        for column, empty in (
            (self.hash, 0),
            (self.parent, FREE),
            (self.first_child, NONE),
            (self.next, NONE),
            (self.previous, NONE),
            (self.index, UNPLACED),
            (self.anchor, NONE),
            (self.tail_tokens, 0),
            (self.root, NONE),
        ):
            column.extend(array(column.typecode, (empty,)) * _GROWTH_ROWS)
        for masks in (self.held, self.rooted):
            masks.extend([NOBODY] * _GROWTH_ROWS)
        self.coldest.grow(_GROWTH_ROWS)
        self.free[:0] = range(start + _GROWTH_ROWS - 1, start - 1, -1)

    def _give(self, row: int) -> None:
        self.parent[row], self.index[row], self.root[row], self.rooted[row] = FREE, UNPLACED, NONE, 0
        self.tail_tokens[row] = 0
        self.coldest.forget(row)
        self.free.append(row)

    def _unlink(self, parent: int, row: int) -> None:
        after, before = self.next[row], self.previous[row]
        if before >= 0:
            self.next[before] = after
        else:
            self.first_child[parent] = after
        if after >= 0:
            self.previous[after] = before
        self.next[row] = self.previous[row] = NONE

    def _uproot_below(self, row: int, holding: Holding) -> None:
        bit, rooted = holding.bit, self.rooted
        stack = [row]
        while stack:
            child = self.first_child[stack.pop()]
            while child >= 0:
                if rooted[child] & bit:
                    rooted[child] &= ~bit
                    holding.num_loose += 1
                    stack.append(child)
                child = self.next[child]

    def _mark(self, row: int) -> None:
        full = row
        if tail_tokens := self.tail_tokens[row]:
            full = self.parent[row]
            self.segments.add_tail(full, row, tail_tokens)
        if self.index[full] >= 0:  # a root's tails are looked for in any case
            self.segments.mark(self.anchor[full], full, self.index[full])

    def _unmark(self, row: int) -> None:
        full = row
        if self.tail_tokens[row]:
            full = self.parent[row]
            self.segments.remove_tail(full, row)
        if self.index[full] >= 0 and full not in self.states and full not in self.segments.tails:
            self.segments.unmark(self.anchor[full], full)
