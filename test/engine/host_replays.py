"""Small worlds for replays on the host: traces with branches, and a real cache side by side with the replay of it."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from marconi.engine.launch.policies import ONE_POOL, TWO_POOLS, PolicyChoice, hybrid_cache
from marconi.events.tree_log import TreeLog
from marconi.policy.request import Request, pack
from marconi.replay.int8 import Int8Pools
from marconi.replay.pools import JointPool, Pool, TwoPools
from marconi.replay.scheduling import Scheduling
from marconi.replay.server import ServerReplay
from marconi.replay.trace import Demand, Workload, generate
from marconi.replay.trace.arrivals import Pace
from marconi.replay.trace.workload import Skewed, SystemPrompts
from rig.clock import TraceClock
from rig.driver import HostReplay
from rig.joint_pools import KV_BYTES_PER_TOKEN, STATE_BYTES
from rig.pools import Core, Division, HostPools, Strategy, marconi, stock

TRACK_TOKENS = 256
"""`--mamba-track-interval`."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Pools under pressure, and how a server takes from them."""

    page_tokens: int
    strategy: Strategy
    num_kv_tokens: int
    num_state_slots: int
    chunk_tokens: int = 256
    max_running: int = 1
    memory: Division = Division.TWO_POOLS
    num_checkpoints: int = 0

    @property
    def host(self) -> HostPools:
        """For the real cache."""
        return HostPools(
            num_kv_tokens=self.num_kv_tokens,
            num_state_slots=self.num_state_slots,
            max_context_tokens=2000,
            page_tokens=self.page_tokens,
            strategy=self.strategy,
            chunk_tokens=self.chunk_tokens,
            num_rows=self.max_running,
            memory=self.memory,
            num_checkpoints=self.num_checkpoints,
        )

    def holds(self, requests: Sequence[Request]) -> bool:
        """Whether these fit beside each other to their ends."""
        num_tokens = sum(request.num_processed_tokens + 2 * self.page_tokens for request in requests)
        return num_tokens <= self.num_kv_tokens

    @property
    def scheduling(self) -> Scheduling:
        """For the replay of it."""
        host = self.host
        track = TRACK_TOKENS if host.page_tokens > 1 else None
        num_held = 1 if host.page_tokens == 1 else host.num_working_slots
        num_lent = host.num_working_slots - num_held
        return Scheduling(host.chunk_tokens, num_held, num_lent, track, host.num_rows)


def agents(seed: int, num_sessions: int = 15) -> tuple[Request, ...]:
    """Sessions that grow, drop old observations and so branch, over two shared system prompts."""
    workload = Workload(
        "small",
        turns=Skewed(4, 0.5, 1, 8),
        first_prompt=Skewed(120, 0.8, 20, 400),
        next_prompt=Skewed(60, 0.8, 5, 300),
        output=Skewed(90, 1.0, 1, 600),
        pace=Pace(think_time_s=5),
        system_prompts=SystemPrompts(2, 100),
        keep_observations=2,
        max_context_tokens=1400,
    )
    return generate(workload, Demand(num_sessions, session_rate=0.2, seed=seed)).requests


def forks(seed: int, num_requests: int = 200) -> tuple[Request, ...]:
    """Prompts and answers of two letters, of all lengths, half of them behind a shared prefix; two name spaces."""
    rng = random.Random(seed)  # noqa: S311 - a workload, not a secret
    requests = []
    for index in range(num_requests):
        prompt = [rng.randrange(2) for _ in range(rng.randint(1, 400))]
        if rng.random() < 0.5:
            prompt = [*range(100, 100 + rng.choice([64, 128, 200, 300])), *prompt]
        answer = [rng.randrange(2) for _ in range(rng.choice([1, 1, rng.randint(1, 300)]))]
        num_tokens = len(prompt) + len(answer)
        requests.append(
            Request(
                pack(prompt + answer), len(prompt), len(answer), num_tokens, float(index), namespace=rng.randrange(2)
            )
        )
    return tuple(requests)


def on_marconi(setting: Setting, choice: PolicyChoice, log: TreeLog | None = None) -> HostReplay:
    """Our cache in a server."""
    clock = TraceClock()
    return HostReplay(marconi(setting.host, choice, setting.host.costs, clock, log), setting.host, 1, clock)


def on_stock(host: HostPools, core: Core) -> HostReplay:
    """SGLang's."""
    return HostReplay(stock(host, core), host, 1, TraceClock())


def replayed(setting: Setting, choice: PolicyChoice, joint_bytes: int = 0) -> ServerReplay:
    """What stands for our cache in a replay, with the same policies; `joint_bytes` are those of one pool."""
    page, needs = setting.page_tokens, TWO_POOLS
    pools: Pool = TwoPools(setting.num_kv_tokens, setting.num_state_slots)
    if setting.num_checkpoints:
        pools = Int8Pools(setting.num_kv_tokens, setting.num_state_slots, num_checkpoints=setting.num_checkpoints)
    elif setting.memory is Division.ONE_POOL:
        pools, needs = JointPool(joint_bytes, KV_BYTES_PER_TOKEN, STATE_BYTES, page), ONE_POOL
    hybrid = hybrid_cache(choice, setting.host.costs, page, page, None, needs=needs)
    return ServerReplay(hybrid, pools, setting.scheduling)


def both(setting: Setting, choice: PolicyChoice) -> tuple[HostReplay, ServerReplay]:
    """Our cache in a server, and the replay of it on as much memory."""
    real = on_marconi(setting, choice)
    is_joint = setting.memory is Division.ONE_POOL
    return real, replayed(setting, choice, real.cache.pools.memory.num_bytes if is_joint else 0)


def serve_beside_each_other(
    real: HostReplay, brain: ServerReplay, requests: Sequence[Request], setting: Setting, seed: int
) -> list[tuple[int, int]]:
    """What each request hits in both, while up to `max_running` are in flight; the next step is drawn among theirs.

    A request begins only where all that run fit beside it to their ends. Whenever none runs, nothing is lost, and
    both could lend as much.
    """
    rng = random.Random(seed)  # noqa: S311 - a workload, not a secret
    waiting, hits = list(reversed(requests)), []
    running: list[tuple[Request, Iterator[None]]] = []

    def steps(request: Request) -> Iterator[None]:
        there, here = real.run(request), brain.run(request, real.clock.now_s)
        hits.append((there.num_hit_tokens, here.num_hit_tokens))
        for step, twins in (
            (there.prefill, (here.begin, here.prefill)),
            (there.decode, (here.decode,)),
            (there.release, (here.finish,)),
        ):
            yield
            here.now_s = real.clock.now_s
            step()
            for twin in twins:
                twin()

    while waiting or running:
        fits = waiting and len(running) < setting.max_running
        fits = fits and setting.holds([*(request for request, _ in running), waiting[-1]])
        if fits and (not running or rng.random() < 0.5):
            request = waiting.pop()
            real.clock.now_s = max(real.clock.now_s, request.arrival_s)
            running.append((request, steps(request)))
        elif not running:
            # It would not fit alone.
            waiting.pop()
            continue
        index = rng.randrange(len(running))
        if next(running[index][1], running) is running:
            del running[index]
        if not running:
            _check_alike(real, brain)
    return hits


def serve_one_after_the_other(
    real: HostReplay, brain: ServerReplay, requests: Sequence[Request]
) -> list[tuple[int | None, int]]:
    """What each request hits in both, at its own arrival; in between, both could lend as much."""
    hits = []
    for request in requests:
        hits.append((real.serve(request), brain.serve(request)))
        _check_alike(real, brain)
    return hits


def _check_alike(real: HostReplay, brain: ServerReplay) -> None:
    real.check_invariants()
    brain.check_invariants()
    free = brain.pools.num_free_tokens, brain.pools.num_free_slots
    assert real.lendable == free, f"the server can lend {real.lendable}, its replay {free}"


def serve(replay: HostReplay, requests: Sequence[Request]) -> list[int | None]:
    """Hit tokens of each request; nothing is lost after any of them."""
    hits = []
    for request in requests:
        hits.append(replay.serve(request))
        replay.check_invariants()
    return hits
