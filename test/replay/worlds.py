"""Small made-up worlds: a second a token, a byte a token and ten a state, so that figures can be worked by hand."""

import random

from marconi.model.latency import LatencyModel
from marconi.policy.admission.base import Admission
from marconi.policy.admission.plan import Judicious
from marconi.policy.base import Costs, Eviction
from marconi.policy.eviction.order import Order
from marconi.policy.hybrid_cache import HybridCache
from marconi.policy.request import Request, Trace, pack
from marconi.replay.decode import DecodeLatency
from marconi.replay.pools import JointPool, Pool
from marconi.replay.queueing import Speed
from marconi.replay.scheduling import Scheduling
from marconi.replay.server import ServerReplay
from marconi.tree import RadixTree
from marconi_lab.eviction.joint_lru import JointLru

STATE_BYTES = 10
COSTS = Costs(kv_bytes_per_token=1, state_bytes=STATE_BYTES, flops=float)


class SecondAToken(LatencyModel):
    """A prefill computes a token a second."""

    def seconds(self, num_cached_tokens: int, num_prompt_tokens: int) -> float:
        return float(num_prompt_tokens - num_cached_tokens)

    def smallest_cached_tokens(self, num_prompt_tokens: int, budget_s: float) -> int | None:
        return max(0, num_prompt_tokens - int(budget_s))


SPEED = Speed(
    SecondAToken(),
    # A decode step takes a second, whatever runs.
    DecodeLatency(0.0, 0.0, 0.0, state_bytes=0, kv_bytes_per_token=0, bytes_per_s=1.0, overhead_s=1.0),
)


def request(prompt: str, output: str = "", arrival_s: float = 0.0, session: int = -1) -> Request:
    """A request whose tokens are letters."""
    path = pack(map(ord, prompt + output))
    return Request(path, len(prompt), len(output), len(prompt + output), arrival_s, session)


def trace(*requests: Request) -> Trace:
    """A trace of single tokens."""
    return Trace("made-up", 1, requests)


def server(
    memory: Pool | int = 1 << 40, eviction: Eviction | None = None, admission: Admission | None = None
) -> ServerReplay:
    """A server with judicious admission and a slot to work on; of so many bytes, or with the memory given."""
    pools = JointPool(memory, COSTS.kv_bytes_per_token, STATE_BYTES) if isinstance(memory, int) else memory
    hybrid = HybridCache(RadixTree(1, 1000), admission or Judicious(least_tokens=1), Order(eviction or JointLru()))
    return ServerReplay(hybrid, pools, Scheduling())


def conversations(
    num_sessions: int = 12, num_turns: int = 6, gap_s: float = 7.0, seed: int = 0, unit_tokens: int = 1
) -> Trace:
    """Conversations with a shared beginning, their turns interleaved; ids are tokens or blocks of `unit_tokens`."""
    draw = random.Random(seed)  # noqa: S311 - nothing secret
    histories = [[1, 2, 3, 100 + session] for session in range(num_sessions)]
    requests = []
    for turn in range(num_turns):
        for session in draw.sample(range(num_sessions), num_sessions):
            history = histories[session]
            history += [draw.randrange(1000, 10**6) for _ in range(draw.randrange(1, 9))]
            num_prompt = len(history)
            history += [draw.randrange(1000, 10**6) for _ in range(draw.randrange(1, 6))]
            requests.append(
                Request(
                    path=pack(history),
                    num_prompt_tokens=num_prompt * unit_tokens,
                    num_output_tokens=(len(history) - num_prompt) * unit_tokens,
                    num_known_tokens=len(history) * unit_tokens,
                    arrival_s=len(requests) * gap_s,
                    session=session,
                    turn=turn,
                )
            )
    return Trace("conversations", unit_tokens, tuple(requests))
