"""What could come from a cache: for each request, the longest prefix that anything before it has computed.

    could_be(r) = max over earlier requests e of the same name space:
                      min(common prefix of r's prompt and e's processed tokens, len(r's prompt) - 1)

What is assumed:

- Memory without end, and a state wherever one will be wanted. The oracle knows the future: that two prompts part at a
  token counts from the first of the two on, though nobody can know it before the second has come.
- Processed tokens are the prompt and the answer without its last token, which is sampled and never computed on.
- Requests are in order of arrival. Of those that arrive at once, each may wait for those named before it.
- The last token of a prompt is computed in any case, for its logits.

So 100 % of it can be out of reach for any cache that only sees what has come; no cache can have more. What can be
*known* is less: the deepest place in that prefix where an earlier request ended (its prompt, all but the last token of
its prompt, or what it processed) or had left what came before it. A cache has more than that where it keeps states
elsewhere and is lucky, on a grid for instance, or guesses right.
"""

import sys
from array import array
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Ids = Sequence[int]


@dataclass(frozen=True, slots=True)
class Served:
    """A request and its answer, as token ids."""

    prompt: Ids
    output: Ids
    namespace: str = ""

    @property
    def processed(self) -> Ids:
        """What a state can stand for: all but the last token of the answer."""
        return [*self.prompt, *self.output[:-1]]


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that was answered."""

    served: Served
    num_cached_tokens: int
    ttft_s: float
    is_counted: bool = True
    """False for what SGLang asks of itself and says nothing of."""
    explained: Mapping[str, Any] | None = None
    """Its `marconi_explain`; None where it did not ask."""


def could_be(requests: Sequence[Served]) -> list[int]:
    """The tokens of each prompt, in order, that a cache without limits would have."""
    before: dict[str, list[bytes]] = defaultdict(list)
    found = []
    for request in requests:
        known = before[request.namespace]
        prompt = _packed(request.prompt)
        # In lexicographic order the longest common prefix is a neighbour's.
        place = bisect_left(known, prompt)
        shared = max((_num_shared(prompt, each) for each in known[max(place - 1, 0) : place + 1]), default=0)
        found.append(min(shared, len(request.prompt) - 1))
        insort(known, _packed(request.processed))
    return found


def knowable(requests: Sequence[Served]) -> list[int]:
    """Of the same, those that a cache would have whose states stand where something has ended or parted."""
    before: dict[str, list[tuple[bytes, tuple[int, ...]]]] = defaultdict(list)
    found = []
    for request, parted in zip(requests, could_be(requests), strict=True):
        known, prompt, num_tokens = before[request.namespace], _packed(request.prompt), len(request.prompt)
        best = 0
        for earlier, places in known:
            # Most differ in their first token, and few can be of use: it is not worth counting what they share.
            better = [place for place in places if place > best and place < num_tokens]
            if better and earlier[: _ID_BYTES * min(better)] == prompt[: _ID_BYTES * min(better)]:
                shared = _num_shared(prompt, earlier)
                best = max(place for place in better if place <= shared)
        found.append(best)
        places = (parted, num_tokens - 1, num_tokens, len(request.processed))
        known.append((_packed(request.processed), tuple(sorted(set(places)))))
    return found


def _packed(ids: Ids) -> bytes:
    """Ids in four bytes each, the high one first: bytes are ordered as ids are."""
    packed = array("I", ids)
    if sys.byteorder == "little":
        packed.byteswap()
    return packed.tobytes()


def _num_shared(left: bytes, right: bytes) -> int:
    """Ids that both begin with."""
    low, high = 0, min(len(left), len(right)) // _ID_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        if left[: _ID_BYTES * middle] == right[: _ID_BYTES * middle]:
            low = middle
        else:
            high = middle - 1
    return low


_ID_BYTES = array("I").itemsize
