"""The results of a replay: a `PolicyResult` for each policy and memory, and all of them as JSON.

Definitions

    token hit rate     hit tokens / prompt tokens, over all requests
    recomputed tokens  prompt tokens - hit tokens
    amplification      of prefill: recomputed tokens / prompt tokens that are new, which no cache could have
    bound              of the token hit rate: what no rule exceeds in that memory (`replay/most_hit.py`)
    FLOPs saved        sum over requests of FLOPs(hit tokens), and as a share of the sum of FLOPs(prompt tokens)
    percentile p       nearest rank: the smallest time that at least p percent of the requests do not exceed
    missed tokens      recomputed tokens by cause, which add up to them
    loads              requests that started from a copy on the host; what they waited for it is in their TTFT
    reads, writes      states that a store behind the host was read for, or took: with KV, in bytes
    prefill seconds    of all prefills, and of the reads and loads before them, without waiting
    SLO violation      a request whose first token came later than the objective
    requests too large requests whose KV and one state alone exceed the memory: served, never inserted

A block cache's run has, in addition, what the Mooncake-format block replays print, by their names: `overall_hit_rate`
(the token hit rate), `total_hit_tokens`, `total_prompt_tokens`, and `final_cache_blocks`, the blocks held at the end.

Everything but `requests_per_s`, the speed of the replay itself, follows from the trace, the seed and the options, to
the byte. The speed depends on the machine, so the JSON holds it only where timings were asked for, and null elsewhere.
"""

import json
import math
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from marconi.model.profile import ModelProfile
from marconi.policy.base import Costs
from marconi.policy.request import Trace
from marconi.replay.outcome import Outcome
from marconi.replay.server import ServerReplay
from marconi.replay.store import Storage, Traffic
from marconi.replay.target import ReplayTarget


def nearest_rank(rising: Sequence[float], percent: int) -> float:
    """The percentile of at least one value, in rising order: the least that `percent` (1 to 100) do not exceed."""
    return rising[-(-percent * len(rising) // 100) - 1]


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Nearest-rank percentiles, in the unit of the ranked values."""

    p50: float
    p95: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Percentiles":
        """Rank at least one value."""
        ordered = sorted(values)
        return cls(*(nearest_rank(ordered, percent) for percent in (50, 95, 99)))

    def to_json(self) -> dict[str, float]:
        """Convert to JSON, by name."""
        return {"p50": self.p50, "p95": self.p95, "p99": self.p99}


@dataclass(frozen=True, slots=True)
class BlockReplay:
    """The numbers that the Mooncake-format block replays print of a trace on a block cache."""

    overall_hit_rate: float
    """`total_hit_tokens / total_prompt_tokens`, 0.0 without a prompt token."""
    total_hit_tokens: int
    total_prompt_tokens: int
    final_cache_blocks: int
    """Blocks resident after the last request; ghosts are not."""


class Layout(NamedTuple):
    """Memory and how it is divided."""

    memory_bytes: int
    host_bytes: int
    mamba_ratio: float | None
    """Bytes for states over bytes for KV; None for one pool."""
    int8_checkpoints: bool = False
    """True if the tree's states are in int8."""
    storage_bytes: int = 0
    """Behind the host."""


@dataclass(frozen=True, slots=True)
class PolicyResult:
    """The result of one policy with one memory on one trace. Counts are of requests, states and tokens as named."""

    policy: str
    memory_bytes: int
    host_bytes: int
    """The host tier's memory; 0 without one."""
    mamba_full_memory_ratio: float | None
    """Bytes for states over bytes for KV that it ran at; None without a pool of each."""
    chosen: str | None
    """For the best of several policies in hindsight, which one it was; for a rule that is tuned, its number."""
    num_requests: int
    num_prompt_tokens: int
    num_hit_tokens: int
    flops_saved: float
    flops_total: float
    ttft_s: Percentiles
    slo_s: float
    num_slo_violations: int
    num_too_large: int
    num_states_written: int
    num_states_kept: int
    num_states_hit: int
    """Requests that started from a state."""
    num_evictions: tuple[tuple[str, int], ...]
    """Evictions by the resource that was short: one pool's bytes, the KV pool or the state pool."""
    num_evicted_tokens: int
    held_bytes: int
    """At the end."""
    prefill_s: float
    """Seconds of all prefills, and of the reads and loads before them."""
    num_loads: int
    """Requests that started from a copy on the host."""
    num_loaded_tokens: int
    load_s: float
    requests_per_s: float
    """Speed of the replay; depends on the machine."""
    num_missed_tokens: tuple[tuple[str, int], ...] = ()
    """Prompt tokens that were computed, by cause (`policy/misses.py`); none where the policy is a block cache."""
    final_cache_blocks: int | None = None
    """Blocks held at the end; None where the policy is no block cache."""
    int8_checkpoints: bool = False
    """`--enable-int8-mamba-checkpoint`."""
    storage: Storage | None = None
    """The store behind the host tier."""
    traffic: Traffic | None = None
    """Its reads and writes; None without one."""

    @property
    def layout(self) -> Layout:
        """The memory that it ran with."""
        storage_bytes = 0 if self.storage is None else self.storage.memory_bytes
        return Layout(
            self.memory_bytes, self.host_bytes, self.mamba_full_memory_ratio, self.int8_checkpoints, storage_bytes
        )

    @property
    def token_hit_rate(self) -> float:
        """0 without a prompt token."""
        return self.num_hit_tokens / self.num_prompt_tokens if self.num_prompt_tokens else 0.0

    @property
    def flops_saved_share(self) -> float:
        """Share of the FLOPs of a prefill without a cache."""
        return self.flops_saved / self.flops_total if self.flops_total else 0.0

    @property
    def block_replay(self) -> BlockReplay | None:
        """The numbers of the Mooncake-format block replays; None where the policy is no block cache."""
        if self.final_cache_blocks is None:
            return None
        return BlockReplay(self.token_hit_rate, self.num_hit_tokens, self.num_prompt_tokens, self.final_cache_blocks)

    def to_json(self, timings: bool) -> dict[str, Any]:
        """Convert to the result file's JSON; the replay's own speed only with `timings`."""
        replayed = self.block_replay
        return {
            "policy": self.policy,
            "memory_bytes": self.memory_bytes,
            "host_memory_bytes": self.host_bytes,
            "mamba_full_memory_ratio": self.mamba_full_memory_ratio,
            "int8_checkpoints": self.int8_checkpoints,
            "chosen": self.chosen,
            "num_requests": self.num_requests,
            "num_requests_too_large": self.num_too_large,
            "prompt_tokens": self.num_prompt_tokens,
            "hit_tokens": self.num_hit_tokens,
            "token_hit_rate": self.token_hit_rate,
            "recomputed_tokens": self.num_prompt_tokens - self.num_hit_tokens,
            "flops_saved": self.flops_saved,
            "flops_saved_share": self.flops_saved_share,
            "ttft_s": self.ttft_s.to_json(),
            "slo_s": self.slo_s,
            "slo_violations": self.num_slo_violations,
            "states_written": self.num_states_written,
            "states_kept": self.num_states_kept,
            "states_hit": self.num_states_hit,
            "evictions": sum(count for _, count in self.num_evictions),
            "evictions_by_reason": dict(self.num_evictions),
            "evicted_tokens": self.num_evicted_tokens,
            "held_bytes": self.held_bytes,
            "prefill_s": self.prefill_s,
            "loads": self.num_loads,
            "loaded_tokens": self.num_loaded_tokens,
            "load_s": self.load_s,
            "missed_tokens": dict(self.num_missed_tokens),
            "requests_per_s": self.requests_per_s if timings else None,
            **({} if replayed is None else asdict(replayed)),
            **self._storage_to_json(),
        }

    def _storage_to_json(self) -> dict[str, Any]:
        storage, traffic = self.storage, self.traffic
        if storage is None or traffic is None:
            return {}
        return {
            "storage_memory_bytes": storage.memory_bytes,
            "storage_bytes_per_s": storage.bytes_per_s,
            "storage_hit_tokens": traffic.num_hit_tokens,
            "storage_writes": traffic.num_writes,
            "storage_written_bytes": traffic.num_written_bytes,
            "storage_reads": traffic.num_reads,
            "storage_read_bytes": traffic.num_read_bytes,
            "storage_read_s": traffic.read_s,
        }


@dataclass(frozen=True, slots=True)
class Bounds:
    """Tokens that no cache can hit, and the most that a rule can hit in the same memory."""

    num_new_tokens: int
    """Prompt tokens that no request before had computed."""
    most_hit_tokens: Mapping[Layout, int]

    def amplification(self, run: PolicyResult) -> float:
        """Prompt tokens that `run` computed over those that were new; 1 where none was."""
        return (run.num_prompt_tokens - run.num_hit_tokens) / self.num_new_tokens if self.num_new_tokens else 1.0

    def hit_rate(self, run: PolicyResult) -> float | None:
        """The token hit rate that no rule exceeds in the memory of `run`; None where there is no such bound."""
        most = self.most_hit_tokens.get(run.layout) if run.final_cache_blocks is None else None
        return None if most is None else most / max(run.num_prompt_tokens, 1)


@dataclass(frozen=True, slots=True)
class Report:
    """Every run on one trace."""

    trace: str
    model: str
    seed: int
    mode: str
    device: str
    unbounded_bytes: int | None
    """Final size of an unbounded cache, if it was computed."""
    bounds: Bounds
    runs: tuple[PolicyResult, ...]
    remarks: tuple[str, ...] = ()
    """Differences from what was served: tokens that are estimated, records that were left out."""

    def to_json(self, timings: bool = False) -> dict[str, Any]:
        """Convert to the result file's JSON."""
        return {
            "trace": self.trace,
            "model": self.model,
            "seed": self.seed,
            "mode": self.mode,
            "device": self.device,
            "unbounded_bytes": self.unbounded_bytes,
            "new_tokens": self.bounds.num_new_tokens,
            "remarks": list(self.remarks),
            "runs": [self._run_to_json(run, timings) for run in self.runs],
        }

    def _run_to_json(self, run: PolicyResult, timings: bool) -> dict[str, Any]:
        found = {
            "bound_token_hit_rate": self.bounds.hit_rate(run),
            "prefill_amplification": self.bounds.amplification(run),
        }
        return run.to_json(timings) | found


def dumps(document: dict[str, Any]) -> str:
    """JSON as every result file is written."""
    return json.dumps(document, indent=2, allow_nan=False) + "\n"


def require_writable(path: Path | None, option: str = "--json") -> None:
    """`ValueError` for the file of `option` that could not be written, before the work whose result it is to hold."""
    if path is None:
        return
    if path.is_dir():
        raise ValueError(f"{option} {path} is a folder: give a file")
    if not path.parent.is_dir():
        raise ValueError(f"{option} {path}: the folder {path.parent} does not exist")
    if path.exists() and not os.access(path, os.W_OK):
        raise ValueError(f"{option} {path} cannot be written: no permission")
    if not _is_replaceable(path):
        return
    try:
        _temporary_beside(path).unlink()
    except OSError as error:
        raise ValueError(f"{option} {path} cannot be written: {error.strerror}") from None


def write(path: Path, document: dict[str, Any]) -> None:
    """Write a result file whole or not at all; `OSError`, in which it is named, if that fails.

    What is no plain file, a device, a pipe or a link, is written to directly.
    """
    text = dumps(document)
    try:
        if not _is_replaceable(path):
            path.write_text(text, encoding="utf-8")
            return
        temporary = _temporary_beside(path)
        try:
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise OSError(f"--json {path} cannot be written: {error.strerror}") from None


def _is_replaceable(path: Path) -> bool:
    return not path.is_symlink() and (path.is_file() or not path.exists())


def _temporary_beside(path: Path) -> Path:
    """A new empty file in the folder of `path`, with the permissions that `path` has or would get."""
    temporary = path.with_name(f".{path.name[:100]}.{secrets.token_hex(4)}")
    temporary.touch(exist_ok=False)
    if path.exists():
        temporary.chmod(path.stat().st_mode & 0o777)
    return temporary


@dataclass(frozen=True, slots=True)
class Label:
    """The label of a result."""

    policy: str
    memory_bytes: int
    host_bytes: int
    slo_s: float
    int8_checkpoints: bool = False


def summarise(
    label: Label, trace: Trace, model: ModelProfile, costs: Costs, target: ReplayTarget, outcome: Outcome
) -> PolicyResult:
    """Sum up a replay of at least one request."""
    cache = target.cache
    counters, held = cache.counters, cache.held
    store = cache.store if isinstance(cache, ServerReplay) else None
    return PolicyResult(
        policy=label.policy,
        memory_bytes=label.memory_bytes,
        host_bytes=label.host_bytes,
        mamba_full_memory_ratio=target.mamba_ratio,
        chosen=cache.chosen if isinstance(cache, ServerReplay) else None,
        num_requests=len(trace.requests),
        num_prompt_tokens=sum(request.num_prompt_tokens for request in trace.requests),
        num_hit_tokens=sum(outcome.hit_tokens),
        flops_saved=math.fsum(model.prefix_flops_of(outcome.hit_tokens).tolist()),
        flops_total=math.fsum(
            model.prefix_flops_of([request.num_prompt_tokens for request in trace.requests]).tolist()
        ),
        ttft_s=Percentiles.of(outcome.ttft_s),
        slo_s=label.slo_s,
        num_slo_violations=sum(ttft_s > label.slo_s for ttft_s in outcome.ttft_s),
        num_too_large=counters.num_too_large,
        num_states_written=counters.num_states_written,
        num_states_kept=held.num_states,
        num_states_hit=counters.num_states_hit,
        num_evictions=tuple((need.value, count) for need, count in counters.num_evictions.items()),
        num_evicted_tokens=counters.num_evicted_tokens,
        held_bytes=held.num_tokens * costs.kv_bytes_per_token + held.num_states * costs.state_bytes,
        prefill_s=outcome.prefill_s,
        num_loads=counters.num_loads,
        num_loaded_tokens=counters.num_loaded_tokens,
        load_s=counters.load_s,
        requests_per_s=len(trace.requests) / max(outcome.wall_s, 1e-9),
        num_missed_tokens=tuple((cause.value, num) for cause, num in counters.num_missed_tokens.items() if num),
        final_cache_blocks=None if isinstance(cache, ServerReplay) else cache.num_blocks,
        int8_checkpoints=label.int8_checkpoints,
        storage=None if store is None else store.storage,
        traffic=None if store is None else store.traffic,
    )
