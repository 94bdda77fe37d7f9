"""Sessions of SGLang (`--enable-session-radix-cache`) as our cache keeps them (`policy/sessions.py`).

    a request with `session_id` or `session_params`    SGLang asks for the session's number and writes it on the request
    the request's end                                  the cache notes its states itself (`radix_cache.py`)
    `/close_session`, a session's timeout              SGLang releases the session: its own states are demoted

SGLang's own cache first evicts states that no open session refers to. Here an open session protects nothing: a client
could otherwise keep its states at the cost of others, in other name spaces too. Source:
`srt/mem_cache/unified_cache/session_ref_tracker.py`.
"""

from typing import TYPE_CHECKING, Any

from marconi.policy.sessions import Sessions
from marconi.tree import Node

if TYPE_CHECKING:
    from marconi.engine.cache.tree_core import MarconiTreeCore


class SessionStates:
    """In place of SGLang's `UnifiedSessionRefTracker`, whose references are counts on nodes."""

    def __init__(self, core: "MarconiTreeCore") -> None:
        self._core = core
        self._sessions = core.hybrid.sessions = Sessions()

    def reset(self) -> None:
        """Do nothing at a flush: the new tree has taken the sessions over."""

    def open_radix_session(self, session_id: str) -> int:
        """The number of the open session of that name, which may be new."""
        return self._sessions.opened(session_id)

    def ensure_session_generation(self, session_id: str) -> int:
        """The number of the session that a new request names."""
        return self._sessions.opened(session_id)

    def release_radix_session(self, session_id: str) -> int:
        """The session is closed; returns how many states are demoted."""
        return sum(map(self._core.hybrid.demote, self._sessions.closed(session_id)))

    def register_session_ref(self, req: Any, leaf: Any) -> None:
        """Do nothing where SGLang keeps the last state: `ended` notes every request at its end."""

    def ended(self, end: Node, resumed_depth: int, number: int | None) -> None:
        """A request of a session, or of none, has left its states up to `end`: of a closed one they are demoted.

        `resumed_depth` is the depth of the state that it resumed from, in tokens.
        """
        for node in self._sessions.ended(end, resumed_depth, number):
            self._core.hybrid.demote(node)
