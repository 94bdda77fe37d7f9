"""The invariants of a tree as code, for property tests and for doubt."""

from marconi.tree.host import HostCopies
from marconi.tree.node import Node
from marconi.tree.radix import RadixTree


def check_invariants(tree: RadixTree) -> None:
    """Raise `AssertionError`, naming the node, where `tree` breaks an invariant of `radix.py`; walks all of it."""
    num_tokens = num_states = num_nodes = 0
    ghosts: set[Node] = set()
    locked: set[Node] = set()
    for root in tree.roots.values():
        assert root.parent is None
        assert root.is_live
        assert not root.has_state
        for node in root.walk():
            _check_children(node)
            if node.num_locks:
                locked.add(node)
            if node.parent is None:
                continue
            _check_span(tree, node)
            _check_absences(node)
            if node.is_live:
                _check_live(node)
                num_nodes += 1
                num_tokens += node.depth - node.parent.depth
                num_states += node.has_state
            else:
                assert not node.has_state, f"{node}: a ghost holds no state"
                assert not node.num_locks, f"{node}: a ghost is not locked"
                if not node.is_hosted:
                    ghosts.add(node)
            _check_hosted(node)
    assert (num_tokens, num_states, num_nodes) == (tree.num_tokens, tree.num_states, tree.num_nodes)
    assert locked == tree.locked, "the locked nodes are those that have locks"
    assert ghosts == set(tree.ghosts), "every ghost stands in the queue, once"
    assert len(ghosts) <= tree.max_ghosts
    assert tree.num_ghost_tokens == sum(
        ghost.depth - ghost.parent.depth for ghost in ghosts if ghost.parent is not None
    )
    assert tree.max_ghost_tokens is None or tree.num_ghost_tokens <= tree.max_ghost_tokens
    age = {ghost: index for index, ghost in enumerate(tree.ghosts)}
    for ghost in ghosts:
        for child in ghost.children.values():
            assert age[child] < age[ghost], f"{child} is younger than the ghost above it"


def _check_children(node: Node) -> None:
    live = {child for child in node.children.values() if child.is_live}
    assert node.live_children.keys() == live, f"{node}: live children"
    assert not node.is_live or node.num_children == len(live), f"{node}: number of live children"
    for first_unit, child in node.children.items():
        assert child.parent is node, f"{child}: its parent does not know it"
        assert child.key.startswith(first_unit), f"{child}: held under another unit"


def _check_span(tree: RadixTree, node: Node) -> None:
    assert node.parent is not None
    assert node.key, f"{node}: an empty span"
    assert len(node.key) % tree.unit_bytes == 0, f"{node}: a part of a unit"
    span_tokens = len(node.key) // tree.unit_bytes * tree.unit_tokens
    assert node.depth == node.parent.depth + span_tokens, f"{node}: depth and span disagree"


def _check_absences(node: Node) -> None:
    assert node.parent is not None
    depths = [absence.depth for absence in node.absences or ()]
    assert depths == sorted(set(depths)), f"{node}: absences at {depths}"
    last = node.depth - node.has_state
    assert all(node.parent.depth < depth <= last for depth in depths), f"{node}: absences at {depths}"


def _check_live(node: Node) -> None:
    assert node.parent is not None
    assert node.parent.is_live, f"{node}: lives below a ghost"
    assert not node.num_locks or node.has_state, f"{node}: locked without a state"
    if node.has_state:
        above = node.state_above
        assert node.checkpoint_depth_above == (0 if above is None else above.depth), f"{node}: depth of the state above"
        assert node.freed_tokens == node.count_freed_tokens(), f"{node}: tokens that its eviction frees"
        return
    assert node.num_children, f"{node}: dead KV"
    (first, *others) = node.children.values()
    is_merged = not others and not node.has_copy and node.is_hosted is first.is_hosted
    assert not is_merged, f"{node}: not merged into its only child"


def _check_hosted(node: Node) -> None:
    assert node.parent is not None
    hosted = {child for child in node.children.values() if child.is_hosted}
    assert set(node.hosted_children or ()) == hosted, f"{node}: hosted children"
    assert not node.has_copy or node.host_copy is not None, f"{node}: a copy that is no object"
    if node.is_hosted:
        assert node.parent.is_hosted or node.parent.parent is None, f"{node}: hosted below one that is not"
        assert node.has_copy or hosted, f"{node}: dead KV on the host"
    else:
        assert not node.has_copy, f"{node}: a copy of a state without its KV"
        assert not hosted


def check_host(tree: RadixTree, host: HostCopies) -> None:
    """Raise `AssertionError` unless `host` counts what it holds of `tree`; walks all of it."""
    nodes = [node for root in tree.roots.values() for node in root.walk() if node.parent is not None and node.is_hosted]
    num_tokens = sum(node.depth - node.parent.depth for node in nodes if node.parent is not None)
    assert (num_tokens, sum(node.has_copy for node in nodes)) == (host.num_tokens, host.num_states)
