"""A server's shadow: replays what the server has served under other divisions of its memory, and says which is best.

    python -m marconi.replay.shadow        frames on stdin (`policy/record.py`), a line of JSON an answer on stdout

Requests are hashed into blocks of `BLOCK_TOKENS` as they come; their tokens are not kept. The latest are replayed, one
after the other, whenever `NUM_NEW` have come since the last answer, and for at most `SHARE` of the time. All options
have the bytes of the present division:

    present        the server's own pools, and its host tier if it has one
    two pools      at each of `RATIOS`, with the present host tier
    one pool       without a host tier
    host tiers     of `HOST_RATIOS` times the device's bytes, if larger than the present one, below each two pools

One pool and host tiers are options if the server supports them. An option names the flags that set it and those of the
server's that have to be left out. Two bounds (`baselines/hindsight`) are beside them: the most that any rule hits in
the present memory, and in any.

A load from the host is made where it saves time, by the link's measured bandwidth and the server's learned time of a
prefill. If either is not known, loads are free, and a host tier's hit rate is an upper bound. The measured and the
present hit rate differ by what a serial replay in blocks leaves out: concurrent requests, and positions within a block.

The process ends when its stdin does, so it never outlives the server.
"""

import contextlib
import json
import math
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import IO, Any, Final, NamedTuple

import numpy as np

from marconi.baselines.hindsight.bound import Limit, most_hit_tokens
from marconi.baselines.hindsight.reuse import Reuse
from marconi.model.latency import LatencyModel
from marconi.model.learned_latency import LearnedLatency
from marconi.policy.base import Costs
from marconi.policy.catalog import PolicySpec
from marconi.policy.record import TOKEN_BYTES, ServedRequest, ServerMemory, read_frame
from marconi.policy.request import Request, Trace
from marconi.replay.memory import format_bytes
from marconi.replay.policies import CacheConfig, Host, build, require_possible
from marconi.replay.pools import JointPool, Pool, Pools
from marconi.replay.trace.identity import DenseIds
from marconi.tree.node import ID_BYTES

BLOCK_TOKENS: Final = 64
RATIOS: Final = (0.1, 0.2, 0.45, 0.9, 1.8)
HOST_RATIOS: Final = (1, 2, 4)
NUM_NEW: Final = 200
"""Requests between two answers."""
SHARE: Final = 0.1
"""Share of the wall-clock time that is spent replaying, at most."""
LEAST_GAIN: Final = 0.03
"""Share of the recomputed tokens that an option must save to be recommended."""
_DIGEST_BYTES: Final = 8


class HashedRequest(NamedTuple):
    """A served request, without its tokens."""

    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    namespace: int
    digests: bytes
    """Each stands for a block and all before it: whole ones, and the prompt's last if no output completes it."""
    overhead_s: float = 0.0
    s_per_flop: float = 0.0
    """The server's learned time of a prefill; 0 until it is known."""

    @classmethod
    def of(cls, served: ServedRequest) -> "HashedRequest":
        """Hash the blocks of a request."""
        num_tokens = served.num_prompt_tokens + served.num_output_tokens
        num_named = max(num_tokens // BLOCK_TOKENS * BLOCK_TOKENS, served.num_prompt_tokens)
        step, digest, digests = BLOCK_TOKENS * TOKEN_BYTES, b"", []
        for start in range(0, num_named * TOKEN_BYTES, step):
            block = served.ids[start : min(start + step, num_named * TOKEN_BYTES)]
            digest = blake2b(digest + block, digest_size=_DIGEST_BYTES).digest()
            digests.append(digest)
        counts = (served.num_prompt_tokens, served.num_output_tokens, served.num_cached_tokens)
        learned = (served.overhead_s, served.s_per_flop)
        return cls(served.arrival_s, *counts, served.namespace, b"".join(digests), *learned)


class Window:
    """The latest requests, within bounds. Owner: one thread adds, another takes."""

    def __init__(self, max_requests: int = 20_000, max_bytes: int = 64 << 20, num_new: int = NUM_NEW) -> None:
        """Hold up to `max_requests` requests and `max_bytes` bytes of digests; full of news after `num_new`."""
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self._num_new = num_new
        self._requests = deque[HashedRequest]()
        self._num_bytes = 0
        self._num_waiting = 0
        self._changed = threading.Condition()

    def add(self, request: HashedRequest) -> None:
        """Add a request; the oldest are dropped for it."""
        with self._changed:
            self._requests.append(request)
            self._num_bytes += len(request.digests)
            while len(self._requests) > self._max_requests or self._num_bytes > self._max_bytes:
                self._num_bytes -= len(self._requests.popleft().digests)
            self._num_waiting += 1
            self._changed.notify()

    def take(self) -> tuple[HashedRequest, ...]:
        """Wait for enough new requests, and return all that are held."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_waiting >= self._num_new)
            self._num_waiting = 0
            return tuple(self._requests)


class TokensAlone(LatencyModel):
    """A prefill that takes a second a token: no option is about time."""

    def seconds(self, num_cached_tokens: int, num_prompt_tokens: int) -> float:
        """Tokens that are computed."""
        return float(num_prompt_tokens - num_cached_tokens)

    def smallest_cached_tokens(self, num_prompt_tokens: int, budget_s: float) -> int | None:
        """The inverse."""
        return max(0, num_prompt_tokens - int(budget_s))


@dataclass(frozen=True, slots=True)
class Option:
    """A division of memory."""

    flag: str
    """SGLang's flags for it; empty for the present division."""
    num_bytes: int
    mamba_ratio: float | None
    """Bytes for states over bytes for KV; None for one pool."""
    host_bytes: int = 0
    pools: tuple[int, int] | None = None
    """Exact sizes of two pools in tokens and slots; None follows the ratio."""
    leave_out: tuple[str, ...] = ()
    """Flags of the server's with which `flag` would be refused or have no effect."""

    def __str__(self) -> str:
        """Its flags, and those to leave out."""
        return f"{self.flag} without {' and '.join(self.leave_out)}" if self.leave_out else self.flag

    def pool(self, costs: Costs) -> Pool:
        """The pools that no ratio gives, all of them free: one pool, or two of exact sizes."""
        if self.pools is None:
            return JointPool(self.num_bytes, costs.kv_bytes_per_token, costs.state_bytes, BLOCK_TOKENS)
        num_tokens, num_slots = self.pools
        return Pools(num_tokens // BLOCK_TOKENS * BLOCK_TOKENS, num_slots)


def options(memory: ServerMemory) -> tuple[Option, ...]:
    """List the present division, and after it the others, in order of preference among equals."""
    kv_bytes, state_bytes = memory.num_tokens * memory.kv_bytes_per_token, memory.num_slots * memory.state_bytes
    present = (
        Option("", memory.joint_bytes, None)
        if memory.joint_bytes
        else Option(
            "",
            kv_bytes + state_bytes,
            state_bytes / max(kv_bytes, 1),
            memory.host_bytes,
            (memory.num_tokens, memory.num_slots),
        )
    )
    two_pools = [
        Option(
            f"--mamba-full-memory-ratio {ratio:g}",
            present.num_bytes,
            ratio,
            memory.host_bytes,
            leave_out=_given(memory, "--enable-unified-memory", "--max-mamba-cache-size"),
        )
        for ratio in RATIOS
    ]
    may_join = memory.may_join and not memory.joint_bytes
    without_tier = _given(memory, "--enable-hierarchical-cache")
    one_pool = [Option("--enable-unified-memory", present.num_bytes, None, leave_out=without_tier)] if may_join else []
    above = two_pools if memory.joint_bytes else [present, *two_pools]
    hosts = [
        replace(
            each,
            flag=f"{each.flag} --enable-hierarchical-cache --hicache-ratio {times}".lstrip(),
            host_bytes=times * present.num_bytes,
            leave_out=each.leave_out + _given(memory, "--hicache-size"),
        )
        for times in HOST_RATIOS
        for each in above
        if memory.may_add_host and times * present.num_bytes > memory.host_bytes
    ]
    return (present, *two_pools, *one_pool, *hosts)


def _given(memory: ServerMemory, *flags: str) -> tuple[str, ...]:
    """Those of `flags` that the server was started with."""
    return tuple(flag for flag in flags if flag in memory.given)


def trace_of(requests: Iterable[HashedRequest]) -> Trace:
    """Convert at least one request to a block trace, in order of arrival."""
    ordered = sorted(requests, key=lambda request: request.arrival_s)
    blocks, namespaces = _numbered([request.digests for request in ordered]), DenseIds()
    start_s = ordered[0].arrival_s
    return Trace(
        "served",
        BLOCK_TOKENS,
        tuple(
            Request(
                path=path,
                num_prompt_tokens=each.num_prompt_tokens,
                num_output_tokens=each.num_output_tokens,
                num_known_tokens=(each.num_prompt_tokens + each.num_output_tokens) // BLOCK_TOKENS * BLOCK_TOKENS,
                arrival_s=each.arrival_s - start_s,
                namespace=namespaces[each.namespace],
            )
            for each, path in zip(ordered, blocks, strict=True)
        ),
    )


def _numbered(digests: Sequence[bytes]) -> Iterator[bytes]:
    """Convert digests to paths of ids, numbered from 0 in the order of their first use.

    A dictionary would take a hundred bytes a block.
    """
    joined = np.frombuffer(b"".join(digests), dtype="<u8")
    _, first, inverse = np.unique(joined, return_index=True, return_inverse=True)
    numbers = np.empty(len(first), dtype="<u4")
    numbers[np.argsort(first)] = np.arange(len(first), dtype="<u4")
    path, end = numbers[inverse].tobytes(), 0
    for each in digests:
        start, end = end, end + len(each) // _DIGEST_BYTES * ID_BYTES
        yield path[start:end]


class Shadow:
    """The other servers that a server could have been."""

    def __init__(self, memory: ServerMemory) -> None:
        """Raise `ValueError` for a policy that cannot be replayed."""
        self._policy = PolicySpec.parse(memory.policy)
        per_token, per_pair = memory.flops_per_token, memory.flops_per_squared_token
        self._costs = Costs(
            memory.kv_bytes_per_token, memory.state_bytes, lambda tokens: (per_token + per_pair * tokens) * tokens
        )
        self._link_bytes_per_s = memory.link_bytes_per_s
        self.options = options(memory)
        require_possible(self._policy, self._config(self.options[0], Trace("served", BLOCK_TOKENS, ())))

    def num_hit_tokens(self, option: Option, trace: Trace, latency: LatencyModel | None = None) -> int:
        """Hit tokens of `trace` under an option; without a `latency`, loads are free."""
        target = build(self._policy, self._config(option, trace, latency))
        return sum(map(target.cache.serve, trace.requests))

    def advise(self, requests: Iterable[HashedRequest]) -> dict[str, Any]:
        """Replay at least one request under every option, and say what came of it."""
        requests = tuple(requests)
        trace, latency = trace_of(requests), self._latency(requests[-1])
        num_prompt = sum(request.num_prompt_tokens for request in requests)
        present, *others = (self.num_hit_tokens(option, trace, latency) / num_prompt for option in self.options)
        reuse = Reuse.of(trace)
        rates = dict(zip(self.options[1:], others, strict=True))
        return {
            "num_requests": len(requests),
            "num_prompt_tokens": num_prompt,
            "measured_hit_rate": round(sum(request.num_cached_tokens for request in requests) / num_prompt, 6),
            "present_hit_rate": round(present, 6),
            "best_hit_rate": round(most_hit_tokens(reuse, self._limits()) / num_prompt, 6),
            "unlimited_hit_rate": round(1 - reuse.num_new_tokens / num_prompt, 6),
            "counts_load_times": latency is not None,
            "options": [
                {
                    "flag": option.flag,
                    "leave_out": list(option.leave_out),
                    "host_bytes": option.host_bytes,
                    "hit_rate": round(rate, 6),
                }
                for option, rate in rates.items()
            ],
            "advice": sentence(len(requests), self.options[0].host_bytes, present, rates, latency is not None),
        }

    def _latency(self, latest: HashedRequest) -> LatencyModel | None:
        """The server's prefill times when it served `latest`; None if they or the link's bandwidth are not known."""
        learned = LearnedLatency(self._costs.flops)
        learned.follow(latest.overhead_s, latest.s_per_flop)
        return learned if learned.is_known and self._link_bytes_per_s else None

    def _limits(self) -> tuple[Limit, ...]:
        """The present memory; with a host tier all of it as one pool, which no tier outdoes."""
        present, kv_bytes, state_bytes = self.options[0], self._costs.kv_bytes_per_token, self._costs.state_bytes
        if present.pools is None or present.host_bytes:
            return (Limit(present.num_bytes + present.host_bytes, kv_bytes, state_bytes),)
        num_tokens, num_slots = present.pools
        return Limit(num_tokens, 1, 0), Limit(num_slots, 0, 1)

    def _config(self, option: Option, trace: Trace, latency: LatencyModel | None = None) -> CacheConfig:
        bytes_per_s = math.inf if latency is None else self._link_bytes_per_s
        host = Host(option.host_bytes, bytes_per_s) if option.host_bytes else None
        pool = option.pool if option.mamba_ratio is None or option.pools is not None else None
        return CacheConfig(
            trace, self._costs, latency or TokensAlone(), option.num_bytes, option.mamba_ratio, host=host, pool=pool
        )


def sentence(
    num_requests: int, host_bytes: int, present: float, rates: Mapping[Option, float], counts_load_times: bool
) -> str:
    """Recommend the best division of the same memory, and a host tier larger than the present `host_bytes`.

    A division that saves less than `LEAST_GAIN` of the computed prompt tokens is not named. Of the host tiers that save
    more, it is the smallest within `LEAST_GAIN` of the best.
    """
    over = f"Over the last {num_requests:,} requests,"
    same = {option: rate for option, rate in rates.items() if option.host_bytes <= host_bytes}
    best = max(same, key=same.__getitem__)
    fewer = _fewer(same[best], present)
    without = max(present, same[best])
    larger = {
        option: rate for option, rate in rates.items() if option not in same and _fewer(rate, without) >= LEAST_GAIN
    }
    host = ""
    if larger:
        most = max(larger.values())
        tier = min(
            (option for option in larger if _fewer(most, larger[option]) < LEAST_GAIN),
            key=lambda option: (option.host_bytes, -larger[option]),
        )
        at_most = "" if counts_load_times else "at most "
        host = (
            f"{tier}, with {format_bytes(tier.host_bytes)} of host memory per rank, {at_most}"
            f"{100 * _fewer(larger[tier], present):.1f} % fewer ({at_most}{100 * larger[tier]:.1f} % cached)"
        )
    if fewer >= LEAST_GAIN:
        return (
            f"{over} {best} would have computed {100 * fewer:.1f} % fewer prompt tokens than the present division of "
            f"memory ({100 * same[best]:.1f} % cached, {100 * present:.1f} % at present)"
            + (f", and {host}." if host else ".")
        )
    within = f"{over} the present division of memory is within {100 * LEAST_GAIN:.0f} % of the best that was tried"
    return f"{within} in the same memory; {host}, {100 * present:.1f} % at present." if host else f"{within}."


def _fewer(rate: float, than: float) -> float:
    """Share of the prompt tokens computed at a hit rate of `than` that a hit rate of `rate` saves."""
    return 1 - (1 - rate) / (1 - than) if than < 1 else 0.0


def answer(shadow: Shadow, window: Window, write: Callable[[str], None]) -> None:
    """Answer for as long as there is somebody to read."""
    while True:
        requests = window.take()
        start_s = time.monotonic()
        try:
            write(json.dumps(shadow.advise(requests)) + "\n")
        except BrokenPipeError:
            return
        time.sleep((1 / SHARE - 1) * (time.monotonic() - start_s))


def run(stdin: IO[bytes], write: Callable[[str], None]) -> int:
    """Follow a server until `stdin` ends; returns the status of the process, 2 for a malformed message."""
    window = Window()
    try:
        first = read_frame(stdin)
        if first is None:
            return 0
        shadow = Shadow(ServerMemory.from_bytes(first))
        threading.Thread(target=_guarded, args=(shadow, window, write), daemon=True).start()
        while (payload := read_frame(stdin)) is not None:
            window.add(HashedRequest.of(ServedRequest.from_bytes(payload)))
    except ValueError as error:
        _say(str(error))
        return 2
    return 0


def _guarded(shadow: Shadow, window: Window, write: Callable[[str], None]) -> None:
    try:
        answer(shadow, window, write)
    except Exception as error:
        _say(f"the replay failed: {error!r}")
        os._exit(1)


def _say(what: str) -> None:
    print(f"marconi: shadow: {what}", file=sys.stderr, flush=True)


def _print(line: str) -> None:
    sys.stdout.write(line)
    sys.stdout.flush()


if __name__ == "__main__":
    # A Ctrl-C in the terminal is the server's to handle.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.nice(19)
    # A replay may be under way, whose thread nobody waits for.
    os._exit(run(sys.stdin.buffer, _print))
