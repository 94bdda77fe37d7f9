"""The token ids of a trace's requests.

A token trace names them. A block trace names blocks, so token `k` of block `b` is `b * unit + k`: prefixes are shared
just as far as blocks are. What a trace does not know, an answer mostly, is made of ids that occur nowhere else.
"""

from array import array

import numpy as np

from marconi.policy.request import Request

_FIRST_UNKNOWN = 1 << 60
"""Beyond every id that four bytes of a block id and an offset can make."""


class Tokens:
    """Spells requests out, in order."""

    def __init__(self, unit_tokens: int) -> None:
        """`unit_tokens` is the trace's."""
        self._unit = unit_tokens
        self._next_unknown = _FIRST_UNKNOWN

    def of(self, request: Request) -> "tuple[array[int], array[int]]":
        """The prompt and the answer, at least one token; a later call makes other unknown ids."""
        num_prompt = request.num_prompt_tokens
        num_tokens = request.num_processed_tokens + 1
        ids = np.frombuffer(request.path, dtype="<u4").astype(np.int64)
        if self._unit > 1:
            ids = (ids[:, None] * self._unit + np.arange(self._unit)).reshape(-1)
        known = ids[: min(max(num_prompt, request.num_known_tokens), num_tokens)]
        num_unknown = num_tokens - len(known)
        unknown = np.arange(self._next_unknown, self._next_unknown + num_unknown)
        self._next_unknown += num_unknown
        whole = array("q", np.concatenate([known, unknown]).tobytes())
        return whole[:num_prompt], whole[num_prompt:]
