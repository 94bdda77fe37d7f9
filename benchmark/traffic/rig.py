"""The same programs through the real cache classes, without a model: more sessions, longer texts.

`rig` takes several requests at a time through a cache in the steps of SGLang's scheduler. What is asked
at once is in flight together. Answers are made up, a function of the prompt.

What it has no part of is a server's front: chats come as the ids that their template makes, the branches of a fork as
ids behind a request for their context, samples as so many requests behind one for their prompt. Such a request, which
is there only for its prompt to be cached, asks for one token here, and of our cache for a state at its end.
"""

import random
from array import array
from collections.abc import Sequence
from typing import Any

from marconi.engine.http.hints import KEY
from marconi.engine.launch.policies import PolicyChoice
from marconi.model import load
from marconi.policy.admission.hints import END
from marconi.policy.base import Costs
from rig.clock import TraceClock
from rig.joint_pools import KV_BYTES_PER_TOKEN, STATE_BYTES
from rig.pools import Division, HostPools, Strategy, marconi, stock
from rig.scheduler import HostScheduler
from rig.workload import Origin, Script

from .figures import Counters
from .oracle import Asked, Served
from .program import Ask, Program, Scale, Wave, Way
from .servers import CHUNK_TOKENS, Memory, Pools, Server
from .text import GENERATED_IDS

SCALE = Scale(number=4, turns=1.5, length=3)
MODEL = "qwen3-next-80b-a3b"
"""What our cache takes a state to cost and to save."""
POOLS = {
    Memory.PLENTIFUL: Pools(2_000_000, 8_000, 48),
    Memory.SHORT: Pools(64_000, 100, 16),
    Memory.TIERED: Pools(64_000, 100, 16, host_ratio=2.0),
}
"""For `SCALE`."""
_MAX_CONTEXT_TOKENS = 32_768
_STEP_S, _TOKEN_S = 0.02, 2e-4
"""Of a step, and of each token that it prefills: about what a small model takes on a CPU."""


def ask(server: Server, pools: Pools, program: Program) -> tuple[list[Asked], Counters]:
    """All of `program`, asked of a new cache, in the order in which it was asked; and our cache's counts."""
    rig = _Rig(server, pools)
    asked: list[Asked] = []
    try:
        wave = next(program)
        while True:
            answers = [each for some in _steps(wave) for each in rig.ask(some)]
            asked += answers
            counted = [each for each in answers if each.is_counted and each.served.output]
            wave = program.send([each.served.output for each in counted[:: wave.asks[0].num_samples]])
    except StopIteration:
        return asked, rig.counters(server)


def _steps(wave: Wave) -> list[list[tuple[Ask, bool]]]:
    """Requests that are in flight together, and whether they are counted."""
    if wave.way is Way.CHAT:
        return [[(each, True)] for each in wave.asks]
    steps = [[(wave.context, True)]] if wave.way is Way.SYNCED_FORK else []
    sampled = [(Ask(each.prompt, 0), False) for each in wave.asks if each.num_samples > 1]
    steps += [sampled] if sampled else []
    return [*steps, [(each, True) for each in wave.asks for _ in range(each.num_samples)]]


class _Rig:
    """A cache and the scheduler before it."""

    def __init__(self, server: Server, pools: Pools) -> None:
        self._clock = TraceClock()
        host = HostPools(
            pools.num_kv_tokens,
            pools.num_slots,
            _MAX_CONTEXT_TOKENS,
            strategy=Strategy.NO_BUFFER if server.has_no_buffer else Strategy.EXTRA_BUFFER,
            chunk_tokens=CHUNK_TOKENS,
            num_rows=pools.num_running,
            host_ratio=pools.host_ratio,
            write_policy=server.write_policy,
            memory=Division.ONE_POOL if server is Server.MARCONI_ONE_POOL else Division.TWO_POOLS,
        )
        self._scheduler = HostScheduler(_cache(server, host, self._clock), host)

    def ask(self, asks: Sequence[tuple[Ask, bool]]) -> list[Asked]:
        """All of them at once."""
        outputs = [_answer(each) for each, _ in asks]
        reqs = [self._submit(each, output) for (each, _), output in zip(asks, outputs, strict=True)]
        while not self._scheduler.is_idle:
            num_prefilled_tokens = self._scheduler.num_prefilled_tokens
            self._scheduler.step()
            self._clock.now_s += _STEP_S + _TOKEN_S * (self._scheduler.num_prefilled_tokens - num_prefilled_tokens)
        return [
            Asked(Served(each.prompt, output), req.cached_tokens, 0.0, is_counted)
            for (each, is_counted), output, req in zip(asks, outputs, reqs, strict=True)
        ]

    def counters(self, server: Server) -> Counters:
        """Those of this project's cache."""
        if not server.is_ours:
            return Counters()
        status = self._scheduler.cache.status()
        missed, host = status.num_missed_tokens or {}, status.host
        return Counters(0, 0, missed) if host is None else Counters(host.num_evictions, host.num_waits, missed)

    def _submit(self, each: Ask, output: tuple[int, ...]) -> Any:
        answer = array("q", output or _FIRST)
        req = self._scheduler.submit(Script(Origin.NEW, array("q", each.prompt), answer, len(answer), (None, None)))
        if not output:
            req.sampling_params.custom_params = {KEY: [END]}
        return req


_FIRST = GENERATED_IDS[:1]


def _answer(each: Ask) -> tuple[int, ...]:
    rng = random.Random(bytes(each.prompt))  # noqa: S311 - a workload, not a secret
    return tuple(rng.choices(GENERATED_IDS, k=each.num_output_tokens))


def _cache(server: Server, host: HostPools, clock: TraceClock) -> Any:
    if not server.is_ours:
        return stock(host)
    model = load(MODEL)
    sizes = model.kv_bytes_per_token, model.checkpoint_bytes
    if host.memory is Division.ONE_POOL:
        # There they are what victims free.
        sizes = KV_BYTES_PER_TOKEN, STATE_BYTES
    costs = Costs(*sizes, model.prefix_flops)
    return marconi(host, PolicyChoice("best"), costs, clock)
