"""The variants that are compared: a rule of routing by its name, and the key that it gets of a request.

The rules of `router.routing` get a key of the prompt's first `KEY_TOKENS` tokens, as a live router does without a
session header. Beside them are stronger baselines:

    sticky-session         sticky-hash with the session as the key: what clients that name their sessions get from it
    sticky-hash-pure       sticky-hash without its bound of load: a key never leaves its worker
    sticky-session-pure    both
    kv-only-placed         state-aware that believes all KV to save computing: what is left between the two is what
                           knowing states is worth
    own-tree               by what the router itself sent where, without a worker's event, as sglang-router (smg) does
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Final

from marconi.model.latency import LatencyModel
from marconi.policy.request import Request, Trace
from marconi.router.dispatch import KEY_TOKENS, Prompt, key_of
from marconi.router.index import Chain
from marconi.router.routing import (
    ROUTINGS,
    Candidate,
    Decision,
    LeastPrice,
    Query,
    Reason,
    Routing,
    StickyHash,
    expected_ttft_s,
    least_loaded,
)
from marconi.tree.node import ID_BYTES
from marconi_lab.fleet.tree_events import hashes_after, name_of, start_of


class Key(StrEnum):
    """The text that a request's key is a hash of."""

    BEGINNING = "beginning"
    SESSION = "session"


@dataclass(frozen=True, slots=True)
class Variant:
    """A rule of routing and its key."""

    name: str
    make: Callable[[LatencyModel], Routing]
    key: Key = Key.BEGINNING

    def prompt(self, request: Request, unit_tokens: int) -> Prompt:
        """The prompt of `request` as a router knows it: all whole units before its last token."""
        num_units = min(request.num_known_tokens, request.num_prompt_tokens - 1) // unit_tokens
        hashes = hashes_after(start_of(request.namespace), request.path[: num_units * ID_BYTES], 0).tolist()
        return Prompt(
            Chain(name_of(request.namespace), hashes), request.num_prompt_tokens, self._key(request, unit_tokens)
        )

    def _key(self, request: Request, unit_tokens: int) -> bytes:
        if self.key is Key.SESSION:
            return b"session %d" % request.session
        num_units = -(-min(request.num_prompt_tokens, max(KEY_TOKENS, unit_tokens)) // unit_tokens)
        text = b"%b:%b" % (name_of(request.namespace), request.path[: num_units * ID_BYTES])
        return key_of(text)


def _kv_only_placed(latency: LatencyModel) -> LeastPrice:
    return LeastPrice(latency, lambda worker: worker.num_kv_tokens, asks_for_states=False)


@dataclass(frozen=True, slots=True)
class OwnTree:
    """The worker that the router sent most of a prompt to, while the fleet is balanced; else the least loaded.

    After the policy `cache_aware` of SGLang's router: at least half of the prompt must match, and a fleet is balanced
    as long as the most requests of a worker exceed the fewest by no more than 32, or by a tenth. Here a prefix belongs
    to the worker that was sent it last.
    """

    latency: LatencyModel
    min_share: float = 0.5
    max_more: int = 32
    max_times: float = 1.1

    def choose(self, query: Query, workers: Sequence[Candidate]) -> Decision:
        """Choose by what was sent."""
        loads = [worker.num_running for worker in workers]
        is_balanced = max(loads) - min(loads) <= self.max_more or max(loads) <= self.max_times * min(loads)
        sent = max(workers, key=lambda worker: (worker.num_seen_tokens, -worker.num_running, worker.name))
        is_known = sent.num_seen_tokens >= self.min_share * query.num_prompt_tokens
        worker = sent if is_balanced and is_known else least_loaded(query, workers)
        reason = Reason.HIT if worker is sent else Reason.LEAST_LOADED
        return Decision(worker, reason, expected_ttft_s(self.latency, query, worker, worker.num_hit_tokens))


_PURE: Final = partial(StickyHash, max_load=math.inf)
VARIANTS: Final[Mapping[str, Variant]] = {
    variant.name: variant
    for variant in (
        *(Variant(name, make) for name, make in ROUTINGS.items()),
        Variant("sticky-session", StickyHash, Key.SESSION),
        Variant("sticky-hash-pure", _PURE),
        Variant("sticky-session-pure", _PURE, Key.SESSION),
        Variant("kv-only-placed", _kv_only_placed),
        Variant("own-tree", OwnTree),
    )
}


def parse_variants(text: str) -> tuple[Variant, ...]:
    """Read names separated by commas; `ValueError` for one that is unknown or there twice."""
    names = [part.strip() for part in text.split(",")]
    for name in names:
        if name not in VARIANTS:
            raise ValueError(f"--router must be some of {', '.join(VARIANTS)}, got {name!r}")
    if len(set(names)) < len(names):
        raise ValueError(f"--router must name each rule once, got {text!r}")
    return tuple(VARIANTS[name] for name in names)


def require_keys(variants: tuple[Variant, ...], trace: Trace) -> None:
    """Raise `ValueError` where a variant's key is the session and the trace names none."""
    by_session = [variant.name for variant in variants if variant.key is Key.SESSION]
    if by_session and all(request.session < 0 for request in trace.requests):
        raise ValueError(f"--router {by_session[0]}: the trace must name sessions, got {trace.name!r}; use sticky-hash")
