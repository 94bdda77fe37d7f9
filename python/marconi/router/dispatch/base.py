"""What is dispatched, and what became of it."""

from dataclasses import dataclass

from marconi.router.index.base import Chain
from marconi.router.routing.base import Decision


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request's prompt as its router knows it; `ValueError` for one without tokens."""

    chain: Chain
    num_tokens: int
    key: bytes
    """Equal for requests that are likely to share a prefix: of its beginning, or what a client says of its session."""

    def __post_init__(self) -> None:
        if self.num_tokens < 1:
            raise ValueError("a prompt must have 1 token or more, got 0 tokens")


@dataclass(frozen=True, slots=True, eq=False)
class Ticket:
    """A request on a worker, from its dispatch to its end."""

    decision: Decision
    prompt: Prompt
    prefill_s: float
    """Time of the prompt's prefill on that worker, without waiting, by the model's times."""
    dispatched_s: float

    @property
    def worker(self) -> str:
        """The name of the worker that has it."""
        return self.decision.worker.name
