"""The host replay drives real caches as a server does, and the replay that stands for ours gives the same hits."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from marconi.engine.launch.policies import TWO_POOLS, PolicyChoice
from marconi.policy.base import Need
from marconi.policy.eviction.lru import SeparateLru
from marconi.policy.eviction.order import Order
from marconi.policy.hybrid_cache import HybridCache
from marconi.policy.request import Request, pack
from marconi.replay.admission.chunk_end import ExtraBuffer, NoBuffer
from marconi.replay.pools import TwoPools
from marconi.replay.scheduling import Scheduling
from marconi.replay.server import ServerReplay
from marconi.tree import RadixTree
from rig import driver
from rig.driver import HostReplay
from rig.joint_pools import num_moved
from rig.pools import Core, Division, HostPools, Strategy
from rig.tokens import Tokens

from .host_replays import (
    Setting,
    agents,
    both,
    forks,
    on_marconi,
    on_stock,
    replayed,
    serve,
    serve_beside_each_other,
    serve_one_after_the_other,
)

pytestmark = pytest.mark.usefixtures("sglang_configuration")

EXTRA, NO = Strategy.EXTRA_BUFFER, Strategy.NO_BUFFER
SETTINGS = {
    "few-slots": Setting(1, EXTRA, 4000, 9),
    "little-kv": Setting(1, EXTRA, 1600, 16),
    "no-buffer": Setting(1, NO, 1700, 6),
    "page-16": Setting(16, EXTRA, 1680, 10),
    "page-64": Setting(64, EXTRA, 2048, 9),
}
MARCONI = PolicyChoice("marconi", 2.0)


# Ours against the replay of it

ONE_POOL = {
    "page-1": Setting(1, EXTRA, 3000, 8, memory=Division.ONE_POOL),
    "no-buffer": Setting(1, NO, 1700, 6, memory=Division.ONE_POOL),
    "page-16": Setting(16, EXTRA, 1680, 10, memory=Division.ONE_POOL),
}
INT8 = {
    "many-checkpoints": Setting(1, EXTRA, 4000, 9, num_checkpoints=20),
    "few-checkpoints": Setting(1, EXTRA, 4000, 9, num_checkpoints=6),
    "few-live": Setting(1, NO, 4000, 3, num_checkpoints=12),
    "little-kv": Setting(1, EXTRA, 1600, 9, num_checkpoints=16),
    "page-16": Setting(16, EXTRA, 1680, 9, num_checkpoints=10),
}
IN_FLIGHT = {
    "extra-buffer": Setting(1, EXTRA, 4500, 22, max_running=3),
    "no-buffer": Setting(1, NO, 4500, 14, max_running=3),
    "page-16": Setting(16, EXTRA, 4800, 22, max_running=3),
}
ONE_POOL_IN_FLIGHT = {name: replace(setting, memory=Division.ONE_POOL) for name, setting in IN_FLIGHT.items()}
INT8_IN_FLIGHT = {
    "extra-buffer": Setting(1, EXTRA, 4500, 13, max_running=3, num_checkpoints=14),
    "no-buffer": Setting(1, NO, 4500, 8, max_running=3, num_checkpoints=10),
    "page-16": Setting(16, EXTRA, 4800, 16, max_running=3, num_checkpoints=14),
}
DIVISIONS = {
    "two-pools": SETTINGS,
    "two-pools-in-flight": IN_FLIGHT,
    "one-pool": ONE_POOL,
    "one-pool-in-flight": ONE_POOL_IN_FLIGHT,
    "int8": INT8,
    "int8-in-flight": INT8_IN_FLIGHT,
}
BEST, STEPS = PolicyChoice("best"), PolicyChoice("best", step_tokens=96)
CASES = {
    **{f"{division}-{name}": (each, BEST) for division, group in DIVISIONS.items() for name, each in group.items()},
    "one-pool-steps": (ONE_POOL["page-1"], STEPS),
    "two-pools-steps": (SETTINGS["few-slots"], STEPS),
}
QUICK = {
    "two-pools-page-16",
    "two-pools-in-flight-extra-buffer",
    "one-pool-no-buffer",
    "one-pool-in-flight-page-16",
    "int8-few-live",
    "int8-in-flight-extra-buffer",
}
ALONE = (*agents(seed=1), *forks(seed=2, num_requests=60))
AT_ONCE = tuple(each for request in forks(seed=8, num_requests=20) for each in (request, request))
"""Two that leave the same states: what the second one leaves comes back."""
BESIDE = (*agents(seed=5, num_sessions=12), *AT_ONCE, *forks(seed=6, num_requests=30))


@pytest.mark.parametrize(
    ("setting", "choice"),
    [pytest.param(*case, id=name, marks=[pytest.mark.slow] * (name not in QUICK)) for name, case in CASES.items()],
)
def test_our_cache_hits_what_its_replay_hits(setting: Setting, choice: PolicyChoice) -> None:
    """Request for request, with the same states written and evicted, and as much memory free whenever none runs.

    Server and replay run the same policies: what may differ is how each divides memory, so one policy is enough.
    """
    real, brain = both(setting, choice)
    hits: list[Any] = []
    if setting.max_running == 1:
        hits += serve_one_after_the_other(real, brain, ALONE)
    else:
        hits += serve_beside_each_other(real, brain, BESIDE, setting, seed=7)
    assert len(hits) > 100
    assert [hit for hit, _ in hits] == [hit for _, hit in hits]
    counters = brain.hybrid.counters
    served = real.cache.tree_core.hybrid.counters
    assert served.num_missed_tokens == counters.num_missed_tokens, "and both have counted all"
    assert served == counters
    assert counters.num_hit_tokens > 0
    if setting.memory is Division.ONE_POOL:
        assert counters.num_evictions[Need.BYTES] == sum(counters.num_evictions.values()) > 20
        assert num_moved(real.cache) > 0
    else:
        assert counters.num_evictions[Need.STATE] > 20
        assert counters.num_evictions[Need.KV] > 20 or setting.num_kv_tokens > 1600


def test_a_replay_that_leaves_no_slots_for_others_is_seen() -> None:
    """The control: what is compared above depends on the requests that run beside each other."""
    setting = IN_FLIGHT["extra-buffer"]
    real, brain = both(setting, BEST)
    brain.scheduling = replace(brain.scheduling, max_running=1)
    with pytest.raises(AssertionError, match=r"the server can lend .*, its replay"):
        serve_beside_each_other(real, brain, BESIDE, setting, seed=7)


def test_slots_of_one_kind_hit_otherwise_than_those_of_int8() -> None:
    """The control: as many slots as both kinds together, lent to whoever asks."""
    setting = INT8["few-checkpoints"]
    num_slots = setting.num_state_slots + setting.num_checkpoints
    plain = replayed(replace(setting, num_state_slots=num_slots, num_checkpoints=0), BEST)
    requests = agents(seed=1)
    assert serve(on_marconi(setting, BEST), requests) != [plain.serve(request) for request in requests]


@pytest.mark.parametrize(
    ("setting", "choice"),
    [
        (SETTINGS["few-slots"], replace(MARCONI, alpha=0.0)),
        (replace(SETTINGS["few-slots"], num_state_slots=8), MARCONI),
        (replace(SETTINGS["few-slots"], num_kv_tokens=1500), MARCONI),
    ],
    ids=["alpha", "a-slot-less", "less-kv"],
)
def test_another_setting_hits_otherwise(setting: Setting, choice: PolicyChoice) -> None:
    """The control: what is compared above depends on policy, slots and KV."""
    requests = agents(seed=1)
    real, brain = on_marconi(SETTINGS["few-slots"], MARCONI), replayed(setting, choice)
    assert serve(real, requests) != [brain.serve(request) for request in requests]


def test_planned_states_leave_slots_for_requests_that_may_still_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """With rows for as many requests as there are slots these are left alone, and it plans nothing; alone it does."""
    setting = SETTINGS["few-slots"]
    prompt = Request(pack(range(100)), 100, 0, 100, 0.0)
    num_written = {}
    for num_rows in (0, setting.num_state_slots):
        replay = on_marconi(setting, MARCONI)
        pool = replay.cache.req_to_token_pool
        real = pool.available_size
        monkeypatch.setattr(pool, "available_size", lambda real=real, more=num_rows: real() + more)
        replay.serve(prompt)
        num_written[num_rows] = replay.cache.status().num_states_written
    assert num_written[0] > num_written[setting.num_state_slots]


# Stock


def stock_replay(admission: ExtraBuffer | NoBuffer, pools: TwoPools) -> ServerReplay:
    hybrid = HybridCache(RadixTree(), admission, Order(SeparateLru(TWO_POOLS)))
    return ServerReplay(hybrid, pools, Scheduling.of(admission))


@pytest.mark.one_in(5)
@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_stock_loses_nothing_and_hits_the_same_with_either_core(setting: Setting) -> None:
    requests = (*agents(seed=3), *forks(seed=3, num_requests=100))
    python, rust = (serve(on_stock(setting.host, core), requests) for core in (Core.PYTHON, Core.RUST))
    assert python == rust
    assert sum(hit or 0 for hit in python) > 0


class Client:
    """Sends prompts of made-up tokens, with answers of `num_output_tokens`; notes what was cached of each."""

    def __init__(self, replay: HostReplay) -> None:
        self._replay = replay
        self._rng = np.random.default_rng(1)
        self._num_sent = 0

    def tokens(self, count: int) -> list[int]:
        tokens: list[int] = self._rng.integers(1 << 20, size=count).tolist()
        return tokens

    def send(self, prompt: list[int], answer: list[int] | None = None) -> int | None:
        answer = self.tokens(4) if answer is None else answer
        self._num_sent += 1
        num_tokens = len(prompt) + len(answer)
        hit = self._replay.serve(
            Request(pack(prompt + answer), len(prompt), len(answer), num_tokens, float(self._num_sent))
        )
        self._replay.check_invariants()
        return hit


def what_a_client_sees(client: Client) -> list[int | None]:
    """Cached tokens: a repeat, an extension, three branches, a conversation's next turn, a shared system prompt."""
    p, q, answer, s = client.tokens(700), client.tokens(150), client.tokens(300), client.tokens(192)
    client.send(p)
    seen = [client.send(p), client.send(p + client.tokens(100))]
    seen += [client.send(p[:400] + client.tokens(300)) for _ in range(3)]
    client.send(q, answer)
    seen.append(client.send(q + answer + client.tokens(30)))
    client.send(s + client.tokens(64))
    return [*seen, *(client.send(s + client.tokens(64)) for _ in range(2))]


@pytest.mark.parametrize(
    ("backend", "strategy", "seen"),
    [
        ("stock", EXTRA, [640, 640, 0, 384, 384, 256, 0, 192]),
        ("stock", NO, [0, 700, 0, 0, 0, 449, 0, 0]),
        ("marconi", EXTRA, [699, 699, 384, 400, 400, 449, 192, 192]),
        ("marconi", NO, [699, 699, 384, 400, 400, 449, 192, 192]),
    ],
)
def test_a_client_sees_what_it_saw_of_a_server(backend: str, strategy: Strategy, seen: list[int]) -> None:
    """Stock's figures were measured over HTTP on SGLang 0.5.23."""
    setting = Setting(1, strategy, 100_000, 100, chunk_tokens=8192)
    replay = on_stock(setting.host, Core.RUST) if backend == "stock" else on_marconi(setting, PolicyChoice())
    assert what_a_client_sees(Client(replay)) == seen


@pytest.mark.parametrize("admission", [ExtraBuffer(chunk_tokens=256), NoBuffer(chunk_tokens=256)])
def test_the_replay_of_stock_hits_what_stock_hits_while_nothing_is_evicted(admission: ExtraBuffer | NoBuffer) -> None:
    setting = Setting(1, EXTRA if isinstance(admission, ExtraBuffer) else NO, 100_000, 1000)
    brain = stock_replay(admission, TwoPools(100_000, 1000))
    requests = agents(seed=6)
    assert serve(on_stock(setting.host, Core.RUST), requests) == [brain.serve(request) for request in requests]


@pytest.mark.parametrize("num_state_slots", [8, 12, 20])
def test_the_replay_of_stock_that_takes_memory_as_it_does_hits_the_same_while_states_are_short(
    num_state_slots: int,
) -> None:
    setting = Setting(1, NO, 100_000, num_state_slots)
    brain = stock_replay(NoBuffer(chunk_tokens=256), TwoPools(100_000, num_state_slots))
    requests = agents(seed=6, num_sessions=40)
    hits = [brain.serve(request) for request in requests]
    assert serve(on_stock(setting.host, Core.RUST), requests) == hits
    assert brain.hybrid.counters.num_evictions[Need.STATE] > 100
    brain.check_invariants()


# The driver


def decode_token_by_token(run: Any) -> None:
    """What SGLang does at every step, by its own function."""
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.mem_cache.allocation import alloc_for_decode

    req, interval = run._req, run._tracking_interval()
    while not req.finished():
        batch = run._batch([req.kv.kv_committed_len])
        batch.req_pool_indices = torch.tensor([req.kv.req_pool_idx])
        batch.req_pool_indices_cpu = batch.req_pool_indices
        batch.model_config = SimpleNamespace(is_encoder_decoder=False)
        batch.token_to_kv_pool_allocator = run._kv
        batch.spec_algorithm = SimpleNamespace(is_none=lambda: True)
        batch.beam_groups = None
        num_needed = run._host.page_tokens * (req.kv.kv_committed_len % run._host.page_tokens == 0)
        batch.new_tokens_required_next_decode = lambda _selected, needed=num_needed: needed
        ScheduleBatch.check_decode_mem(batch)
        alloc_for_decode(batch, token_per_req=1)
        req.decode_batch_idx += 1
        run._sample(1)
        if interval and req.kv.kv_committed_len % interval == 0:
            run._track()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("backend", ["stock", "marconi"])
@pytest.mark.parametrize("name", ["little-kv", "no-buffer", "page-16", "page-64"])
def test_decoding_a_run_at_a_time_is_decoding_token_by_token(
    name: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same hits, and the same indices of KV and states free in the end, in the same order."""
    setting = SETTINGS[name]

    def run() -> tuple[list[int | None], list[int], list[int]]:
        replay = on_stock(setting.host, Core.PYTHON) if backend == "stock" else on_marconi(setting, MARCONI)
        hits = serve(replay, agents(seed=4, num_sessions=8))
        slots = replay.cache.req_to_token_pool.mamba_allocator.free_slots
        return hits, replay.cache.token_to_kv_pool_allocator.free_pages.tolist(), slots.tolist()

    at_once = run()
    monkeypatch.setattr(driver.Run, "decode", decode_token_by_token)
    assert run() == at_once


def test_a_request_that_does_not_fit_is_counted_and_leaves_nothing() -> None:
    setting = SETTINGS["no-buffer"]
    for replay in (on_stock(setting.host, Core.PYTHON), on_marconi(setting, PolicyChoice())):
        num_tokens = setting.num_kv_tokens + 1
        assert replay.serve(Request(pack(range(num_tokens)), num_tokens, 1, num_tokens, 0.0)) is None
        assert replay.num_too_large == 1
        assert replay.serve(Request(pack(range(num_tokens)), num_tokens - 1, 1, num_tokens, 1.0)) == 0
        replay.check_invariants()


def test_blocks_are_spelt_out_so_that_prefixes_are_shared_as_far_as_blocks() -> None:
    tokens = Tokens(unit_tokens=4)
    first, second = (tokens.of(Request(pack(ids), 10, 3, 8, 0.0)) for ids in ([7, 8, 9], [7, 8, 5]))
    assert list(first[0]) == [28, 29, 30, 31, 32, 33, 34, 35, 36, 37]
    assert list(second[0]) == [*first[0][:8], 20, 21]
    assert len(first[1]) == len(second[1]) == 3
    assert not {*first[1]} & {*second[1], *second[0], *first[0]}, "what is not known is nobody else's"


def test_a_known_answer_is_the_trace_s() -> None:
    prompt, answer = Tokens(unit_tokens=1).of(Request(pack([5, 6, 7, 8, 9]), 3, 2, 5, 0.0))
    assert (list(prompt), list(answer)) == ([5, 6, 7], [8, 9])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_state_slots": 4}, "must be at least 5"),
        ({"num_state_slots": 2, "strategy": NO}, "must be at least 3"),
        ({"num_kv_tokens": 100, "page_tokens": 16}, "a multiple of the page"),
        ({"page_tokens": 16, "num_kv_tokens": 1600, "strategy": NO}, "pages of 1"),
    ],
)
def test_pools_that_cannot_serve_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HostPools(**{"num_kv_tokens": 1000, "num_state_slots": 10, "max_context_tokens": 100, **fields})
