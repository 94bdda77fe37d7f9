"""A store's contents as one server knows them, logged beside those of its device: what it has written and read.

    stored    a state, and the KV of its path, is in the store: a tree of its own, whose nodes have negative serials in
              the same log, and whose blocks have the store's namespace
    found     the store was asked for a prompt: what it has no longer is dropped
    bounded   beyond `max_tokens` the state that was stored the longest ago is dropped, here and from the events alone

Whoever reads the events of all servers of a store knows what most of them find there: it is a hint, as the store
deletes without a word, and a prompt that finds less is computed.

Owner: the thread of the cache, whose log it is.
"""

from collections import OrderedDict
from typing import Final

from marconi.events.tree_log import Change, ChangeLog, Tenant, TreeLog
from marconi.tree import Node, RadixTree

MAX_TOKENS: Final = 1 << 22
"""8 bytes each."""
_IDS_PER_TOKEN: Final = 2
"""A token is packed into 8 bytes, and an id of a tree's path has 4."""


class StoreLog(ChangeLog):
    """The contents of `store`, told to `log` as they change."""

    sign = -1

    def __init__(self, log: TreeLog, store: int, max_tokens: int = MAX_TOKENS) -> None:
        """Nothing is stored yet, in a log that holds nothing of a store either."""
        self._log = log
        self.tenant = Tenant()
        self._store = store
        self._max_tokens = max_tokens
        self._tree = RadixTree(ids_per_unit=_IDS_PER_TOKEN, memory=self)
        self._stored = OrderedDict[Node, None]()
        """States, the one that was stored the longest ago first."""

    def stored(self, path: bytes, namespace: int, tenant: Tenant) -> None:
        """Log that the store has the state at the end of `path`, and its KV."""
        tree, depth = self._tree, len(path) // self._tree.unit_bytes
        if depth > self._max_tokens:
            return
        self.tenant = tenant._replace(store=self._store)
        (node,) = tree.insert(path, [depth], namespace)
        if node not in self._stored:
            self.kept_state(node)
        self._stored[node] = None
        self._stored.move_to_end(node)
        while tree.num_tokens > self._max_tokens:
            self._drop(next(iter(self._stored)))
        tree.take_changed()

    def found(self, path: bytes, depth: int, namespace: int) -> None:
        """Log that of the states on `path` none is there beyond `depth` tokens."""
        tree = self._tree
        while (node := tree.match(path, len(path) // tree.unit_bytes, namespace).checkpoint).depth > depth:
            self._drop(node)
        tree.take_changed()

    def forget(self) -> None:
        """Log that nothing is there: the store was emptied, or is left."""
        while self._stored:
            self._drop(next(iter(self._stored)))
        self._tree.take_changed()

    def check_invariants(self) -> None:
        """Raise `AssertionError` unless what is logged is the tree's, and bounded."""
        nodes = {node for node in self._tree.nodes() if node.has_state}
        assert nodes == set(self._stored), "a state that is stored and not known, or the other way round"
        assert self._tree.num_tokens <= self._max_tokens

    def log(self, change: Change) -> None:
        """Log a change for the reader of the device's log alone."""
        self._log.own(change)

    def _drop(self, node: Node) -> None:
        del self._stored[node]
        self._tree.evict(node)
