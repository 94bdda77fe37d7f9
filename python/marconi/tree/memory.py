"""The interface by which a tree tells the pools of a server of the memory that its nodes hold."""

from typing import Protocol

from marconi.tree.node import Node


class Memory(Protocol):
    """Where KV and states lie: called whenever what live nodes hold changes, after their keys and depths did.

    Who inserts gives the memory new states; the tree says only which it no longer holds.
    """

    def held(self, node: Node) -> None:
        """`node` has come to life: the KV of its span is held from now on."""
        ...

    def dropped(self, node: Node) -> None:
        """The KV of the span of `node` is no longer held."""
        ...

    def dropped_state(self, node: Node) -> None:
        """The state of `node` is no longer held."""
        ...

    def split(self, upper: Node, lower: Node) -> None:
        """The span that was `lower`'s is now `upper`'s, followed by `lower`'s."""
        ...

    def joined(self, upper: Node, lower: Node) -> None:
        """The span of `lower` now begins with what was `upper`'s, which exists no longer."""
        ...
