"""Health checks: a task a worker that reads its description, then checks its health, as long as the router runs.

    unknown, down --> describe it, probe its tokenizer, check its health --> up --every period--> check its health
                          |                                                  |
                          no SGLang server, or unlike the others             failures, of checks or of requests
                          v                                                  v
                       refused, and described again each period             down, and all of it again

After a restart another program may answer at the address, so nothing from before is believed; and as a restart may be
too quick to be seen, every check also compares the model.

A worker that reports its load with no event is asked for it after each check (`GET /v1/loads`). Whether it answers that
says nothing of its health.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import Any, Final, TypeAlias

import aiohttp

from marconi.router.description import Description, describe, loads_of
from marconi.router.gateway.gateway import Gateway
from marconi.router.gateway.worker import Condition, Tokenization, Worker
from marconi.router.load_report import LoadReport
from marconi.router.prompts import PromptKind
from marconi.router.prompts.check import TOKENIZE, Probe, Unlike, verify, without

logger = logging.getLogger(__name__)

Probes: TypeAlias = Callable[[], Sequence[Probe]]
"""Makes the probes for each description: a template may print the date."""
_TIMEOUT_S: Final = 10.0


class HealthChecks:
    """The health checks of all workers of a gateway."""

    def __init__(self, gateway: Gateway, session: aiohttp.ClientSession, probes: Probes) -> None:
        self._gateway = gateway
        self._session = session
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._probes = probes
        self._headers = gateway.settings.worker_headers

    def start(self, worker: Worker) -> None:
        """Check a worker from now on, in a task of its own."""
        self._tasks[worker.url] = asyncio.create_task(self._run(worker), name=f"check {worker.url}")

    async def stop(self, worker: Worker) -> None:
        """Stop checking a worker."""
        await _cancel([self._tasks.pop(worker.url)])

    async def close(self) -> None:
        """Stop checking all workers."""
        await _cancel(list(self._tasks.values()))
        self._tasks.clear()

    async def check(self, worker: Worker) -> None:
        """Check a worker once, after reading its description where that is not known; sets its health."""
        health = worker.health
        before = health.condition
        try:
            model_info = await self._json(worker, "/model_info")
            is_new = not (worker.is_up and model_info == worker.model_info)
            described = await self._described(worker, model_info) if is_new else None
            await self._check_health(worker)
            if described is not None:
                # In one turn with what follows: of two workers that are unlike, one is up before the other joins.
                self._gateway.join(worker, *described)
                worker.model_info = model_info
            if is_new or worker.is_up:
                health.passed()
            # Else it went down during the check, and another program may come back.
        except ValueError as wrong:
            health.refuse(str(wrong))
        except (aiohttp.ClientError, ConnectionError, TimeoutError) as broken:
            worker.broke(broken, _words(broken))
        # `Worker.failed` has logged that it went down.
        if health.condition is not before and (before, health.condition) != (Condition.UP, Condition.DOWN):
            level = logging.INFO if worker.is_up else logging.WARNING
            logger.log(level, "marconi: %s is %s%s", worker.url, health.condition, health.why and f": {health.why}")

    async def ask_load(self, worker: Worker) -> None:
        """Ask a worker that is up how busy it is, where its events do not say."""
        fleet = self._gateway.dispatcher.fleet
        ranks = [rank for rank in worker.ranks if rank.name in self._gateway.ranks]
        reports = [fleet.sync(rank.name).load_report for rank in ranks]
        if not worker.is_up or all(report is not None and report.sequence is not None for report in reports):
            return
        asked_s = time.monotonic()
        try:
            loads = loads_of(await self._json(worker, "/v1/loads?include=core", absent_is_none=True))
        except (ValueError, aiohttp.ClientError, ConnectionError, TimeoutError):
            return
        # One that missed a check is a little late.
        fresh_s = 2 * self._gateway.settings.health.period_s
        for rank, before in zip(ranks, reports, strict=True):
            load = loads.get(rank.number or 0)
            is_told = before is not None and before.sequence is not None
            if load is not None and not is_told and rank.name in self._gateway.ranks:
                report = LoadReport(load, asked_s, time.monotonic(), fresh_s)
                self._gateway.dispatcher.fleet.sync(rank.name).load_report = report

    async def tokenize(self, question: bytes) -> bytes | None:
        """The answer of the worker with the fewest requests to `question`; None where there is none."""
        worker = self._gateway.idlest()
        if worker is None:
            return None
        headers = {**self._headers, "Content-Type": "application/json"}
        try:
            async with self._session.post(
                f"{worker.url}{TOKENIZE}", data=question, headers=headers, allow_redirects=False
            ) as answer:
                return await answer.read() if answer.status == 200 else None
        except (aiohttp.ClientError, ConnectionError):
            return None

    async def _run(self, worker: Worker) -> None:
        while True:
            try:
                await self.check(worker)
                await self.ask_load(worker)
            except Exception:
                # Whatever an answer did to us, the next check may find it mended.
                logger.exception("marconi: checking %s", worker.url)
                worker.failed("a fault of this router's: see its log")
            try:
                async with asyncio.timeout(worker.health.next_check_s()):
                    await worker.wake.wait()
            except TimeoutError:
                pass
            worker.wake.clear()

    async def _described(self, worker: Worker, model_info: Any) -> tuple[Description, Tokenization]:
        marconi = await self._json(worker, "/marconi", absent_is_none=True)
        description = describe(worker.url, model_info, marconi, self._gateway.keys)
        tokenization = await self._tokenization(worker)
        if PromptKind.TEXTS in tokenization.kinds and tokenization.kinds != frozenset(PromptKind):
            # Chats that were rendered before midnight may be unlike a template's answers after it.
            tokenization = await self._tokenization(worker)
        return description, tokenization

    async def _tokenization(self, worker: Worker) -> Tokenization:
        """Send a worker the probes; `ValueError` where it does not tokenize."""
        kinds, difference, hashes = frozenset(PromptKind), "", []
        for probe in self._probes():
            if probe.kind not in kinds and probe.kind is not PromptKind.TEXTS:
                continue
            try:
                answer = await self._json(worker, TOKENIZE, probe.body)
                if probe.kind is PromptKind.TEXTS:
                    hashes.append(probe.hash(answer, worker.url))
                verify(probe, answer, worker.url)
            except (ValueError, aiohttp.ClientPayloadError) as wrong:
                # A chat that it refuses, or fails on, is unlike as well.
                if probe.kind is PromptKind.TEXTS and not isinstance(wrong, Unlike):
                    raise
                kinds = without(kinds, probe.kind)
                difference = difference or ("" if probe.expected_hash is None else str(wrong))
        return Tokenization(kinds, sha256("".join(hashes).encode()).hexdigest(), difference)

    async def _check_health(self, worker: Worker) -> None:
        worker.health.num_checks += 1
        timeout = aiohttp.ClientTimeout(total=self._gateway.settings.health.timeout_s)
        async with self._session.get(
            f"{worker.url}/health", headers=self._headers, timeout=timeout, allow_redirects=False
        ) as answer:
            await answer.read()
            if answer.status != 200:
                raise aiohttp.ClientPayloadError(f"/health answered {answer.status}")

    async def _json(self, worker: Worker, path: str, body: Any = None, *, absent_is_none: bool = False) -> Any:
        """The JSON that a worker answers; `ValueError` where no SGLang server would answer so."""
        method = "GET" if body is None else "POST"
        timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
        async with self._session.request(
            method, f"{worker.url}{path}", json=body, headers=self._headers, timeout=timeout, allow_redirects=False
        ) as answer:
            if answer.status == 404 and absent_is_none:
                return None
            if answer.status == 401:
                raise ValueError(f"{worker.url}: needs its API key: --worker-api-key-file")
            if answer.status >= 500:
                raise aiohttp.ClientPayloadError(f"{path} answered {answer.status}")
            try:
                value = await answer.json(content_type=None)
            except ValueError:
                value = None
            if answer.status != 200 or value is None:
                raise ValueError(f"{worker.url}: must be an SGLang server, got {answer.status} of {path}")
            return value


async def _cancel(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _words(problem: BaseException) -> str:
    if isinstance(problem, aiohttp.ClientConnectorError):
        return f"cannot be reached ({problem.os_error.strerror or problem.os_error})"
    text = str(problem).splitlines()
    return text[0][:200] if text else f"no answer ({type(problem).__name__})"
