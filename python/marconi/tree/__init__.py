"""The radix tree: which prefixes are held, and at which positions a state stands."""

from marconi.tree.invariants import check_invariants
from marconi.tree.node import Absence, HostCopy, Kept, LeftBy, Node
from marconi.tree.radix import Freed, Match, RadixTree

__all__ = [
    "Absence",
    "Freed",
    "HostCopy",
    "Kept",
    "LeftBy",
    "Match",
    "Node",
    "RadixTree",
    "check_invariants",
]
