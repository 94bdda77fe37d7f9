"""Writing down that a worker holds consecutive blocks: the one loop that has to be fast.

It does by itself what `Blocks.add` and `Blocks.place` do for a block that nobody knows yet, the usual one, and spares
their calls. Of several that nobody knows, each column is written at once, if the rows that are free next are
consecutive: they are when they were never used, and when what used them went from its end. A block stops the loop that
cannot be where it is said to be, or for which the worker has no room: what follows would not be reached.
"""

from array import array
from typing import NamedTuple

from marconi.router.index.blocks import UNKNOWN, UNPLACED, Blocks, Space
from marconi.router.index.holding import Holding
from marconi.router.index.segments import SEGMENT_BLOCKS

_MIN_RUN = 4
"""Blocks from which on a slice of each column is cheaper than an item of each for every block."""


class Stored(NamedTuple):
    """How far it went."""

    last: int
    """The row of the last block that was stored; the parent's if none was."""
    num_conflicting: int
    num_over_limit: int


def store(
    blocks: Blocks,
    holding: Holding,
    space: Space,
    parent: int,
    hashes: tuple[int, ...],
    tail_tokens: int,
    room: int,
) -> Stored:
    """The holding holds these blocks, the first of them right behind the row `parent`; `room` entries at most."""
    if blocks.tail_tokens[parent]:
        return Stored(parent, len(hashes), 0)
    if len(hashes) >= _MIN_RUN and room >= len(hashes):
        last = _store_run(blocks, holding, space, parent, hashes)
        if last is not None:
            return Stored(last, 0, 0)
    bit, kv, old_kv, rows = holding.bit, holding.kv, holding.old_kv, space.rows
    root = space.root
    held, rooted, parent_of, first_child = blocks.held, blocks.rooted, blocks.parent, blocks.first_child
    index_of, anchor_of, hash_of, root_of, free = blocks.index, blocks.anchor, blocks.hash, blocks.root, blocks.free
    num_done = 0
    for block_hash in hashes:
        row = rows.get(block_hash)
        if row is None:
            if room < 1 or block_hash in kv:
                break
            room -= 1
            row = free.pop() if free else blocks.take()
            rows[block_hash] = kv[block_hash] = row
            hash_of[row] = block_hash
            root_of[row] = root
            held[row] = bit
            parent_of[row] = parent
            if (first := first_child[parent]) >= 0:
                blocks.next[row] = first
                blocks.previous[first] = row
            first_child[parent] = row
            if rooted[parent] & bit:
                rooted[row] = bit
                index = index_of[row] = index_of[parent] + 1
                anchor_of[row] = anchor_of[parent] if index % SEGMENT_BLOCKS else parent
            else:
                holding.num_loose += 1
            if tail_tokens:
                blocks.tail_tokens[row] = tail_tokens
        elif (tail_tokens or parent_of[row] != parent) and not _fits(blocks, row, parent, tail_tokens):
            break
        elif held[row] & bit:
            if old_kv and old_kv.get(block_hash) == row:
                if room < 1:
                    break
                room -= 1
                kv[block_hash] = old_kv.pop(block_hash)
        elif room < 1 or block_hash in kv:
            break
        else:
            room -= 1
            kv[block_hash] = row
            held[row] |= bit
            if not rooted[parent] & bit:
                holding.num_loose += 1
            elif holding.num_loose and first_child[row] >= 0:
                holding.num_loose += 1
                blocks.root_below(row, holding)
            else:
                rooted[row] |= bit
                if index_of[row] == UNPLACED:
                    blocks.place(row)
        num_done += 1
        parent = row
    num_left = len(hashes) - num_done
    return Stored(parent, num_left if room > 0 else 0, 0 if room > 0 else num_left)


def _store_run(blocks: Blocks, holding: Holding, space: Space, parent: int, hashes: tuple[int, ...]) -> int | None:
    """Full blocks that are new to everybody, in consecutive rows; the last row, None if they or the rows are not so."""
    rows, kv, num_new = space.rows, holding.kv, len(hashes)
    if not rows.keys().isdisjoint(hashes) or len(set(hashes)) < num_new:
        return None
    if len(blocks.spaces) > 1 and not kv.keys().isdisjoint(hashes):  # what only another namespace knows
        return None
    run = blocks.take_run(num_new)
    if run is None:
        return None
    first, end = run[0], run[-1] + 1
    rows.update(zip(hashes, run, strict=True))
    kv.update(zip(hashes, run, strict=True))
    blocks.hash[first:end] = array("Q", hashes)
    blocks.root[first:end] = array("i", [space.root]) * num_new
    blocks.held[first:end] = [holding.bit] * num_new
    numbers = array("i", run)
    blocks.parent[first + 1 : end] = numbers[:-1]
    blocks.first_child[first : end - 1] = numbers[1:]
    blocks.parent[first] = parent
    blocks.link(parent, first)
    if not blocks.rooted[parent] & holding.bit:
        holding.num_loose += num_new
        return end - 1
    blocks.rooted[first:end] = [holding.bit] * num_new
    index, anchor = blocks.index[parent] + 1, blocks.anchor[parent]
    blocks.index[first:end] = array("i", range(index, index + num_new))
    while first < end:
        if index % SEGMENT_BLOCKS == 0:
            anchor = parent
        num_here = min(end - first, SEGMENT_BLOCKS - index % SEGMENT_BLOCKS)
        blocks.anchor[first : first + num_here] = array("i", [anchor]) * num_here
        first, index = first + num_here, index + num_here
        parent = first - 1
    return end - 1


def _fits(blocks: Blocks, row: int, parent: int, tail_tokens: int) -> bool:
    """Whether a known row can stand behind `parent`; learns that it does, if that was not known."""
    if blocks.parent[row] != UNKNOWN:
        return blocks.parent[row] == parent and blocks.tail_tokens[row] == tail_tokens
    if tail_tokens and blocks.first_child[row] >= 0:
        return False
    if not blocks.adopt(parent, row):
        return False
    blocks.tail_tokens[row] = tail_tokens
    return True
