"""Sessions that clients name and close: what is left of a closed one is evicted first of its name space.

    a request ends    the states that it was the first to leave are its session's own; those of others on its path
                      are shared from now on
    closed            its own states are demoted, the deepest first                                  (`retention.py`)
    a request ends    of a closed session: what it leaves is demoted at once

A state is not demoted while a state below it is not the session's own. An open session costs nobody anything: its
states are ranked as all others. A name that comes again after it was closed is another session.

Of the open sessions, `MAX_OPEN` are known: those that sent a request last. A forgotten session is a closed one of which
nothing was demoted.
"""

from collections.abc import Iterable
from typing import Final

from marconi.policy.retention import held_below
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
        """A request comes, or a client opens the session: the number of the open session of that name."""
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
        """The states that are to be demoted, in that order, as the session of that name ends; none if none is open."""
        number = self._numbers.pop(name, None)
        return [] if number is None else self._last_of(number, self._own.pop(number))

    def ended(self, end: Node, resumed_depth: int, number: int | None) -> list[Node]:
        """A request of a session, or of none, has run up to `end`, from a state at `resumed_depth` tokens.

        Returns the states that are to be demoted, in that order, because the session is closed already.
        """
        left, node = [], end
        while node.parent is not None:
            if node.has_state:
                if node not in self._session_of:
                    is_left = node.depth > resumed_depth
                    self._session_of[node] = number if is_left else None
                    if is_left:
                        left.append(node)
                elif self._session_of[node] != number:
                    self.gone(node)
                    self._session_of[node] = None
            node = node.parent
        if number is None:
            return []
        own = self._own.get(number)
        if own is None:
            return self._last_of(number, left)
        own.update(dict.fromkeys(left))
        return []

    def gone(self, node: Node) -> None:
        """The state of `node` is held no longer."""
        number = self._session_of.pop(node, None)
        if number in self._own:
            self._own[number].pop(node, None)

    def flushed(self) -> None:
        """Nothing is held any longer; sessions go on."""
        self._session_of.clear()
        for own in self._own.values():
            own.clear()

    def _last_of(self, number: int, nodes: Iterable[Node]) -> list[Node]:
        """Those of `nodes` below which every state is the session's own, the deepest first."""
        of = self._session_of
        return sorted(
            (node for node in nodes if all(of.get(each) == number for each in held_below(node) if each.has_state)),
            key=lambda node: -node.depth,
        )
