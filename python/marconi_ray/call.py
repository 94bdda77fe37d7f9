"""A request to a replica, and the beginning of its answer.

A `Call` is the one argument of the handle's call, so that the request router, which sees arguments and not HTTP, has
the prompt. Router and ingress share the object; a replica gets a copy, without the fields of those two.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

Headers: TypeAlias = tuple[tuple[str, str], ...]


@dataclass(slots=True, eq=False)
class Call:
    """An HTTP request for a server."""

    method: str
    path: str
    """The path with its query."""
    headers: Headers = ()
    body: bytes = field(default=b"", repr=False)
    added: dict[str, Any] = field(default_factory=dict)
    """Fields that the replica adds to the body, set by the request router."""
    tried: frozenset[str] = frozenset()
    """Replicas that have failed it: another is chosen where there is one. Not sent."""
    replica: str | None = None
    """The replica that has it, set by the request router. Not sent."""
    why: str = ""
    """The reason for that replica, set by the request router. Not sent."""
    answered: Callable[[], None] | None = field(default=None, repr=False)
    """Set by the request router, to be called when the answer begins, from any thread. Not sent."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Call, (self.method, self.path, self.headers, self.body, self.added)


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """The beginning of an answer, with its first bytes: the end of its prefill."""

    status: int
    headers: Headers
    replica: str
    first: bytes = field(repr=False)


class ServerGone(Exception):
    """A replica's server that cannot be reached, or failed before a byte of an answer."""
