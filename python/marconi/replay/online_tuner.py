"""The tuner's process: it replays what a server serves and says which alpha the server should go on with.

    stdin     one line of JSON, an `Assignment`, then records of finished requests (`tuning/record.py`)
    stdout    a line of JSON for each window that was tried: a `Decision`

It keeps a shadow of the server's cache, of the same size, by the same policies, at the alpha that the server has, and
tunes that (`tuning/tuner.py`). The shadow serves one request after the other and knows positions to a block, so it is a
likeness, not a copy: what it says is which alpha suits the traffic. Trials run in line; meanwhile records wait in the
pipe. It has the lowest priority and ends when its standard input does, so never after the server.
"""

import json
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, BinaryIO, TextIO

from marconi.model import huggingface
from marconi.model.huggingface.config import from_mapping
from marconi.model.learned_latency import LearnedLatency
from marconi.policy.admission.plan import Judicious
from marconi.policy.eviction.base import Costs, Need, PrefixFlops
from marconi.policy.eviction.lru import SeparateLru
from marconi.policy.eviction.utility import UtilityEviction
from marconi.replay.policies.tuned import ServerCaches
from marconi.replay.pools import JointPool, Pool, Pools
from marconi.replay.scheduling import Scheduling
from marconi.replay.server import ServerReplay
from marconi.tree import RadixTree
from marconi.tree.snapshot import TreeSnapshot, take_snapshot
from marconi.tuning import LRU, Decision, InlineWorkers, Objective, Schedule, Score, Setup, Tuner
from marconi.tuning.record import IDS_PER_BLOCK, Record, read

logger = logging.getLogger(__name__)

NICENESS = 19
MAX_GHOSTS = 1_000_000
_LOOK_S = 0.5
_TWO_POOLS = frozenset({Need.KV, Need.STATE})
_ONE_POOL = frozenset({Need.BYTES})


@dataclass(frozen=True, slots=True)
class Assignment:
    """The server that is tuned for."""

    hf_config: Mapping[str, Any]
    """The model's configuration, for what a prefix saves; where it cannot be read, FLOPs grow with the tokens."""
    kv_bytes_per_token: int
    state_bytes: int
    num_tokens: int
    num_slots: int
    chunk_tokens: int
    num_working_slots: int
    block_tokens: int
    max_ghost_tokens: int | None
    objective: Objective
    ttft_budget_s: float
    num_bytes: int | None = None
    """Of a server with one pool for KV and states; the counts above are then what it would hold of each alone."""

    @classmethod
    def from_json(cls, line: str | bytes) -> "Assignment":
        """Read the output of `to_json`; `ValueError` or `TypeError` for anything else."""
        values = json.loads(line)
        return cls(**values | {"objective": Objective(values["objective"])})

    def to_json(self) -> str:
        """One line; what of the configuration JSON does not know goes as text."""
        hf_config = json.loads(json.dumps(self.hf_config, default=str))
        return json.dumps({**asdict(self), "hf_config": hf_config})

    def costs(self) -> Costs:
        """The memory and the FLOPs of a checkpoint."""
        return costs_of(self.hf_config, self.kv_bytes_per_token, self.state_bytes)

    @property
    def needs(self) -> frozenset[Need]:
        """The kinds of memory that can be short."""
        return _TWO_POOLS if self.num_bytes is None else _ONE_POOL

    def memory(self) -> Pool:
        """Its memory, of which nothing is lent; KV in whole blocks."""
        block = self.block_tokens
        if self.num_bytes is None:
            return Pools(self.num_tokens // block * block, self.num_slots)
        return JointPool(self.num_bytes, self.kv_bytes_per_token, self.state_bytes, block)


def costs_of(hf_config: Mapping[str, Any], kv_bytes_per_token: int, state_bytes: int) -> Costs:
    """The memory that a checkpoint takes, from the pools, and the FLOPs that it saves, from the configuration.

    A configuration that the cost model cannot read still has a cache, and the log says what is taken for its FLOPs.
    """
    try:
        flops: PrefixFlops = huggingface.profile(from_mapping(hf_config, "config.json"), "served").prefix_flops
    except ValueError as error:
        logger.warning("marconi: FLOPs are taken to grow with the tokens alone (%s)", error)
        flops = float
    return Costs(kv_bytes_per_token, state_bytes, flops)


class Shadow:
    """The shadow of a server's cache, as its tuner sees it (`tuning/live.py`)."""

    def __init__(self, assignment: Assignment) -> None:
        """Raise `ValueError` for a server that holds no block or no request."""
        costs, block = assignment.costs(), assignment.block_tokens
        self.latency = LearnedLatency(costs.flops)
        self._utility = partial(UtilityEviction, costs, needs=assignment.needs)
        self._caches = ServerCaches(
            Judicious(block),
            assignment.memory,
            Scheduling(math.ceil(assignment.chunk_tokens / block) * block, assignment.num_working_slots),
        )
        least = assignment.num_working_slots + 1
        if not assignment.memory().holds(block, least):
            raise ValueError(f"a server must hold a block of KV and {least} states, got {assignment.memory()}")
        score = Score(assignment.objective, costs.flops, self.latency.seconds, assignment.ttft_budget_s)
        self.setup = Setup(self._utility, self._caches, score, partial(SeparateLru, assignment.needs))
        self._new_tree = partial(RadixTree, block, MAX_GHOSTS, IDS_PER_BLOCK, None, assignment.max_ghost_tokens)
        self._has_evicted = False
        self.alpha = 0.0
        self.forget()

    @property
    def has_evicted(self) -> bool:
        """True if memory has been short yet."""
        self._has_evicted = self._has_evicted or any(self._server.served.counters.num_evictions.values())
        return self._has_evicted

    def snapshot(self) -> TreeSnapshot:
        """Its tree."""
        return take_snapshot(self._server.served.tree)

    def apply(self, value: float) -> None:
        """Go on with this alpha."""
        self.alpha = self._rule.weight = value

    def serve(self, record: Record) -> None:
        """Serve what the server has served, and take over what it has learned of its prefills."""
        self.latency.overhead_s, self.latency.s_per_flop = record.overhead_s, record.s_per_flop
        self._server.serve(record.request)

    def forget(self) -> None:
        """The server's cache was flushed."""
        self._rule = self._utility(self.alpha)
        self._server: ServerReplay = self._caches(self._new_tree(), self._rule)


def decisions(records: Iterable[Record | None], shadow: Shadow, schedule: Schedule | None = None) -> Iterator[Decision]:
    """Yield the decision of each window of `records`; None among them is a flush."""
    tuner = Tuner(shadow, shadow.setup, InlineWorkers(), schedule)
    for record in records:
        if record is None:
            shadow.forget()
            continue
        shadow.serve(record)
        tuner.observe(record.request)
        decision = tuner.poll()
        if decision is not None:
            yield decision


def serve(source: BinaryIO, sink: TextIO) -> None:
    """Tune until `source` ends; `EOFError` if that is in the middle of what it says."""
    line = source.readline()
    if not line.endswith(b"\n"):
        raise EOFError(f"an assignment of {len(line)} bytes that does not end its line")
    assignment = Assignment.from_json(line)
    for decision in decisions(read(source, assignment.block_tokens), Shadow(assignment)):
        # Keys of JSON are text; a score is told for the values that matter.
        told = {
            "num_requests": decision.num_requests,
            "previous": decision.previous,
            "alpha": decision.value,
            "score": decision.scores.get(decision.value),
            "score_of_recency": decision.scores.get(LRU),
            "score_of_lru": decision.reference_score,
            "failure": decision.failure,
        }
        print(json.dumps(told), file=sink, flush=True)


def _end_with(parent: int) -> None:
    """End this process once its parent has, though it be in the middle of trials."""
    while os.getppid() == parent:
        time.sleep(_LOOK_S)
    os._exit(0)


if __name__ == "__main__":
    os.nice(NICENESS)
    # What there is to say, the server says: of the configuration itself, of trials as it reads the decisions.
    logging.disable(logging.WARNING)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    try:
        serve(sys.stdin.buffer, sys.stdout)
    except (BrokenPipeError, EOFError, KeyboardInterrupt):
        # The server is gone, or going.
        sys.exit(0)
