"""A window: the tree as it stood, and the requests that were served from then on, packed for another process.

Paths are one string and every other fact of a request a column, so that sending a window is copying bytes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from marconi.policy.request import Request
from marconi.tree.snapshot import TreeSnapshot

_COUNTS = (
    "num_prompt_tokens",
    "num_output_tokens",
    "num_known_tokens",
    "session",
    "turn",
    "namespace",
)


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """The requests of one window. Made by `pack_window`; can be pickled."""

    snapshot: TreeSnapshot
    """The tree before the first request."""
    paths: bytes
    path_ends: NDArray[np.int64]
    counts: NDArray[np.int64]
    """A row a request: prompt, output and known tokens, session, turn, namespace."""
    arrivals_s: NDArray[np.float64]
    """Rising."""

    def __len__(self) -> int:
        return len(self.arrivals_s)

    @property
    def num_bytes(self) -> int:
        """Bytes that are sent."""
        return self.snapshot.num_bytes + len(self.paths) + self.counts.nbytes + 2 * self.arrivals_s.nbytes

    def requests(self) -> Iterator[Request]:
        """The requests, in order of arrival."""
        start = 0
        ends: list[int] = self.path_ends.tolist()
        rows = zip(ends, self.counts.tolist(), self.arrivals_s.tolist(), strict=True)
        for end, (num_prompt, num_output, num_known, session, turn, namespace), arrival_s in rows:
            path = self.paths[start:end]
            start = end
            yield Request(path, num_prompt, num_output, num_known, arrival_s, session, turn, namespace)


def pack_window(snapshot: TreeSnapshot, requests: Sequence[Request]) -> Window:
    """A window of `requests`, brought into order of arrival (a server observes them as they finish)."""
    ordered = sorted(requests, key=lambda request: request.arrival_s)
    return Window(
        snapshot=snapshot.without_locks(),
        paths=b"".join([request.path for request in ordered]),
        path_ends=np.cumsum([len(request.path) for request in ordered], dtype=np.int64),
        counts=np.array([[getattr(request, name) for name in _COUNTS] for request in ordered], dtype=np.int64).reshape(
            -1, len(_COUNTS)
        ),
        arrivals_s=np.array([request.arrival_s for request in ordered], dtype=np.float64),
    )
