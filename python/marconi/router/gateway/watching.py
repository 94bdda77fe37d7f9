"""A task a worker: asks it what it is, then whether it lives, for as long as the router does.

    unknown, down --> what is it? how does it tokenize? can it generate? --> up --every period--> can it generate?
                          |                                                   |
                          no SGLang server, another model than others         failures, its own or of requests
                          v                                                   v
                       refused, and asked again each period                  down, and asked all of it again

What answers at an address may be another program after a restart, so nothing said before it went is believed; and as
a restart may be too quick to be seen, the model is asked for at every look.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Final, TypeAlias

import aiohttp

from marconi.router.gateway.brain import Brain
from marconi.router.gateway.member import Member, Tokens
from marconi.router.prompts.base import Kind
from marconi.router.prompts.check import TOKENIZE, Probe, Unlike, verify
from marconi.router.workers.description import Description, describe
from marconi.router.workers.health import Condition

logger = logging.getLogger(__name__)

Probes: TypeAlias = Callable[[], Sequence[Probe]]
"""Made anew for each look: a template may print the date."""
_ASK_TIMEOUT_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class _Told:
    """What a worker said."""

    model_info: Any
    description: Description
    tokens: Tokens


class Watching:
    """Of all workers of a router."""

    def __init__(self, brain: Brain, session: aiohttp.ClientSession, probes: Probes) -> None:
        self._brain = brain
        self._session = session
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._probes = probes
        key = brain.settings.worker_api_key
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}

    def watch(self, member: Member) -> None:
        """From now on, in a task of its own."""
        self._tasks[member.url] = asyncio.create_task(self._watch(member), name=f"watch {member.url}")

    async def leave(self, member: Member) -> None:
        """No more."""
        await _cancelled([self._tasks.pop(member.url)])

    async def close(self) -> None:
        """None of them any more."""
        await _cancelled(list(self._tasks.values()))
        self._tasks.clear()

    async def look(self, member: Member) -> None:
        """Ask it what there is to ask now; what comes of it is its health."""
        health = member.health
        before = health.condition
        try:
            told = await self._ask_what_it_is(member)
            await self._check(member)
            if told is not None:
                # In one turn with what follows: of two workers that are unlike, one is up before the other joins.
                self._brain.joins(member, told.description, told.tokens)
                member.model_info = told.model_info
            if told is not None or member.is_up:
                health.passed()
            # Else it went while it was looked at, and what comes back may be another.
        except ValueError as wrong:
            health.refuse(str(wrong))
        except (aiohttp.ClientError, ConnectionError, TimeoutError) as broken:
            member.broke(broken, _words(member, broken))
        # That it went down has said who took it down.
        if health.condition is not before and (before, health.condition) != (Condition.UP, Condition.DOWN):
            level = logging.INFO if member.is_up else logging.WARNING
            logger.log(level, "marconi: %s is %s%s", member.url, health.condition, health.why and f": {health.why}")

    async def _watch(self, member: Member) -> None:
        while True:
            try:
                await self.look(member)
            except Exception:
                # Whatever an answer did to us, the next look may find it mended.
                logger.exception("marconi: looking at %s", member.url)
                member.failed("a fault of this router's: see its log")
            try:
                async with asyncio.timeout(member.health.next_check_s()):
                    await member.wake.wait()
            except TimeoutError:
                pass
            member.wake.clear()

    async def _ask_what_it_is(self, member: Member) -> _Told | None:
        """What it says of itself; None where it said so before, and is up since."""
        model_info = await self._json(member, "/model_info")
        if member.is_up and model_info == member.model_info:
            return None
        marconi = await self._json(member, "/marconi", absent_is_none=True)
        described = describe(member.url, model_info, marconi, self._brain.keys)
        tokens = await self._tokens(member)
        if tokens.kinds == {Kind.TEXTS}:
            # Chats that were rendered before midnight may be unlike a template's answers after it.
            tokens = await self._tokens(member)
        return _Told(model_info, described, tokens)

    async def _tokens(self, member: Member) -> Tokens:
        """How it tokenizes; `ValueError` where it does not."""
        kinds, why, hashes = frozenset(Kind), "", []
        for probe in self._probes():
            if probe.kind is Kind.CHATS and Kind.CHATS not in kinds:
                break
            try:
                answer = await self._json(member, TOKENIZE, probe.body)
                if probe.kind is Kind.TEXTS:
                    hashes.append(probe.hash(answer, member.url))
                verify(probe, answer, member.url)
            except (ValueError, aiohttp.ClientPayloadError) as wrong:
                # A chat that it refuses, or fails on, is unlike as well.
                if probe.kind is Kind.TEXTS and not isinstance(wrong, Unlike):
                    raise
                kinds = frozenset() if probe.kind is Kind.TEXTS else frozenset({Kind.TEXTS})
                why = why or ("" if probe.expected_hash is None else str(wrong))
        return Tokens(kinds, sha256("".join(hashes).encode()).hexdigest(), why)

    async def tokenize(self, question: bytes) -> bytes | None:
        """What the worker with the fewest requests answers to `question`; None where there is no answer."""
        member = self._brain.idlest()
        if member is None:
            return None
        headers = {**self._headers, "Content-Type": "application/json"}
        try:
            async with self._session.post(
                f"{member.url}{TOKENIZE}", data=question, headers=headers, allow_redirects=False
            ) as answer:
                return await answer.read() if answer.status == 200 else None
        except (aiohttp.ClientError, ConnectionError):
            return None

    async def _check(self, member: Member) -> None:
        timeout = aiohttp.ClientTimeout(total=self._brain.settings.patience.timeout_s)
        async with self._session.get(
            f"{member.url}/health", headers=self._headers, timeout=timeout, allow_redirects=False
        ) as answer:
            await answer.read()
            if answer.status != 200:
                raise aiohttp.ClientPayloadError(f"/health answered {answer.status}")

    async def _json(self, member: Member, path: str, body: Any = None, *, absent_is_none: bool = False) -> Any:
        """What it answers; `ValueError` where that is no answer of an SGLang server."""
        method = "GET" if body is None else "POST"
        timeout = aiohttp.ClientTimeout(total=_ASK_TIMEOUT_S)
        async with self._session.request(
            method, f"{member.url}{path}", json=body, headers=self._headers, timeout=timeout, allow_redirects=False
        ) as answer:
            if answer.status == 404 and absent_is_none:
                return None
            if answer.status == 401:
                raise ValueError(f"{member.url}: needs its API key; --worker-api-key-file is right")
            if answer.status >= 500:
                raise aiohttp.ClientPayloadError(f"{path} answered {answer.status}")
            try:
                value = await answer.json(content_type=None)
            except ValueError:
                value = None
            if answer.status != 200 or value is None:
                raise ValueError(f"{member.url}: no SGLang server ({path} answered {answer.status})")
            return value


async def _cancelled(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _words(member: Member, problem: BaseException) -> str:
    if isinstance(problem, aiohttp.ClientConnectorError):
        return f"cannot be reached ({problem.os_error.strerror or problem.os_error})"
    text = str(problem).splitlines()
    return text[0][:200] if text else f"no answer ({type(problem).__name__})"
