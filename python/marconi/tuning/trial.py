"""Trials: what a window's requests would have hit under other values of a rule's parameter.

A trial starts from the tree as it really stood and serves the whole window with a cache like the real one, which the
setup makes; only the eviction rule differs. It is a function of its arguments alone, so it can run anywhere and gives
the same score everywhere.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from marconi.policy.eviction.base import Eviction
from marconi.policy.request import Request
from marconi.tree import RadixTree
from marconi.tuning.objective import Score
from marconi.tuning.window import Window


class Server(Protocol):
    """Serves requests one after the other."""

    def serve(self, request: Request) -> int:
        """Serve `request`; returns its hit tokens."""
        ...


@dataclass(frozen=True, slots=True)
class Setup:
    """The parts that all trials of a cache share. For worker processes all must be picklable, `eviction` included."""

    eviction: Callable[[float], Eviction]
    """A new rule with this value of its parameter, which knows no node yet."""
    cache: Callable[[RadixTree, Eviction], Server]
    """A cache like the real one, with this tree and rule."""
    score: Score = Score()  # noqa: RUF009 - frozen
    reference: Callable[[], Eviction] | None = None
    """LRU as the field means it, tried beside the values: a value that is worse in the latest window is not taken."""


class Trial(NamedTuple):
    """One value and what it would have brought."""

    value: float | None
    """None for the reference rule."""
    score: float


def run_trials(window: Window, setup: Setup, values: Sequence[float | None]) -> list[Trial]:
    """A trial of each of `values`; of the reference rule, which there is then, for None."""
    return [Trial(value, run_trial(window, setup, _new_rule(setup, value))) for value in values]


def run_trial(window: Window, setup: Setup, eviction: Eviction) -> float:
    """The score of `eviction`, which knows no node yet, over the window."""
    cache = setup.cache(window.snapshot.restore(), eviction)
    num_cached: list[int] = []
    num_prompt: list[int] = []
    for request in window.requests():
        num_cached.append(cache.serve(request))
        num_prompt.append(request.num_prompt_tokens)
    return setup.score(num_cached, num_prompt)


def _new_rule(setup: Setup, value: float | None) -> Eviction:
    if value is not None:
        return setup.eviction(value)
    assert setup.reference is not None
    return setup.reference()
