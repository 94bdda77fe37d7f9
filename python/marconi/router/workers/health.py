"""Whether a worker takes requests: a circuit breaker that health checks close.

    unknown --described, checked--> up --`max_failures` in a row, or one that shows it gone--> down --check--> up
    refused: what answers there is not what this router routes to; only another description changes that

A request that fails counts against its worker; one that succeeds, or a health check that does, clears the count. Users'
requests never try whether a worker is back: checks do, `period_s` apart while it is up, and from `first_retry_s` on
twice as long each time while it is down, `period_s` at most. Time is passed in.

Owner: who watches the worker.
"""

from dataclasses import dataclass, field
from enum import StrEnum


class Condition(StrEnum):
    """The condition of a worker; only one that is up takes requests."""

    UNKNOWN = "unknown"
    UP = "up"
    DOWN = "down"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Patience:
    """The limits of failures; `ValueError` for what is not above 0."""

    max_failures: int = 3
    period_s: float = 5.0
    first_retry_s: float = 0.5
    timeout_s: float = 25.0
    """Of a health check; SGLang's generates a token, and answers after 20 s that it could not."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")


@dataclass(slots=True)
class Health:
    """The health of one worker."""

    patience: Patience = field(default_factory=Patience)
    condition: Condition = Condition.UNKNOWN
    why: str = "not checked yet"
    """The reason, in words; empty while it is up."""
    num_failures: int = 0
    """Since the last success."""
    num_times_down: int = 0
    _retry_s: float = 0.0

    def succeeded(self) -> None:
        """Note that a request or a check was answered; a refused worker stays refused."""
        self.num_failures, self._retry_s = 0, 0.0

    def passed(self) -> None:
        """Note that it was described, and that a health check succeeded."""
        self.succeeded()
        self.condition, self.why = Condition.UP, ""

    def failed(self, why: str, *, is_gone: bool = False) -> bool:
        """Note that a request or a check failed; whether the worker is down from this moment on."""
        self.num_failures += 1
        if self.condition is Condition.UP and (is_gone or self.num_failures >= self.patience.max_failures):
            self.condition, self.why = Condition.DOWN, why
            self.num_times_down += 1
            return True
        if self.condition is not Condition.UP:
            self.condition, self.why = Condition.DOWN, why
        return False

    def refuse(self, why: str) -> None:
        """Note that what answers there must not be routed to."""
        self.condition, self.why = Condition.REFUSED, why

    def next_check_s(self) -> float:
        """Seconds until the next check; each call while it is not up waits longer."""
        if self.condition is Condition.UP:
            return self.patience.period_s
        self._retry_s = min(self._retry_s * 2 or self.patience.first_retry_s, self.patience.period_s)
        return self._retry_s
