"""A worker behind the gateway, and whether it takes requests: a circuit breaker that only health checks close.

    unknown --described, checked--> up --`max_failures` in a row, or a refused connection--> down --check--> up
    refused: not a worker that this router can route to; only another description changes that

A request that fails counts against its worker; one that succeeds, or a health check that does, clears the count. Users'
requests never try whether a worker is back: health checks do, `period_s` apart while it is up, and from `first_retry_s`
on twice as long each time while it is down, `period_s` at most.
"""

import asyncio
import errno
import logging
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, NamedTuple

import aiohttp

from marconi.router.description import Description, EventSource
from marconi.router.gateway.settings import HealthLimits
from marconi.router.prompts import PromptKind

logger = logging.getLogger(__name__)

_OF_THIS_HOST: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL})
"""Errors of a connection for which this host has no socket, port or memory left."""


class Condition(StrEnum):
    """The condition of a worker; only one that is up takes requests."""

    UNKNOWN = "unknown"
    UP = "up"
    DOWN = "down"
    REFUSED = "refused"


@dataclass(slots=True)
class Health:
    """The health of one worker."""

    limits: HealthLimits = field(default_factory=HealthLimits)
    condition: Condition = Condition.UNKNOWN
    why: str = "not checked yet"
    """The reason, in words; empty while it is up."""
    num_failures: int = 0
    """Since the last success."""
    num_times_down: int = 0
    num_checks: int = 0
    """Health checks that were sent."""
    _retry_s: float = 0.0

    def succeeded(self) -> None:
        """Note that a request or a check was answered; a refused worker stays refused."""
        self.num_failures, self._retry_s = 0, 0.0

    def passed(self) -> None:
        """Note that the worker was described, and that a health check succeeded."""
        self.succeeded()
        self.condition, self.why = Condition.UP, ""

    def failed(self, why: str, *, is_gone: bool = False) -> bool:
        """Note that a request or a check failed; returns whether the worker goes down with it."""
        self.num_failures += 1
        was_up = self.condition is Condition.UP
        if was_up and not is_gone and self.num_failures < self.limits.max_failures:
            return False
        self.condition, self.why = Condition.DOWN, why
        self.num_times_down += was_up
        return was_up

    def refuse(self, why: str) -> None:
        """Note that the worker must not be routed to."""
        self.condition, self.why = Condition.REFUSED, why

    def next_check_s(self) -> float:
        """Seconds until the next check; each call while it is not up waits longer."""
        if self.condition is Condition.UP:
            return self.limits.period_s
        self._retry_s = min(self._retry_s * 2 or self.limits.first_retry_s, self.limits.period_s)
        return self._retry_s


@dataclass(frozen=True, slots=True)
class Tokenization:
    """How a worker tokenizes, by its answers to the probes."""

    kinds: frozenset[PromptKind] = frozenset(PromptKind)
    """Prompts that this router tokenizes as the worker does."""
    text_hash: str = ""
    """Hash of its answers to the texts."""
    difference: str = ""
    """The first difference from this router's tokenizer, in words."""


class Rank(NamedTuple):
    """A data-parallel rank of a worker: what a request is given to."""

    worker: "Worker"
    number: int | None
    """None for one that is alone, or where the worker does not say."""

    @property
    def name(self) -> str:
        """Its name in the fleet."""
        return self.worker.url if self.number is None else f"{self.worker.url}/{self.number}"

    @property
    def events(self) -> EventSource | None:
        """Its events; None where it publishes none."""
        description = self.worker.description
        return description.events[self.number or 0] if description is not None and description.events else None


@dataclass(slots=True, eq=False)
class Worker:
    """One worker. Its health check changes it; requests report what happened to them."""

    url: str
    health: Health
    description: Description | None = None
    """Its description of itself when it last came up."""
    model_info: Any = None
    """Its answer to `/model_info` then."""
    tokenization: Tokenization = field(default_factory=Tokenization)
    """How it tokenized then."""
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    """Set to run its health check at once."""
    waiting: set[asyncio.Timeout] = field(default_factory=set)
    """Deadlines of requests that wait for its first byte: when it goes down, they are brought forward."""

    @property
    def is_up(self) -> bool:
        """True if it takes requests."""
        return self.health.condition is Condition.UP

    @property
    def ranks(self) -> tuple[Rank, ...]:
        """Its ranks, as last described; they come and go together."""
        return tuple(Rank(self, number) for number in (self.description.ranks if self.description else (None,)))

    def overloaded(self, why: str) -> None:
        """Note that it had too much to do for a request: that may bring it down, but not the requests it has."""
        if self.health.failed(why):
            self.wake.set()

    def broke(self, problem: Exception, why: str) -> None:
        """Note that a request or a check ended with `problem`, which may be this host's own fault."""
        if not (isinstance(problem, OSError) and problem.errno in _OF_THIS_HOST):
            self.failed(why, is_gone=isinstance(problem, aiohttp.ClientConnectorError))

    def failed(self, why: str, *, is_gone: bool = False) -> None:
        """Note that a request or a check failed; once it is down, no request waits for it."""
        if self.health.failed(why, is_gone=is_gone):
            logger.warning("marconi: %s is down: %s", self.url, why)
            self.wake.set()
        if not self.is_up:
            now_s = asyncio.get_running_loop().time()
            for deadline in self.waiting:
                # One that has just passed is about to end its request by itself.
                if not deadline.expired():
                    deadline.reschedule(now_s)
            self.waiting.clear()
