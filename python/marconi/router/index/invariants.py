"""The invariants of an index as code, for property tests and for doubt."""

from marconi.router.index.blocks import FREE, ROOT, UNKNOWN, UNPLACED
from marconi.router.index.fleet_index import FleetIndex
from marconi.router.index.holding import Holding
from marconi.router.index.segments import SEGMENT_BLOCKS


def check_invariants(index: FleetIndex) -> None:
    """Raise `AssertionError`, naming the block, where `index` breaks an invariant of `blocks.py`; walks all of it."""
    blocks = index.blocks
    used = [row for row, parent in enumerate(blocks.parent) if parent != FREE]
    assert len(used) == blocks.num_rows, "rows in use are counted"
    assert index.num_blocks <= index.max_blocks
    held = dict.fromkeys(used, 0)
    states = dict.fromkeys(used, 0)
    holdings = [holding for holding in index.holdings if holding is not None]
    for holding in holdings:
        _check_holding(index, holding)
        for row in (*holding.kv.values(), *holding.old_kv.values()):
            held[row] |= holding.bit
        for row in (*holding.states.values(), *holding.old_states.values()):
            states[row] |= holding.bit
    living = sum(1 << index.holding(worker).number for worker in index.workers)
    assert living == index.live, "those that are answered for are the workers' present lives"
    children: dict[int, set[int]] = {}
    for row in used:
        children.setdefault(blocks.parent[row], set()).add(row)
    for row in used:
        _check_row(index, row, held[row], states[row], children.get(row, set()))
    _check_marks(index, used)


def _check_holding(index: FleetIndex, holding: Holding) -> None:
    blocks = index.blocks
    assert not holding.kv.items() & holding.old_kv.items()
    assert not holding.states.items() & holding.old_states.items()
    assert len(holding.kv) + len(holding.states) <= index.max_entries_per_worker
    for entries in (holding.kv, holding.old_kv, holding.states, holding.old_states):
        for block_hash, row in entries.items():
            assert blocks.hash[row] == block_hash, f"{holding.worker}: {block_hash:x} stands in another block's row"
    if index.live & holding.bit:
        rows = (*holding.kv.values(), *holding.old_kv.values())
        num_loose = sum(not blocks.rooted[row] & holding.bit for row in rows)
        assert num_loose == holding.num_loose, f"{holding.worker}: blocks without all before them"


def _check_row(index: FleetIndex, row: int, held: int, states: int, children: set[int]) -> None:
    blocks, parent, name = index.blocks, index.blocks.parent[row], f"block {index.blocks.hash[row]:x}"
    space = next((each for each in blocks.spaces.values() if each.root == blocks.root[row]), None)
    assert space is not None, f"{name}: its namespace"
    assert blocks.held[row] == held, f"{name}: its holders are those who say so"
    assert blocks.states.get(row, 0) == states, f"{name}: likewise of its state"
    linked: set[int] = set()
    child = blocks.first_child[row]
    while child >= 0:
        assert child not in linked, f"{name}: its children go in a circle"
        linked.add(child)
        child = blocks.next[child]
    assert linked == children, f"{name}: its children"
    if parent == ROOT:
        assert blocks.spaces[space.namespace].root == row
        assert space.rows, "an empty namespace is forgotten"
        return
    assert space.rows[blocks.hash[row]] == row, f"{name}: is found by its hash"
    assert held or states or children, f"{name}: nothing needs it"
    assert children or blocks.coldest.is_queued(row), f"{name}: a leaf can go"
    above = 0 if parent == UNKNOWN else blocks.rooted[parent]
    living = index.live
    assert blocks.rooted[row] & living == held & above & living, f"{name}: rooted where it and all before are held"
    if blocks.rooted[row] & living:
        assert blocks.index[row] != UNPLACED, f"{name}: placed"
    if blocks.index[row] == UNPLACED:
        return
    assert parent != UNKNOWN
    assert blocks.root[parent] == space.root
    assert blocks.index[row] == blocks.index[parent] + 1, f"{name}: its index"
    anchor = row
    for _ in range(blocks.index[row] % SEGMENT_BLOCKS + 1):
        anchor = blocks.parent[anchor]
    assert blocks.anchor[row] == anchor, f"{name}: its anchor"


def _check_marks(index: FleetIndex, used: list[int]) -> None:
    blocks = index.blocks
    tails: dict[int, dict[int, int]] = {}
    for row in used:
        if blocks.tail_tokens[row]:
            assert blocks.first_child[row] < 0, "nothing follows a partial block"
            if blocks.index[row] != UNPLACED and row in blocks.states:
                tails.setdefault(blocks.parent[row], {})[row] = blocks.tail_tokens[row]
    assert tails == blocks.segments.tails
    marked: dict[int, dict[int, int]] = {}
    for row in used:
        if blocks.index[row] >= 0 and not blocks.tail_tokens[row] and (row in blocks.states or row in tails):
            marked.setdefault(blocks.anchor[row], {})[row] = blocks.index[row]
    assert marked == blocks.segments.marked
