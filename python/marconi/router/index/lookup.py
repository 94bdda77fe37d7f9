"""One chain, all workers, in one walk that stops early.

    KV       who has it rooted only ever loses bits along the chain, at no more places than there are workers: the last
             block of each segment tells in which, the marked blocks between which, and bisection where. A worker's KV
             mostly ends where it has a state: so the block behind a marked one is asked before the middle is.
    states   from the deepest block that anybody has rooted up, only where something is marked (`segments`): a worker
             hits at the first state that it holds where it has the KV rooted. Done when every worker has hit.

With b blocks, w workers: b / 128 anchors with what is marked on the path there, and 1 to 7 rows a worker.
"""

from collections.abc import Iterator
from operator import itemgetter

from marconi.router.index.base import Chain
from marconi.router.index.blocks import NOBODY, Blocks, Space
from marconi.router.index.segments import SEGMENT_BLOCKS

_INDEX = itemgetter(0)
_MAX_PROBES = 16
"""Of a segment; where more is marked, bisection asks less."""


def look_up(
    blocks: Blocks, space: Space, chain: Chain, live: int, block_tokens: int
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """`(blocks of KV, whose)` and `(tokens of a hit, whose)`; each worker in at most one of either."""
    kv = _kv(blocks, space, chain, live)
    deepest = max(map(_INDEX, kv), default=0)
    if deepest:
        blocks.coldest.touch(space.rows[chain.hashes[deepest - 1]])
    found: list[tuple[int, int]] = []
    remaining = live
    rooted, states = blocks.rooted, blocks.states
    if chain.tail is None and not deepest:
        return kv, found
    for depth, row in _places(blocks, space, chain, deepest, block_tokens):
        mask = states.get(row, 0) & rooted[row] & remaining
        if mask:
            found.append((depth, mask))
            blocks.coldest.touch(row)
            remaining &= ~mask
            if not remaining:
                break
    return kv, found


def _kv(blocks: Blocks, space: Space, chain: Chain, live: int) -> list[tuple[int, int]]:
    row_of, rooted, hashes = space.rows.get, blocks.rooted, chain.hashes
    found: list[tuple[int, int]] = []
    stack = list(_losses(blocks, space, chain, live))
    while stack:
        low, low_mask, high, high_mask = stack.pop()
        middle = low + 1
        while high - low > 1:
            mask = rooted[row_of(hashes[middle], NOBODY)] & low_mask
            if mask == low_mask:
                low = middle
            elif mask == high_mask:
                high = middle
            else:
                stack.append((middle, mask, high, high_mask))
                high, high_mask = middle, mask
            middle = (low + high) // 2
        if low >= 0:
            found.append((low + 1, low_mask & ~high_mask))
    return found


def _losses(blocks: Blocks, space: Space, chain: Chain, live: int) -> Iterator[tuple[int, int, int, int]]:
    """`(low, mask, high, mask)`: bits are lost between these blocks; -1 is what comes before the first."""
    row_of, rooted, hashes, hash_of = space.rows.get, blocks.rooted, chain.hashes, blocks.hash
    low, mask, anchor = -1, live, space.root
    end = len(hashes) - 1
    while mask and low < end:
        high = min(low + SEGMENT_BLOCKS, end)
        row = row_of(hashes[high], NOBODY)
        high_mask = rooted[row] & mask
        if high_mask != mask:
            marked = blocks.segments.marked.get(anchor, {})
            if len(marked) <= _MAX_PROBES:
                for index, at in sorted([(index, at) for at, index in marked.items() if index < high]):
                    if hash_of[at] == hashes[index]:
                        if (at_mask := rooted[at] & mask) != mask:
                            yield low, mask, index, at_mask
                        low, mask = index, at_mask
            if high_mask != mask:
                yield low, mask, high, high_mask
        low, mask, anchor = high, high_mask, row
    if mask and low >= 0:
        yield end, mask, end + 1, 0


def _places(
    blocks: Blocks, space: Space, chain: Chain, num_blocks: int, block_tokens: int
) -> Iterator[tuple[int, int]]:
    """`(depth, row)` of the states on the chain, deepest first, among its first blocks and the tails behind them."""
    rows, hashes, marked, tails, states = (
        space.rows,
        chain.hashes,
        blocks.segments.marked,
        blocks.segments.tails,
        blocks.states,
    )
    hash_of = blocks.hash
    for start in range((num_blocks - 1) // SEGMENT_BLOCKS * SEGMENT_BLOCKS, -1, -SEGMENT_BLOCKS):
        in_segment = marked.get(rows[hashes[start - 1]] if start else space.root)
        if in_segment is None:
            continue
        end = min(start + SEGMENT_BLOCKS, num_blocks)
        if len(in_segment) <= end - start:
            places = [
                (index, row) for row, index in in_segment.items() if index < end and hash_of[row] == hashes[index]
            ]
        else:
            places = [(index, row) for index in range(start, end) if (row := rows[hashes[index]]) in in_segment]
        places.sort(reverse=True)
        for index, row in places:
            if chain.tail is not None and row in tails:
                yield from _tails(blocks, chain, row, (index + 1) * block_tokens)
            if row in states:
                yield (index + 1) * block_tokens, row
    if chain.tail is not None and space.root in tails:
        yield from _tails(blocks, chain, space.root, 0)


def _tails(blocks: Blocks, chain: Chain, row: int, depth: int) -> Iterator[tuple[int, int]]:
    assert chain.tail is not None
    for tail, num_tokens in sorted(blocks.segments.tails[row].items(), key=itemgetter(1), reverse=True):
        if chain.tail(depth + num_tokens) == blocks.hash[tail]:
            yield depth + num_tokens, tail
