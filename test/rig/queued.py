"""A server whose queue keeps its length: as many requests come after every pass as it has taken.

Prompts have `PROMPT_TOKENS`, so that a prefill takes `NUM_TAKEN` of them that share nothing with what is held, and
answers are one token, so that these have gone before the next pass. Prompts are all different, or groups of `GROUP`
that come one after the other begin with the same `SHARED_TOKENS`.
"""

from array import array
from collections.abc import Iterator
from itertools import count, islice
from typing import Any

from rig.pools import HostPools, Strategy
from rig.scheduler import HostScheduler
from rig.workload import STOP, Origin, Script

NUM_TAKEN = 8
PROMPT_TOKENS = 2_000
SHARED_TOKENS = 1_500
GROUP = 8
PREFILL_TOKENS = NUM_TAKEN * PROMPT_TOKENS
_STATES_A_REQUEST = 6
_GROUPS_FROM = 1 << 40


def prompts(num_shared_tokens: int) -> Iterator["array[int]"]:
    """Prompts without end, in groups that have their first `num_shared_tokens` in common."""
    for number in count():
        first = _GROUPS_FROM + number // GROUP * PROMPT_TOKENS
        shared = range(first, first + num_shared_tokens)
        own = range(number * PROMPT_TOKENS + STOP + 1, (number + 1) * PROMPT_TOKENS + STOP + 1)
        yield array("q", [*shared, *own[num_shared_tokens:]])


class Queued:
    """On the cache that was built on the pools of `Queued.host`."""

    def __init__(self, cache: Any, host: HostPools, num_waiting: int, num_shared_tokens: int) -> None:
        self.cache = cache
        self._scheduler = HostScheduler(cache, host)
        self._prompts = prompts(num_shared_tokens)
        self._num_waiting = num_waiting
        self._refill()

    @staticmethod
    def host(num_requests: int) -> HostPools:
        """Pools with room for what so many requests leave."""
        return HostPools(
            num_requests * PROMPT_TOKENS + PREFILL_TOKENS,
            num_requests * _STATES_A_REQUEST + 4 * NUM_TAKEN,
            PROMPT_TOKENS + 64,
            strategy=Strategy.NO_BUFFER,
            chunk_tokens=PREFILL_TOKENS,
            num_rows=NUM_TAKEN,
        )

    @property
    def waiting(self) -> list[Any]:
        """What waits, in order."""
        return self._scheduler.waiting

    def take(self) -> int:
        """One pass and its prefill; returns how many requests it took."""
        before = self._scheduler.num_prefills
        self._scheduler.step()
        self._refill()
        return self._scheduler.num_prefills - before

    def _refill(self) -> None:
        for prompt in islice(self._prompts, self._num_waiting - len(self.waiting)):
            self._scheduler.submit(Script(Origin.NEW, prompt, array("q", [STOP]), 1, (None, None)))
