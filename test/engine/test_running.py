"""Where a request holds no tracking slots, SGLang counts none as it limits how many run at once."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang", reason="the server extra is not installed: pip install '.[server]'")

from sglang.srt.arg_groups.model_override_base import model_config_of
from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
from sglang.srt.runtime_context import SpawnRanks, get_context, publish, reset_context
from sglang.srt.server_args import prepare_server_args

from marconi.engine.launch import running
from marconi.engine.launch.model import Model
from marconi.engine.plugin import upstream
from marconi.engine.plugin.touch import hook_into
from marconi.policy.int8 import RUNNING_SLOTS
from rig.pools import Strategy
from rig.soak import SoakPlan, soak_on_marconi, soak_pools

NUM_SLOTS = 60
MARCONI = ("--radix-cache-backend", "marconi")
NO_BUFFER = ("--mamba-radix-cache-strategy", "no_buffer", "--disable-overlap-schedule")

pytestmark = pytest.mark.usefixtures("loaded_plugins")


@pytest.fixture
def num_at_once(models: dict[str, Path]) -> Iterator[Callable[..., int]]:
    """Asks SGLang how many requests a server with these flags runs at once, in `NUM_SLOTS` state slots."""

    def ask(*argv: str) -> int:
        record = prepare_server_args(["--model-path", str(models["gdn"]), *argv])
        publish(record, role="scheduler", ranks=SpawnRanks(world_rank=0, dp_rank=0, gpu_id=0))
        get_context().override("pools", max_mamba_cache_size=NUM_SLOTS)
        config = model_config_of(record)
        sizes: Any = SimpleNamespace(
            server_args=record, model_config=config, page_size=record.page_size or 1, attn_dp_size=1, mambaish_config=1
        )
        sizes._calculate_mamba_ratio = lambda: KVCacheConfigurator._calculate_mamba_ratio(sizes)
        return int(KVCacheConfigurator.resolve_max_num_reqs(sizes, 100_000))

    hook_into(upstream.RUNNING)
    yield ask
    reset_context()


@pytest.mark.parametrize(
    ("argv", "num_slots_each"),
    [
        ((), 3),
        (("--disable-overlap-schedule",), 3),
        (NO_BUFFER, 3),
        (("--mamba-full-memory-ratio", "0.9"), 3),
        (("--enable-hierarchical-cache",), 3),
        # Where SGLang tracks, or the second slot is taken as it does, all count.
        (("--page-size", "64"), 5),
        (("--marconi-admission", "chunk-end"), 5),
        (("--mamba-radix-cache-strategy", "extra_buffer_lazy"), 4),
        # One slot beside the working one, for a state that is not rounded yet.
        (("--enable-int8-mamba-checkpoint",), 2),
        (("--enable-int8-mamba-checkpoint", "--int8-mamba-ckpt-size", "40"), 5),
    ],
    ids=lambda each: " ".join(each) or "default" if isinstance(each, tuple) else "",
)
def test_slots_that_no_request_holds_do_not_limit_how_many_run(
    argv: tuple[str, ...], num_slots_each: int, num_at_once: Callable[..., int]
) -> None:
    assert num_at_once(*MARCONI, *argv, "--max-running-requests", "1000") == NUM_SLOTS // num_slots_each


def test_control_another_cache_is_sized_as_ever(num_at_once: Callable[..., int]) -> None:
    assert num_at_once("--max-running-requests", "1000") == NUM_SLOTS // 5


def test_a_limit_that_the_operator_gives_stays(num_at_once: Callable[..., int]) -> None:
    assert num_at_once(*MARCONI, "--max-running-requests", "7") == 7


def test_a_model_whose_prefills_cannot_be_planned_is_sized_as_ever(
    num_at_once: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = Model.facts
    monkeypatch.setattr(
        Model, "facts", lambda *args, **kwargs: replace(facts(*args, **kwargs), why_not_planned="a reason")
    )
    assert num_at_once(*MARCONI, "--max-running-requests", "1000") == NUM_SLOTS // 5


def test_what_was_foretold_wrongly_is_refused() -> None:
    assert [*running.against_rows(12, 60, 2)] == []
    (line,) = running.against_rows(20, 60, 2)
    assert line == "--max-running-requests must be at most 12 where SGLang tracks states, in 60 slots, got 20"


def test_a_server_says_how_many_more_run() -> None:
    assert running.excess_note(12, 60, 2) is None
    assert str(running.excess_note(20, 60, 2)).startswith("up to 20 requests run at once, 12 by SGLang's own count")


@pytest.mark.parametrize("host_ratio", [0.0, 1.5])
def test_no_slot_is_short_or_lost_with_as_many_requests_as_count_three_slots_each(
    host_ratio: float, one_thread: None
) -> None:
    pools = soak_pools(Strategy.EXTRA_BUFFER, 1, host_ratio=host_ratio)
    host = replace(pools, num_state_slots=RUNNING_SLOTS * pools.num_rows, are_tracking_slots_lent=True)
    soak = soak_on_marconi(host, SoakPlan(200, seed=8))
    most = 0
    while soak.num_submitted < 200 or not soak.scheduler.is_idle:
        soak.advance()
        most = max(most, soak.scheduler.cache.num_running)
    assert most > host.num_state_slots // 5
    assert soak.scheduler.cache.plans
    assert soak.scheduler.num_hit_tokens > 0
