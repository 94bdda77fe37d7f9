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
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from marconi.replay.outcome import Outcome
from marconi.replay.server import ServerReplay
from marconi.replay.store import Traffic
from marconi.replay.target import ReplayTarget
from marconi.replay.task import ReplayInputs, Task

STDOUT: Final = Path("-")
"""In place of a result file."""


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
        return asdict(self)


@dataclass(frozen=True, slots=True)
class PolicyResult:
    """The result of one policy with one memory on one trace. Counts are of requests, states and tokens as named."""

    task: Task
    """The one that was replayed, with the ratio that it ran at: None without a pool each for states and KV."""
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
    """Prompt tokens that were computed, by cause (`policy/causes.py`); none where the policy is a block cache."""
    final_cache_blocks: int | None = None
    """Blocks held at the end; None where the policy is no block cache."""
    traffic: Traffic | None = None
    """Reads and writes of the store behind the host tier; None without one."""
    num_new_tokens: int = 0
    """Prompt tokens that no request before had computed; 0 as long as no bounds are known."""
    most_hit_tokens: int | None = None
    """Hit tokens that no rule exceeds in the same memory; None where there is no such bound."""

    @property
    def token_hit_rate(self) -> float:
        """0 without a prompt token."""
        return self.num_hit_tokens / self.num_prompt_tokens if self.num_prompt_tokens else 0.0

    @property
    def flops_saved_share(self) -> float:
        """Share of the FLOPs of a prefill without a cache."""
        return self.flops_saved / self.flops_total if self.flops_total else 0.0

    @property
    def bound_token_hit_rate(self) -> float | None:
        """The token hit rate that no rule exceeds in the same memory; None where there is no such bound."""
        most = self.most_hit_tokens
        return None if most is None else most / max(self.num_prompt_tokens, 1)

    @property
    def amplification(self) -> float:
        """Prompt tokens that were computed over those that were new; 1 where none was."""
        return (self.num_prompt_tokens - self.num_hit_tokens) / self.num_new_tokens if self.num_new_tokens else 1.0

    @property
    def block_replay(self) -> dict[str, float]:
        """The numbers of the Mooncake-format block replays, by name; none where the policy is no block cache."""
        if self.final_cache_blocks is None:
            return {}
        return {
            "overall_hit_rate": self.token_hit_rate,
            "total_hit_tokens": self.num_hit_tokens,
            "total_prompt_tokens": self.num_prompt_tokens,
            "final_cache_blocks": self.final_cache_blocks,
        }

    def to_json(self, timings: bool) -> dict[str, Any]:
        """Convert to the result file's JSON; the replay's own speed only with `timings`."""
        task = self.task
        return {
            "policy": str(task.policy),
            "memory_bytes": task.memory_bytes,
            "host_memory_bytes": task.host_bytes,
            "mamba_full_memory_ratio": task.mamba_ratio,
            "int8_checkpoints": task.int8_checkpoints,
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
            **self.block_replay,
            **self._storage_to_json(),
        }

    def _storage_to_json(self) -> dict[str, Any]:
        storage, traffic = self.task.storage, self.traffic
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
class Report:
    """Every run on one trace."""

    inputs: ReplayInputs
    unbounded_bytes: int | None
    """Final size of an unbounded cache, if it was computed."""
    runs: tuple[PolicyResult, ...]
    """With their bounds."""

    def to_json(self, timings: bool = False) -> dict[str, Any]:
        """Convert to the result file's JSON."""
        inputs = self.inputs
        return {
            "trace": inputs.trace.name,
            "model": inputs.model.name,
            "seed": inputs.seed,
            "mode": inputs.mode.value,
            "device": inputs.device_name,
            "unbounded_bytes": self.unbounded_bytes,
            "new_tokens": self.runs[0].num_new_tokens,
            "remarks": list(inputs.remarks),
            "runs": [
                {
                    **run.to_json(timings),
                    "bound_token_hit_rate": run.bound_token_hit_rate,
                    "prefill_amplification": run.amplification,
                }
                for run in self.runs
            ],
        }


def dumps(document: dict[str, Any]) -> str:
    """JSON as every result file is written."""
    return json.dumps(document, indent=2, allow_nan=False) + "\n"


def require_writable(path: Path | None, option: str = "--json") -> None:
    """`ValueError` for the file of `option` that could not be written, before the work whose result it is to hold."""
    if path is None or path == STDOUT:
        return
    if path.is_dir():
        raise ValueError(f"{option} must be a file, got the folder {path}")
    if not path.parent.is_dir():
        raise ValueError(f"{option} must be in an existing folder, got {path}")
    if path.exists() and not os.access(path, os.W_OK):
        raise ValueError(f"{option} {path} cannot be written: no permission")
    if not _is_replaceable(path):
        return
    try:
        _temporary_beside(path).unlink()
    except OSError as error:
        raise ValueError(f"{option} {path} cannot be written: {error.strerror}") from None


def write(path: Path, document: dict[str, Any]) -> None:
    """Write a result file whole or not at all, or to `STDOUT`; `OSError`, in which it is named, if that fails.

    What is no plain file, a device, a pipe or a link, is written to directly.
    """
    text = dumps(document)
    if path == STDOUT:
        sys.stdout.write(text)
        return
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


def summarise(inputs: ReplayInputs, task: Task, target: ReplayTarget, outcome: Outcome) -> PolicyResult:
    """Sum up a replay of at least one request; `task` has the ratio that it ran at."""
    requests, model, costs = inputs.trace.requests, inputs.model, task.costs(inputs)
    counters, held = target.counters, target.held
    server = target if isinstance(target, ServerReplay) else None
    num_prompt_tokens = [request.num_prompt_tokens for request in requests]
    return PolicyResult(
        task=task,
        chosen=None if server is None else server.chosen,
        num_requests=len(requests),
        num_prompt_tokens=sum(num_prompt_tokens),
        num_hit_tokens=sum(outcome.hit_tokens),
        flops_saved=math.fsum(model.prefix_flops_of(outcome.hit_tokens).tolist()),
        flops_total=math.fsum(model.prefix_flops_of(num_prompt_tokens).tolist()),
        ttft_s=Percentiles.of(outcome.ttft_s),
        slo_s=inputs.slo_s,
        num_slo_violations=sum(ttft_s > inputs.slo_s for ttft_s in outcome.ttft_s),
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
        requests_per_s=len(requests) / max(outcome.wall_s, 1e-9),
        num_missed_tokens=tuple((cause.value, num) for cause, num in counters.num_missed_tokens.items() if num),
        final_cache_blocks=None if isinstance(target, ServerReplay) else target.num_blocks,
        traffic=None if server is None or server.store is None else server.store.traffic,
    )
