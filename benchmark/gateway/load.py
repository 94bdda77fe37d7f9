"""Clients: requests one after the other, each asked of a worker and of the router by turns; and streams at once."""

import asyncio
import time
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import aiohttp
import msgspec

NUM_WARM = 20
"""Requests before those that are counted."""


class Lost(Exception):
    """An answer that did not come, was cut off, or was another's."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A kind of request."""

    name: str
    path: str
    body: dict[str, Any]
    num_requests: int


@dataclass(frozen=True, slots=True)
class Pair:
    """One request asked of both, in seconds to the first byte."""

    direct_s: float
    routed_s: float


async def alternate(direct: str, routed: str, shape: Shape) -> list[Pair]:
    """Each request of `shape` by turns; every other time the router is first."""
    pairs = []
    async with _client() as client:
        for number in range(shape.num_requests + NUM_WARM):
            order = (direct, routed) if number % 2 else (routed, direct)
            seconds = {url: await _ask(client, url, shape, number) for url in order}
            if number >= NUM_WARM:
                pairs.append(Pair(seconds[direct], seconds[routed]))
    return pairs


@dataclass(frozen=True, slots=True)
class Held:
    """Streams that ran beside each other."""

    num_streams: int
    num_at_once: int
    """The most that had begun and not ended."""
    seconds: float
    first_piece_s: tuple[float, ...]
    longest_gap_s: float
    """Between two pieces of one stream."""


async def hold(url: str, shape: Shape, num_streams: int, gap_s: float, pieces: int) -> Held:
    """All streams at once, each of `pieces` pieces; `Lost` where one lacks any."""
    started_s = time.monotonic()
    begun = ended = most = 0
    longest_gap_s = 0.0
    first: list[float] = []

    async def one(client: aiohttp.ClientSession, number: int) -> None:
        nonlocal begun, ended, most, longest_gap_s
        rid = f"stream-{number}"
        body = {**shape.body, "rid": rid, "stream": True, "pieces": pieces, "gap_s": gap_s}
        asked_s = last_s = time.monotonic()
        got: list[Any] = []
        async with client.post(url + shape.path, data=msgspec.json.encode(body), headers=_JSON) as answer:
            if answer.status != 200:
                raise Lost(f"{rid}: {answer.status} {(await answer.text())[:200]}")
            async for line in answer.content:
                if not line.startswith(b"data: "):
                    continue
                now_s = time.monotonic()
                if not got:
                    first.append(now_s - asked_s)
                    begun += 1
                    most = max(most, begun - ended)
                else:
                    longest_gap_s = max(longest_gap_s, now_s - last_s)
                last_s = now_s
                got.append(line[6:].strip())
        ended += 1
        wanted = _told(rid, pieces)
        if got != wanted:
            right = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(got, wanted, strict=False))))
            raise Lost(f"{rid}: {right} right of {len(got)} pieces, {len(wanted)} were sent")

    async with _client() as client:
        await asyncio.gather(*(one(client, number) for number in range(num_streams)))
    return Held(num_streams, most, time.monotonic() - started_s, tuple(first), longest_gap_s)


def _told(rid: str, pieces: int) -> list[bytes]:
    """What the worker sends as a stream."""
    return [*(msgspec.json.encode({"id": rid, "piece": piece}) for piece in range(pieces)), b"[DONE]"]


_JSON = {"Content-Type": "application/json"}


def _client() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=600), trust_env=False
    )


async def _ask(client: aiohttp.ClientSession, url: str, shape: Shape, number: int) -> float:
    rid = f"{shape.name}-{number}"
    if shape.body.get("stream"):
        wanted = b"".join(b"data: " + each + b"\n\n" for each in _told(rid, 1))
    else:
        wanted = msgspec.json.encode({"id": rid})
    body = msgspec.json.encode({**shape.body, "rid": rid})
    started_s = time.perf_counter()
    async with client.post(url + shape.path, data=body, headers=_JSON) as answer:
        chunk = await answer.content.readany()
        seconds = time.perf_counter() - started_s
        rest = await answer.read()
    if answer.status != 200 or chunk + rest != wanted:
        raise Lost(f"{rid}: {answer.status} {(chunk + rest)[:200]!r}")
    return seconds
