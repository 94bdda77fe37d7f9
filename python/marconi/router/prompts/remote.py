"""A worker's own tokenizer, for prompts whose ids are not known here.

    question --as JSON--> cached?  --no--> POST /v1/tokenize of a worker --> ids
                             |                                           --> None: late, refused, lost
                             yes --> ids

Its cost is bounded: `MAX_AT_ONCE` questions wait at a time, each `TIMEOUT_S`, none longer than `MAX_BYTES`, and
`MAX_CACHED_IDS` are kept, those of the latest questions. Without ids a request is routed by load.

Owner: the event loop. Long JSON is read and written by `run`.
"""

import asyncio
import json
from array import array
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from hashlib import blake2b
from typing import Any, Final, Protocol, TypeVar

MAX_AT_ONCE: Final = 32
TIMEOUT_S: Final = 2.0
MAX_BYTES: Final = 4 << 20
MAX_CACHED_IDS: Final = 4 << 20

T = TypeVar("T")


class Run(Protocol):
    """Calls a function that works on `num_bytes`, without blocking the event loop for long."""

    async def __call__(self, num_bytes: int, function: Callable[..., T], *arguments: Any) -> T:
        """Return the function's result."""


class RemoteTokenizer:
    """Gets token ids from a worker."""

    def __init__(self, post: Callable[[bytes], Awaitable[bytes | None]], run: Run) -> None:
        """`post` sends a body to a worker's `/v1/tokenize`; None where there is no answer."""
        self.num_asked = 0
        self.num_failed = 0
        self._post = post
        self._run = run
        self._num_waiting = 0
        self._cached: OrderedDict[bytes, array[int]] = OrderedDict()
        self._num_cached_ids = 0

    async def ids(self, question: Mapping[str, Any], num_bytes: int) -> "array[int] | None":
        """The ids for a question of about `num_bytes`; None where no worker answers in time."""
        if num_bytes > MAX_BYTES:
            return None
        body, key = await self._run(num_bytes, _packed, question)
        if body is None:
            return None
        if (cached := self._cached.get(key)) is not None:
            self._cached.move_to_end(key)
            return cached
        ids = await self._request(body)
        if ids is not None:
            self._remember(key, ids)
        return ids

    def forget(self) -> None:
        """Empty the cache: a worker joined that may tokenize otherwise."""
        self._cached.clear()
        self._num_cached_ids = 0

    async def _request(self, body: bytes) -> "array[int] | None":
        self.num_asked += 1
        ids: array[int] | None = None
        if self._num_waiting < MAX_AT_ONCE:
            self._num_waiting += 1
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    answer = await self._post(body)
                    ids = None if answer is None else await self._run(len(answer), _ids, answer)
            except TimeoutError:
                pass
            finally:
                self._num_waiting -= 1
        self.num_failed += ids is None
        return ids

    def _remember(self, key: bytes, ids: "array[int]") -> None:
        before = self._cached.pop(key, None)
        self._cached[key] = ids
        self._num_cached_ids += len(ids) - (0 if before is None else len(before))
        while self._num_cached_ids > MAX_CACHED_IDS:
            _, oldest = self._cached.popitem(last=False)
            self._num_cached_ids -= len(oldest)


def _packed(question: Mapping[str, Any]) -> tuple[bytes | None, bytes]:
    """A question as it is sent, and its key in the cache; None for one that is nested too deeply."""
    try:
        body = json.dumps(question).encode()
    except RecursionError:
        return None, b""
    return body, blake2b(body, digest_size=16).digest()


def _ids(answer: bytes) -> "array[int] | None":
    try:
        ids = array("q", json.loads(answer)["tokens"])
    except (ValueError, LookupError, TypeError, OverflowError, RecursionError):
        return None
    return ids if ids and min(ids) >= 0 else None
