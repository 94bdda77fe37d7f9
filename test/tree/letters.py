"""Paths spelt with letters, a unit each, and a tree shown by them."""

from marconi.policy.request import pack, unpack
from marconi.tree import Node, RadixTree


def path(text: str) -> bytes:
    return pack(map(ord, text))


def text_of(node: Node) -> str:
    """The letters from the root to the end of a node."""
    keys = []
    while node.parent is not None:
        keys.append(node.key)
        node = node.parent
    return "".join(map(chr, unpack(b"".join(reversed(keys)))))


def insert(tree: RadixTree, text: str, *depths: int, namespace: int = 0) -> list[Node]:
    """A state at each of `depths`, by default at the end of `text`."""
    return tree.insert(path(text), depths or (len(text) * tree.unit_tokens,), namespace)


def at(tree: RadixTree, text: str, namespace: int = 0) -> Node:
    """The node at the end of `text`, live or ghost."""
    for node in tree.root(namespace).walk():
        if text_of(node) == text:
            return node
    raise LookupError(f"no node at {text!r}")


def outline(tree: RadixTree, namespace: int = 0) -> dict[str, str]:
    """What stands at the end of every node: 'state', 'branch' (live, without one) or 'ghost'."""
    return {
        text_of(node): ("state" if node.has_state else "branch") if node.is_live else "ghost"
        for node in tree.root(namespace).walk()
        if node.parent is not None
    }
