"""Why the latest requests went where they did: lengths, names and times, never a word of what they said."""

from collections import deque
from dataclasses import asdict, dataclass
from typing import Any

from marconi.router.dispatch import Ticket


@dataclass(slots=True)
class Record:
    """One request, filled in as it goes."""

    at_s: float
    """Unix time at which it came."""
    route: str
    num_prompt_tokens: int | None = None
    """None where this router does not know its tokens."""
    worker: str | None = None
    """The last it was tried on."""
    reason: str | None = None
    num_hit_tokens: int | None = None
    num_kv_tokens: int | None = None
    expected_ttft_s: float | None = None
    ttft_s: float | None = None
    """To the first byte of the answer, from when it came."""
    num_attempts: int = 0
    status: int | None = None
    """Of the answer; None while there is none, or if its client has gone."""
    failures: list[str] | None = None
    """Of earlier attempts, in words."""

    def attempt(self, ticket: Ticket) -> None:
        """It was given to a worker."""
        self.num_attempts += 1
        decision = ticket.decision
        self.worker, self.reason = ticket.worker, str(decision.reason)
        self.num_hit_tokens, self.num_kv_tokens = decision.worker.num_hit_tokens, decision.worker.num_kv_tokens
        self.expected_ttft_s = round(decision.expected_ttft_s, 6)

    def fail(self, why: str) -> None:
        """The attempt failed."""
        self.failures = [*(self.failures or ()), why]


class Records:
    """The latest of them."""

    def __init__(self, num_kept: int) -> None:
        self._kept: deque[Record] = deque(maxlen=num_kept)

    def begin(self, at_s: float, route: str) -> Record:
        """Of a request that has come."""
        record = Record(at_s, route)
        self._kept.append(record)
        return record

    def latest(self) -> list[dict[str, Any]]:
        """For JSON, the latest first."""
        return [asdict(record) for record in reversed(self._kept)]
