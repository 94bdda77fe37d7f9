"""A scheduler's load as a step begins: what runs, what waits and what is to be prefilled, each token once."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang", reason="the server extra is not installed: pip install '.[server]'")

from sglang.srt.model_executor.forward_batch_info import ForwardMode

from marconi.engine.events.load import PERIOD_S, LoadReporter, before_run_batch
from marconi.engine.launch.policies import PolicyChoice
from marconi.engine.reports.idle import after_idle_metrics
from marconi.events.base import FreeMemory, WorkerLoad
from marconi.events.tree_log import TreeLog

from .host_replays import agents, on_marconi
from .test_host_replay import SETTINGS

pytestmark = pytest.mark.usefixtures("sglang_configuration")

MAX_RUNNING = 8


class Scheduler:
    """What the load is read from: a cache that served some requests, and a queue of prompts of 10 tokens."""

    def __init__(self) -> None:
        replay = on_marconi(SETTINGS["little-kv"], PolicyChoice("best"), TreeLog())
        for request in agents(seed=3)[:12]:
            replay.serve(request)
        self.tree_cache = replay.cache
        self.told: list[WorkerLoad] = []
        self.now_s = 0.0
        self.tree_cache.load_reporter = LoadReporter(self.tree_cache, self.told.append, lambda: self.now_s)
        self.enable_overlap = True
        self.result_queue: list[Any] = []
        self.running_batch = SimpleNamespace(reqs=[object(), object()])
        self.waiting_queue: list[Any] = []
        self.chunked_req: Any = None
        self.num_looks = 0
        self.load_inquirer = SimpleNamespace(
            max_running_requests=MAX_RUNNING, get_num_waiting_uncached_tokens=self._num_waiting_tokens
        )

    def _num_waiting_tokens(self) -> int:
        self.num_looks += 1
        chunked = self.chunked_req
        return 10 * len(self.waiting_queue) + (0 if chunked is None else chunked.seqlen - chunked.prefix_len)

    def run(self, mode: ForwardMode, reqs: list[Any], num_tokens: int = 0) -> None:
        before_run_batch(self, SimpleNamespace(forward_mode=mode, reqs=reqs, extend_num_tokens=num_tokens))

    def figures(self) -> tuple[int, int, int]:
        """Running, waiting and tokens, as last told."""
        load = self.told[-1]
        return load.num_running, load.num_waiting, load.num_prefill_tokens


@pytest.fixture
def scheduler() -> Scheduler:
    return Scheduler()


def test_a_prefill_counts_from_its_first_moment_and_until_its_result_is_there(scheduler: Scheduler) -> None:
    scheduler.waiting_queue = [object()] * 3
    scheduler.run(ForwardMode.EXTEND, [object()], 500)
    assert scheduler.figures() == (3, 3, 530)
    scheduler.now_s, scheduler.result_queue = 2 * PERIOD_S, [object()]
    scheduler.run(ForwardMode.DECODE, [object()] * 3)
    assert scheduler.figures() == (3, 3, 530), "it is under way yet"
    scheduler.now_s = 4 * PERIOD_S
    scheduler.run(ForwardMode.DECODE, [object()] * 3)
    assert scheduler.figures() == (3, 3, 30)


def test_control_a_prefill_whose_result_is_there_is_done(scheduler: Scheduler) -> None:
    scheduler.run(ForwardMode.EXTEND, [object()], 500)
    scheduler.now_s = 2 * PERIOD_S
    scheduler.run(ForwardMode.DECODE, [object()] * 3)
    assert scheduler.figures() == (3, 0, 0)


def test_the_chunk_of_a_long_prompt_is_counted_once_with_those_to_come(scheduler: Scheduler) -> None:
    scheduler.chunked_req = SimpleNamespace(seqlen=900, prefix_len=100, extend_end=356)
    other = object()
    scheduler.run(ForwardMode.EXTEND, [scheduler.chunked_req, other], 256 + 40)
    assert scheduler.figures() == (4, 0, 800 + 40)
    scheduler.run(ForwardMode.MIXED, [scheduler.chunked_req, *scheduler.running_batch.reqs], 256)
    assert scheduler.figures() == (3, 0, 800)


def test_decoding_looks_at_the_queue_now_and_then_and_an_idle_scheduler_tells_once(scheduler: Scheduler) -> None:
    after_idle_metrics(None, SimpleNamespace(scheduler=scheduler))
    assert not scheduler.told, "nothing has begun"
    for _ in range(100):
        scheduler.now_s += PERIOD_S / 10
        scheduler.run(ForwardMode.DECODE, [object()])
    assert scheduler.num_looks in (10, 11)
    for _ in range(3):
        after_idle_metrics(None, SimpleNamespace(scheduler=scheduler))
    assert [load.num_running for load in scheduler.told] == [1] * scheduler.num_looks + [0]
    status = scheduler.tree_cache.status()
    kv, slots = status.kv_tokens, status.state_slots
    assert kv.cached > 0
    assert scheduler.told[-1] == WorkerLoad(
        0, 0, MAX_RUNNING, 0, FreeMemory(kv.free, kv.cached, slots.free, slots.cached)
    )
