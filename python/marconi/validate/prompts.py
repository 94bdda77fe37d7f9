"""A trace's requests as prompts of token ids that a model knows: what is equal in the trace is equal in them.

Ids that the model knows are sent as they are. Where a trace has others, or names blocks, a token is drawn by the hash
of its id, or of its block's and its position there; what the trace does not name is drawn for the request alone.

What a server answers is its own. Where a later prompt of a session contains the trace's answer, the server's stands in
its place, as far as there is one: so a conversation continues what was said.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from marconi.policy.request import Request, Trace

_MIX = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9)
_UNNAMED = 1 << 48
"""Where names begin of tokens that the trace does not name, beyond those of all blocks."""
_UNNAMED_PER_REQUEST = 1 << 25


class Prompts:
    """The prompts of one trace, in order."""

    def __init__(self, trace: Trace, vocab_size: int) -> None:
        """`vocab_size` is how many tokens the model knows; `ValueError` for too few to draw from."""
        # Neither end of a vocabulary: special tokens are there.
        self._low, self._high = vocab_size // 16, vocab_size * 3 // 4
        if self._high - self._low < 2:
            raise ValueError(f"the vocabulary must have at least 3 tokens, got {vocab_size}")
        self._trace = trace
        largest = max((int(_ids(request).max(initial=0)) for request in trace.requests), default=0)
        self._are_tokens = trace.unit_tokens == 1 and largest < vocab_size
        self._answers: dict[int, list[tuple[int, list[int], list[int]]]] = {}

    def __len__(self) -> int:
        return len(self._trace.requests)

    def of(self, index: int) -> list[int]:
        """The token ids of a request's prompt, with the server's answers of its session so far."""
        request = self._trace.requests[index]
        ids: list[int] = self._tokens(index)[: request.num_prompt_tokens].tolist()
        for start, named, answered in self._answers.get(request.session, ()):
            if ids[start : start + len(named)] == named:
                ids[start : start + len(named)] = answered
        return ids

    def answered(self, index: int, output: Sequence[int]) -> None:
        """The server has answered a request with these ids."""
        request, start = self._trace.requests[index], self._trace.requests[index].num_prompt_tokens
        if request.session < 0 or self._trace.unit_tokens > 1 or request.num_known_tokens <= start:
            return
        named = self._tokens(index)[start : start + len(output)].tolist()
        answered = list(output[: len(named)])
        self._answers.setdefault(request.session, []).append((start, named, answered))

    def _tokens(self, index: int) -> NDArray[np.int64]:
        """Tokens of all that the trace names of a request, and of its prompt at least."""
        request, unit = self._trace.requests[index], self._trace.unit_tokens
        ids = _ids(request)
        if self._are_tokens:
            return ids.astype(np.int64)
        names = (ids.astype(np.uint64)[:, None] * np.uint64(unit) + np.arange(unit, dtype=np.uint64)).ravel()
        num_unnamed = max(request.num_prompt_tokens - len(names), 0)
        first = _UNNAMED + index * _UNNAMED_PER_REQUEST
        names = np.concatenate([names, np.arange(first, first + num_unnamed, dtype=np.uint64)])
        return (self._low + _hashed(names) % np.uint64(self._high - self._low)).astype(np.int64)


def _ids(request: Request) -> NDArray[np.uint32]:
    return np.frombuffer(request.path, dtype="<u4")


def _hashed(names: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Hashes of 33 bits."""
    with np.errstate(over="ignore"):
        for factor in _MIX:
            names = (names ^ (names >> np.uint64(31))) * np.uint64(factor)
    return names >> np.uint64(31)
