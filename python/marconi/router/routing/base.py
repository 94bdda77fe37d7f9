"""The contract of a routing rule: it sees a request and the workers that may take it, and names one.

A rule gets what the router believes when the request comes: what each worker has of the prompt (`router.index`),
what it still has to do, and what it was given before (`router.dispatch.affinity`). It keeps no such knowledge itself,
so the same object routes a fleet and a simulation of one.

    expected time to first token on worker w  =  work ahead of it on w
                                              +  prefill from what w has of the prompt
    both in seconds, by the model's own prefill times (`model.LatencyModel`)

Rules are deterministic. Where several workers are equal, the request's `key` chooses: by rendezvous, so that requests
that begin alike meet on the same worker, and a worker that goes moves only its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b
from typing import Protocol

from marconi.model.latency import LatencyModel


class Reason(StrEnum):
    """Why a request went where it did."""

    TURN = "its turn"
    LEAST_LOADED = "least to do"
    KEY = "its key's"
    HIT = "soonest, from what it has of the prompt"
    AFFINITY = "nobody has enough of the prompt, it served it last"
    COLD = "nobody has enough of the prompt"
    OVERFLOW = "its own has too much to do"


@dataclass(frozen=True, slots=True)
class Query:
    """A request as a rule sees it."""

    num_prompt_tokens: int
    key: bytes
    """A hash of its beginning and its namespace: equal for requests that are likely to share a prefix."""


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker that may take a request, as the router sees it now."""

    name: str
    num_hit_tokens: int = 0
    """Of the prompt, up to the deepest state with all KV before it: these are not computed again."""
    num_kv_tokens: int = 0
    """Of the prompt, whose KV it has; no less than `num_hit_tokens`, and of use only up to a state."""
    work_ahead_s: float = 0.0
    """Prefills that it was given and has not answered yet, by the model's times."""
    num_running: int = 0
    """Requests that it was given and has not finished."""
    num_seen_tokens: int = 0
    """Of the prompt, that this worker was the last to serve, whether it still holds them or not."""
    num_warm_tokens: float = 0.0
    """Of all prefixes that it was the last to serve; those served long ago count less."""


@dataclass(frozen=True, slots=True)
class Decision:
    """A worker, why it, and when its first token is expected."""

    worker: Worker
    reason: Reason
    expected_ttft_s: float


class Routing(Protocol):
    """Chooses among workers."""

    def choose(self, query: Query, workers: Sequence[Worker]) -> Decision:
        """Choose one of `workers`, of which there is at least one."""
        ...


def expected_ttft_s(latency: LatencyModel, query: Query, worker: Worker, num_cached_tokens: int) -> float:
    """Time to the first token of `query` on `worker`, which has so many of its tokens; the last is always computed."""
    num_cached_tokens = min(num_cached_tokens, query.num_prompt_tokens - 1)
    return worker.work_ahead_s + latency.seconds(num_cached_tokens, query.num_prompt_tokens)


def rendezvous(key: bytes, workers: Sequence[Worker]) -> Worker:
    """The worker that `key` belongs to: the one with the highest hash of both (Thaler and Ravishankar, 1998)."""
    return max(workers, key=lambda worker: (_weight(key, worker.name), worker.name))


def _weight(key: bytes, name: str) -> bytes:
    return blake2b(b"%d:%b%b" % (len(key), key, name.encode()), digest_size=8).digest()
