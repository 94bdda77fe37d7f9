"""Sessions that clients name and close: the states of a closed one are evicted before others of its name space.

    a request ends    the states that it was the first to leave are its session's own; those of others on its path
                      are shared from now on; if its session is closed already, its own on the path are demoted
    closed            its own states are demoted, the deepest first                                  (`retention.py`)

A state is not demoted while a running request uses it, or while a state below it is in use or not the session's own. An
open session costs nobody anything: its states are ranked as all others. A name that comes again after it was closed is
another session.

Of the open sessions, `MAX_OPEN` are known: those that sent a request last. A forgotten session is a closed one of which
nothing was demoted.
"""

from collections.abc import Iterable, Set
from typing import Final

from marconi.tree import Node

MAX_OPEN: Final = 8192


class Sessions:
    """The sessions of all name spaces. Each has a number, which no other ever has."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        """The open ones by name; the one that has been silent longest is first."""
        self._own: dict[int, dict[Node, None]] = {}
        """States of each open one."""
        self._session_of: dict[Node, int | None] = {}
        """Whose own each state is on the paths of requests that have ended; None if it is shared or nobody's."""
        self._num_opened = 0

    def opened(self, name: str) -> int:
        """Return the number of the open session of that name; a request names it, or a client opens it."""
        number = self._numbers.pop(name, None)
        if number is None:
            self._num_opened += 1
            number = self._num_opened
            self._own[number] = {}
            if len(self._numbers) >= MAX_OPEN:
                del self._own[self._numbers.pop(next(iter(self._numbers)))]
        self._numbers[name] = number
        return number

    def closed(self, name: str) -> list[Node]:
        """Close the session of that name; returns the states to demote, in that order, none if none is open."""
        number = self._numbers.pop(name, None)
        return [] if number is None else self._last_of(number, self._own.pop(number))

    def ended(self, end: Node, resumed_depth: int, number: int | None) -> list[Node]:
        """Note the path of a request, of a session or of none, that resumed at `resumed_depth` tokens and left `end`.

        Returns the states to demote, in that order: none unless its session is closed already.
        """
        own, node = dict[Node, None](), end
        while node.parent is not None:
            if node.has_state:
                if node not in self._session_of:
                    self._session_of[node] = number if node.depth > resumed_depth else None
                elif self._session_of[node] != number:
                    self.gone(node)
                    self._session_of[node] = None
                if self._session_of[node] is not None:
                    own[node] = None
            node = node.parent
        if number is None:
            return []
        if number not in self._own:
            return self._last_of(number, own, end)
        self._own[number].update(own)
        return []

    def gone(self, node: Node) -> None:
        """The state of `node` is held no longer."""
        number = self._session_of.pop(node, None)
        if number in self._own:
            self._own[number].pop(node, None)

    def flushed(self) -> None:
        """Nothing is held any longer; sessions stay open."""
        self._session_of.clear()
        for own in self._own.values():
            own.clear()

    def check_invariants(self, held: Set[Node]) -> None:
        """Raise `AssertionError` unless all states of sessions are `held`, and each is in one session at most."""
        of = self._session_of
        assert of.keys() <= held, f"{of.keys() - held}: a session outlives its state"
        assert self._own.keys() == set(self._numbers.values())
        for number, own in self._own.items():
            assert own.keys() == {node for node, each in of.items() if each == number}

    def _last_of(self, number: int, nodes: Iterable[Node], end: Node | None = None) -> list[Node]:
        """Those of `nodes` at and below which every state is the session's own and not in use, the deepest first.

        `end` is in use by the request that ends.
        """

        def is_free(node: Node) -> bool:
            return self._session_of.get(node) == number and node.num_locks <= (node is end)

        found = dict[Node, None]()
        for node in sorted(nodes, key=lambda node: -node.depth):
            # What was found lies deeper, and is not walked again.
            below = [node]
            while below and (is_free(below[-1]) or not below[-1].has_state):
                below += [child for child in below.pop().live_children if child not in found]
            if not below:
                found[node] = None
        return [*found]
