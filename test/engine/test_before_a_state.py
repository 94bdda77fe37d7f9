"""Prompts that leave a path shortly before a state that is kept on it: their hits beside stock's, strategy by strategy.

Stock keeps states at chunk ends and, while decoding, at multiples of 256; ours stand at exact tokens, so that only a
state further up serves a prompt that leaves before one of them.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final

import pytest

from marconi.engine.launch.policies import PolicyChoice
from marconi.policy.forecast import turns
from marconi.policy.forecast.turns import COLD_REQUESTS
from marconi.policy.request import Request, pack
from rig.clock import TraceClock
from rig.driver import HostReplay
from rig.pools import Core, Division, HostPools, Strategy, marconi

from .host_replays import on_stock

pytestmark = pytest.mark.usefixtures("sglang_configuration")

DISTANCES: Final = (1, 8, 64)
NUM_ANSWER_TOKENS: Final = 300
PLENTIFUL: Final = HostPools(100_000, 1000, 8192)
SCARCE: Final = replace(PLENTIFUL, num_kv_tokens=10_000, num_state_slots=8)
ONE_POOL: Final = replace(PLENTIFUL, memory=Division.ONE_POOL)


def ours(host: HostPools) -> HostReplay:
    clock = TraceClock()
    return HostReplay(marconi(host, PolicyChoice(), host.costs, clock), host, 1, clock)


def stock(strategy: Strategy) -> HostReplay:
    return on_stock(replace(PLENTIFUL, strategy=strategy), Core.RUST)


@dataclass(slots=True)
class Client:
    """Sends prompts of made-up tokens, a second apart."""

    replay: HostReplay
    rng: random.Random = field(default_factory=lambda: random.Random(1))  # noqa: S311 - a workload, not a secret
    num_sent: int = 0

    def tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(1 << 20) for _ in range(count)]

    def send(self, prompt: list[int], num_output_tokens: int = 20) -> tuple[int, list[int]]:
        """Tokens that were hit, and prompt and answer; nothing is lost afterwards."""
        self.num_sent += 1
        path = prompt + self.tokens(num_output_tokens)
        request = Request(pack(path), len(prompt), num_output_tokens, len(path), float(self.num_sent))
        hit = self.replay.serve(request)
        self.replay.check_invariants()
        assert hit is not None, "it fits"
        return hit, path

    def leave(self, path: list[int], distance: int) -> int:
        """Tokens that are hit by a prompt that leaves `path` so many tokens before its end."""
        return self.send(path[:-distance] + self.tokens(100))[0]

    @property
    def states(self) -> list[int]:
        """Positions of the states that our cache keeps."""
        return sorted(node.depth for node in self.replay.cache.tree_core.hybrid.tree.nodes() if node.has_state)


def before_a_branch_point(client: Client, num_tokens: int, distance: int) -> int:
    """Two prompts share `num_tokens`; a third one leaves them before they part."""
    shared = client.tokens(num_tokens)
    for _ in range(2):
        client.send(shared + client.tokens(100))
    return client.leave(shared, distance)


def before_a_prompts_end(client: Client, num_tokens: int, distance: int) -> int:
    """A prompt leaves the only one before it."""
    prompt = client.tokens(num_tokens)
    client.send(prompt)
    return client.leave(prompt, distance)


def before_an_answers_end(client: Client, num_tokens: int, distance: int) -> int:
    """A prompt leaves the only answer before it."""
    return client.leave(client.send(client.tokens(num_tokens), NUM_ANSWER_TOKENS)[1], distance)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("num_tokens", [400, 1500, 1536, 5000])
@pytest.mark.parametrize("distance", DISTANCES)
def test_a_prompt_that_leaves_before_a_branch_point_hits_no_less_than_of_stock(num_tokens: int, distance: int) -> None:
    most = max(before_a_branch_point(Client(stock(each)), num_tokens, distance) for each in Strategy)
    is_before_chunk = (num_tokens - 1) // 64 * 64 > num_tokens - distance
    assert most == (0 if is_before_chunk or num_tokens % 64 == 0 else num_tokens // 64 * 64), "stock's grid"
    for host in (PLENTIFUL, ONE_POOL):
        hit = before_a_branch_point(Client(ours(host)), num_tokens, distance)
        assert hit >= most
        assert is_before_chunk or hit >= (num_tokens - 1) // 64 * 64 - (num_tokens % 64 == 0) * 64


@pytest.mark.parametrize("memory", Division)
def test_no_state_is_evicted_for_one_before_a_branch_point(memory: Division) -> None:
    """The branch point's takes a slot of others; that of the chunk end before it only one that is spare."""
    for host, is_spare in ((PLENTIFUL, True), (SCARCE, False)):
        client = Client(ours(replace(host, memory=memory)))
        for _ in range(20):
            client.send(client.tokens(500))
        shared = client.tokens(1500)
        for _ in range(2):
            client.send(shared + client.tokens(100))
        assert 1500 in client.states
        assert (1472 in client.states) == is_spare


Shape = Callable[[Client, int, int], int]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("shape", "num_tokens", "num_cold", "of_stock", "of_ours"),
    [
        (before_a_prompts_end, 400, COLD_REQUESTS, [384, 384, 0], [399, 384, 320]),
        (before_a_prompts_end, 1500, COLD_REQUESTS, [1472, 1472, 0], [1499, 1484, 1436]),
        (before_a_prompts_end, 5000, COLD_REQUESTS, [4992, 4992, 0], [4999, 4984, 4936]),
        (before_a_prompts_end, 1500, 0, [1472, 1472, 0], [1499, 1472, 1344]),
        (before_an_answers_end, 1500, COLD_REQUESTS, [1799, 1792, 1500], [1799, 1499, 1499]),
        (before_an_answers_end, 5000, COLD_REQUESTS, [5299, 5120, 5120], [5299, 4999, 4999]),
    ],
)
def test_what_is_hit_before_an_end_beside_stock(
    shape: Shape,
    num_tokens: int,
    num_cold: int,
    of_stock: list[int],
    of_ours: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By distance. An answer's end has one state, which serves nobody who leaves before it, so that ours is behind.

    A prompt's end has more in the first `num_cold` requests, and states on trial where memory is idle.
    """
    monkeypatch.setattr(turns, "COLD_REQUESTS", num_cold)
    strategies = [[shape(Client(stock(each)), num_tokens, distance) for distance in DISTANCES] for each in Strategy]
    assert [max(hits) for hits in zip(*strategies, strict=True)] == of_stock
    for host in (PLENTIFUL, ONE_POOL):
        assert [shape(Client(ours(host)), num_tokens, distance) for distance in DISTANCES] == of_ours
