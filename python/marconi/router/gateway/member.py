"""A worker as the router has it: what it said of itself, how it is, and who waits for its first byte."""

import asyncio
import errno
import logging
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp

from marconi.router.prompts.base import Kind
from marconi.router.workers.description import Description
from marconi.router.workers.health import Condition, Health

logger = logging.getLogger(__name__)

_OF_THIS_HOST: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL})
"""What a connection fails with where this host has no socket, port or memory left for it."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """How a worker tokenizes, by its answers to the probes."""

    kinds: frozenset[Kind] = frozenset(Kind)
    """Prompts that this router tokenizes as it does."""
    text_hash: str = ""
    """Of its answers to the texts."""
    why: str = ""
    """What is not alike first, in words."""


@dataclass(slots=True, eq=False)
class Member:
    """One worker. Its watcher changes it; who forwards a request reports what happened."""

    url: str
    """Its name in the fleet."""
    health: Health
    description: Description | None = None
    """What it said when it last came up."""
    model_info: Any = None
    """Its own words about its model, then."""
    tokens: Tokens = field(default_factory=Tokens)
    """How it tokenized, then."""
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    """Set where its watcher should look at once."""
    _waiting: set[asyncio.Timeout] = field(default_factory=set)

    @property
    def is_up(self) -> bool:
        """Whether it takes requests."""
        return self.health.condition is Condition.UP

    def wait_with(self, deadline: asyncio.Timeout) -> None:
        """Somebody waits for its first byte: `deadline` is brought forward when it goes down."""
        self._waiting.add(deadline)

    def wait_no_more(self, deadline: asyncio.Timeout) -> None:
        """The byte has come, or nobody waits for it any more."""
        self._waiting.discard(deadline)

    def turned_away(self, why: str) -> None:
        """It has too much to do for a request: that may bring it down, and what it took it goes on with."""
        if self.health.failed(why):
            self.wake.set()

    def broke(self, problem: Exception, why: str) -> None:
        """A request to it or a check of it ended with `problem`, in words `why`, which may be this host's own."""
        if not (isinstance(problem, OSError) and problem.errno in _OF_THIS_HOST):
            self.failed(why, is_gone=isinstance(problem, aiohttp.ClientConnectorError))

    def failed(self, why: str, *, is_gone: bool = False) -> None:
        """A request to it or a check of it failed; while it is down, nobody waits for it any longer."""
        if self.health.failed(why, is_gone=is_gone):
            logger.warning("marconi: %s is down: %s", self.url, why)
            self.wake.set()
        if not self.is_up:
            now_s = asyncio.get_running_loop().time()
            for deadline in self._waiting:
                # One that has just passed is on its way to who waits.
                if not deadline.expired():
                    deadline.reschedule(now_s)
            self._waiting.clear()
