"""Made-up traffic on which the value of a rule's parameter matters, and a small cache for it."""

from functools import partial

import numpy as np

from marconi.policy.admission.every_block import EveryBlock
from marconi.policy.admission.plan import Judicious
from marconi.policy.eviction.base import Costs
from marconi.policy.eviction.lru import JointLru
from marconi.policy.eviction.utility import UtilityEviction
from marconi.policy.request import Request, pack
from marconi.replay.policies.tuned import ServerCaches
from marconi.replay.pools import JointPool
from marconi.replay.server import ServerReplay
from marconi.tree import RadixTree
from marconi.tuning import Setup


def squared(num_tokens: int) -> float:
    """FLOPs of attention alone, in units of its own."""
    return float(num_tokens**2)


COSTS = Costs(kv_bytes_per_token=1, state_bytes=100, flops=squared)
MEMORY = partial(JointPool, 6000, COSTS.kv_bytes_per_token, COSTS.state_bytes)
CACHES = ServerCaches(Judicious(), MEMORY)
BLOCK_CACHES = ServerCaches(EveryBlock(100), MEMORY)
"""What is left depends on the tree alone: nothing is learned that a snapshot does not hold."""
utility = partial(UtilityEviction, COSTS)


def setup(caches: ServerCaches = CACHES) -> Setup:
    return Setup(utility, caches, reference=JointLru)


def new_cache(alpha: float = 0.0, caches: ServerCaches = CACHES) -> ServerReplay:
    return caches(RadixTree(max_ghosts=500), utility(alpha))


def documents_under_chatter(seed: int, count: int, first_s: float = 0.0) -> list[Request]:
    """Eight long documents asked about again and again, each followed by short prompts that never return.

    Recency forgets the documents under the chatter; FLOPs per byte keep them.
    """
    rng = np.random.default_rng(seed)
    texts = [list(range(1000 * index, 1000 * index + 400)) for index in range(8)]
    made = []
    for index in range(count):
        asks = index % 5 == 0
        body = texts[int(rng.integers(8))] if asks else []
        prompt = [*body, *(1_000_000 + rng.integers(1 << 30, size=10 if asks else 60)).tolist()]
        path = [*prompt, *(1_000_000 + rng.integers(1 << 30, size=5)).tolist()]
        made.append(Request(pack(path), len(prompt), 5, len(path), first_s + float(index)))
    return made


def chats_under_long_reads(seed: int, count: int, first_s: float = 0.0) -> list[Request]:
    """Eight short conversations of ten turns go on side by side, and every fourth request reads a long text once.

    Recency keeps the conversations; FLOPs per byte keep the long texts, which never return.
    """
    rng = np.random.default_rng(seed)
    chats: list[list[int]] = [[] for _ in range(8)]
    made: list[Request] = []
    for index in range(count):
        chat = int(rng.integers(8))
        reads = index % 4 == 0
        history = [] if reads else chats[chat]
        num_new = 1500 if reads else 20
        prompt = [*history, *(2_000_000 + rng.integers(1 << 30, size=num_new)).tolist()]
        path = [*prompt, *(2_000_000 + rng.integers(1 << 30, size=10)).tolist()]
        if not reads:
            chats[chat] = path if len(path) < 300 else []
        made.append(Request(pack(path), len(prompt), 10, len(path), first_s + float(index)))
    return made


def num_hit_tokens(cache: ServerReplay, requests: list[Request]) -> int:
    return sum(cache.serve(request) for request in requests)
