"""A hook that raises costs states and nothing else: SGLang goes on without it, and the cache stops planning."""

import asyncio
import json
import logging
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest
import torch
from sglang.srt.plugins import hook_registry
from sglang.srt.plugins.hook_registry import HookType

from marconi.engine.cache import radix_cache as cache_module
from marconi.engine.cache.scheduler import around_add_one_req
from marconi.engine.faults import OF_PROCESS, Faults, Unrecoverable, around, beside, fails_open
from marconi.engine.http import chat_template, hints, streams
from marconi.engine.launch.policies import CHUNK_END, PolicyChoice
from marconi.engine.plugin import touch, upstream
from marconi.engine.reports.explain import EXPLAIN
from rig import scheduler as rig_scheduler
from rig.pools import Division, Strategy
from rig.ranks import Ranks
from rig.soak import Soak, SoakFailure, SoakPlan, soak_on_marconi, soak_pools

from . import ledger

pytestmark = pytest.mark.usefixtures("one_thread")

EXTRA, NO = Strategy.EXTRA_BUFFER, Strategy.NO_BUFFER
NUM_REQUESTS = 160
TRACKED_SLOTS, LENT_SLOTS = 5, 3
"""State slots for each request that runs: as SGLang counts where it tracks, and as counts here."""
PAGE: Final = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text(encoding="utf-8")


@pytest.fixture
def faults() -> Any:
    token = OF_PROCESS.set(Faults())
    yield OF_PROCESS.get()
    OF_PROCESS.reset(token)


def fault(*_: Any, **__: Any) -> Any:
    raise KeyError("planted")


# Hooks


def test_a_hook_beside_what_it_hooks_did_nothing(faults: Faults) -> None:
    assert beside("prefill.hook", lambda result: result + 1)(1) == 2
    assert beside("prefill.hook", fault)(1) is None
    assert faults.num == 1
    assert faults.first == "prefill.hook raised KeyError"


def raises_before(original: Callable[[int], int], value: int) -> int:
    fault()
    return original(value)


def raises_after(original: Callable[[int], int], value: int) -> int:
    original(value)
    return int(fault())


@pytest.mark.parametrize("hook", [raises_before, raises_after])
def test_what_a_failing_hook_stands_around_runs_once(hook: Callable[..., int], faults: Faults) -> None:
    values: list[int] = []

    def original(value: int) -> int:
        values.append(value)
        return 2 * value

    assert around("prefill.hook", hook)(original, 3) == 6
    assert values == [3]
    assert faults.num == 1


def test_what_sglang_raises_below_a_hook_is_its_own(faults: Faults) -> None:
    with pytest.raises(KeyError, match="planted"):
        around("prefill.hook", lambda original, value: original(value))(fault, 1)
    assert faults.first is None


def test_half_of_what_was_to_run_is_no_answer(faults: Faults) -> None:
    def in_parts(original: Callable[[int], int], value: int) -> int:
        original(value)
        original(value)
        return int(fault())

    def unrecoverable(original: Callable[[int], int], value: int) -> int:
        original(value)
        raise Unrecoverable

    with pytest.raises(KeyError):
        around("prefill.hook", in_parts)(lambda value: value, 1)
    with pytest.raises(Unrecoverable):
        around("prefill.hook", unrecoverable)(lambda value: value, 1)


def test_a_fault_is_told_once_a_hook_with_its_traceback(faults: Faults, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            beside("prefill.hook", fault)()
            fails_open(fault)()
    assert [record.getMessage().split()[1] for record in caplog.records] == ["prefill.hook", "fault"]
    assert all(record.exc_info for record in caplog.records)
    assert faults.num == 6


def test_every_hook_without_which_sglang_can_go_on_fails_open() -> None:
    """All but those that the page says of why not."""
    closed = {each.hook for group in upstream.GROUPS for each in group.hooks if not group.passes_over(each)}
    rows = re.findall(r"^\| (`[^|]+): [^|]+ \|", PAGE.partition("## When a hook fails")[2], re.MULTILINE)
    named = set(re.findall(r"`([\w.]+)`", " ".join(rows)))
    assert {next(iter({hook, hook.rpartition(".")[0]} & named), hook) for hook in closed} == named
    assert len(closed) == 20


def test_a_request_that_cannot_be_passed_over_is_added_with_what_its_match_took(faults: Faults) -> None:
    """Without the state that it starts from, its answer would be another's."""
    cache = SimpleNamespace(
        cuts_prefills=True,
        num_running=1,
        waiting=SimpleNamespace(waits=lambda _: True),
        req_to_token_pool=SimpleNamespace(mamba_allocator=SimpleNamespace(free=fault)),
    )
    kv = SimpleNamespace(
        mamba_cow_src_index=7, mamba_needs_clear=False, mamba_pool_idx=torch.tensor(3), holds_mamba=True
    )
    added: list[tuple[Any, Any]] = []

    def add(_: Any, req: Any) -> str:
        added.append((req.kv.mamba_cow_src_index, req.kv.mamba_pool_idx))
        return "added"

    adder = SimpleNamespace(tree_cache=cache, can_run_list=[])
    hook = around("cache.scheduler.around_add_one_req", around_add_one_req)
    assert hook(add, adder, SimpleNamespace(kv=kv)) == "added"
    assert added == [(7, torch.tensor(3))]
    assert faults.num == 1


@pytest.mark.parametrize(
    ("group", "hook"),
    [
        pytest.param(group, each, id=f"{each.hook} {each.target.rpartition('.')[2]}")
        for group in ledger.GROUPS
        for each in group.hooks
        if group.passes_over(each)
    ],
)
def test_sglang_goes_on_with_its_own_where_a_hook_raises(group: touch.Group, hook: touch.Touch, faults: Faults) -> None:
    """As SGLang puts it in; the fault has its name."""
    raising: Any = SimpleNamespace(kind=hook.kind, hook=hook.hook, function=fault, fails_open=hook.fails_open)
    put_in = hook_registry._wrap_fn(lambda value: 2 * value, touch._put_in(group, raising), HookType[hook.kind.name])
    assert put_in(3) == 6
    assert faults.num == 1
    assert faults.first == f"{hook.hook} raised KeyError"


async def streamed(*parts: Any) -> AsyncIterator[Any]:
    for part in parts:
        yield part


async def all_of(parts: AsyncIterator[Any]) -> list[Any]:
    return [part async for part in parts]


def test_an_answer_comes_without_its_report_where_that_cannot_be_made(
    faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = SimpleNamespace(disaggregation_mode=SimpleNamespace(value="null"), tokenizer=None)
    asking = SimpleNamespace(sampling_params={"custom_params": {hints.KEY: [9]}})

    def answers() -> list[Any]:
        answer = {"text": "a", "meta_info": {"prompt_tokens": 20}}
        return asyncio.run(all_of(hints.around_wait_one_response(lambda *_: streamed(answer), manager, asking)))

    assert hints.KEY in answers()[0]["meta_info"]
    monkeypatch.setattr(hints, "_report", fault)
    assert answers() == [{"text": "a", "meta_info": {"prompt_tokens": 20}}]
    assert faults.num == 1


@pytest.mark.parametrize(("part", "num"), [("_head", 2), ("_explanation", 1)])
def test_a_stream_comes_without_its_explanation_where_that_cannot_be_made(
    part: str, num: int, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunk = {"id": "a", "object": "chunk", "created": 1, "model": "m", "choices": [{"index": 0}]}
    chunks = [f"data: {json.dumps(chunk)}\n\n", "data: [DONE]\n\n"]
    raw, asking = SimpleNamespace(state=SimpleNamespace()), SimpleNamespace(custom_params={EXPLAIN: True})

    def found() -> list[Any]:
        stream = streams.around_stream(lambda *_: streamed(*chunks), None, None, asking, raw)
        streams.note_explained(raw, {"id": "a", EXPLAIN: {}, "weight_version": "1"})
        return asyncio.run(all_of(stream))

    assert len(found()) == 3
    monkeypatch.setattr(streams, part, fault)
    assert found() == chunks
    assert faults.num == num


def test_a_chat_is_answered_where_neither_marks_nor_its_next_turn_can_be_noted(
    faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = SimpleNamespace(server_args=SimpleNamespace(radix_cache_backend="marconi"))
    serving = SimpleNamespace(tokenizer_manager=manager)
    monkeypatch.setattr(chat_template, "add_distance", fault)
    made = (SimpleNamespace(sampling_params={}), SimpleNamespace())
    assert chat_template.around_convert(lambda *_: made, serving, None) == made
    assert faults.num == 1


# The cache


def soak_of(
    strategy: Strategy,
    page_tokens: int,
    memory: Division = Division.TWO_POOLS,
    host_ratio: float = 0.0,
    slots_per_request: int = TRACKED_SLOTS,
) -> Soak:
    host = soak_pools(strategy, page_tokens, memory=memory, host_ratio=host_ratio)
    if strategy is EXTRA and page_tokens == 1 and memory is Division.TWO_POOLS:
        host = replace(host, num_state_slots=slots_per_request * host.num_rows, are_tracking_slots_lent=True)
    return soak_on_marconi(host, SoakPlan(NUM_REQUESTS, seed=5, drain_every_requests=50))


def run_until(soak: Soak, num_submitted: int) -> None:
    while soak.num_submitted < num_submitted or soak.scheduler.is_idle:
        soak.advance()


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("strategy", "page_tokens", "memory", "host_ratio", "slots_per_request", "keeps"),
    [
        (EXTRA, 1, Division.TWO_POOLS, 0.0, TRACKED_SLOTS, CHUNK_END),
        (EXTRA, 16, Division.TWO_POOLS, 0.0, TRACKED_SLOTS, CHUNK_END),
        (NO, 1, Division.TWO_POOLS, 0.0, TRACKED_SLOTS, CHUNK_END),
        (EXTRA, 1, Division.TWO_POOLS, 1.5, TRACKED_SLOTS, CHUNK_END),
        (EXTRA, 1, Division.ONE_POOL, 0.0, TRACKED_SLOTS, "ends"),
        (EXTRA, 1, Division.TWO_POOLS, 0.0, LENT_SLOTS, "ends"),
        (EXTRA, 1, Division.TWO_POOLS, 1.5, LENT_SLOTS, "ends"),
    ],
)
def test_nothing_is_lost_where_planning_stops_in_the_midst(
    strategy: Strategy, page_tokens: int, memory: Division, host_ratio: float, slots_per_request: int, keeps: str
) -> None:
    """Requests that had begun end as well, and later ones go on to hit what is kept without a plan."""
    soak = soak_of(strategy, page_tokens, memory, host_ratio, slots_per_request)
    run_until(soak, NUM_REQUESTS // 3)
    cache, hybrid = soak.scheduler.cache, soak.scheduler.cache.tree_core.hybrid
    assert cache.plans
    cache.first_rank.faults.catch("prefill.hook", KeyError())
    num_hits, num_written = soak.scheduler.num_hit_tokens, hybrid.counters.num_states_written
    soak.run()
    assert not cache.plans
    assert cache.cuts_prefills is (keeps == "ends")
    assert soak.scheduler.num_hit_tokens > num_hits
    assert hybrid.counters.num_states_written > num_written
    assert soak.scheduler.outcomes.total() >= NUM_REQUESTS


def test_control_more_requests_than_sglang_would_run_cannot_be_tracked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "may_track", lambda *_: True)
    soak = soak_of(EXTRA, 1, slots_per_request=LENT_SLOTS)
    run_until(soak, NUM_REQUESTS // 3)
    soak.scheduler.cache.first_rank.faults.catch("prefill.hook", KeyError())
    with pytest.raises(SoakFailure, match="Not enough space for mamba"):
        soak.run()


def test_a_chunk_after_planning_has_stopped_takes_no_slot() -> None:
    """SGLang tracks it: a state of ours beside would be another's, or nobody's."""
    soak = soak_of(EXTRA, 1)
    cache = soak.scheduler.cache
    while soak.scheduler.chunked is None:
        soak.advance()
    cache.first_rank.faults.catch("prefill.hook", KeyError())
    cache.adopt(cache.first_rank.tick(cache.clock()))
    taken: list[Any] = []
    plan = cache.plan_prefill
    cache.plan_prefill = lambda reqs: taken.extend(plan(reqs)) or []
    soak.run()
    assert taken == []


def test_control_slots_of_a_request_that_had_begun_would_be_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    from marconi.engine.cache.scheduler import notes_of

    soak = soak_of(EXTRA, 1)
    run_until(soak, NUM_REQUESTS // 3)
    cache = soak.scheduler.cache
    while not any(run.checkpoints for req in soak.scheduler.in_flight() if (run := notes_of(req).run)):
        soak.advance()
    monkeypatch.setattr(cache.pools, "free", lambda slots: None)
    cache.first_rank.faults.catch("prefill.hook", KeyError())
    with pytest.raises(SoakFailure, match=r"state slots: . of .* lost"):
        soak.run()


def test_ranks_stop_planning_at_the_same_step() -> None:
    host = soak_pools(EXTRA, 1)
    ranks = Ranks(2, host, PolicyChoice("best"), host.costs, SoakPlan(90, seed=1, drain_every_requests=50))
    while ranks.ranks[0].soak.num_submitted < 30:
        ranks.advance()
    first, other = ranks.caches
    first.first_rank.faults.catch("prefill.hook", KeyError())
    ranks.run()
    assert (first.plans, other.plans) == (False, False)
    assert first.status().evictions == other.status().evictions


# What was written


def prefilled(monkeypatch: pytest.MonkeyPatch, num_layers: int, others: Callable[[Any], None]) -> Any:
    """A cache whose prefills run so many layers of ours; `others` changes what ranks agree on as they would."""
    soak = soak_of(EXTRA, 1)
    cache = soak.scheduler.cache
    monkeypatch.setattr(
        rig_scheduler, "mark_written", lambda made, _: [setattr(each, "num_parts", num_layers) for each in made]
    )
    monkeypatch.setattr(cache, "_all_reduce_attn_groups", lambda flags, _: others(flags))
    soak.run()
    return cache


def test_a_prefill_that_wrote_nothing_stops_planning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A model whose recurrent layers run where no hook sees them is said once, and served by what SGLang tracks."""
    with caplog.at_level(logging.ERROR):
        cache = prefilled(monkeypatch, 0, lambda flags: None)
    assert not cache.cuts_prefills
    (line,) = [record.getMessage() for record in caplog.records if "no longer planned" in record.getMessage()]
    num_layers = len(cache.req_to_token_pool.mamba_map)
    assert f"a prefill wrote 0 of the {num_layers} parts of a state" in line


@pytest.mark.parametrize("which", ["states", "faults"])
def test_what_another_rank_has_not_written_is_not_kept_here(
    which: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def others(flags: torch.Tensor) -> None:
        flags[1 if which == "states" else 0] = 0

    num_layers = len(soak_of(EXTRA, 1).scheduler.cache.req_to_token_pool.mamba_map)
    cache = prefilled(monkeypatch, num_layers, others)
    assert ("were not written" in caplog.text) is (which == "states")
    assert "a hook failed on another rank; states are no longer planned" in caplog.text
    assert not cache.plans


def test_control_alone_a_rank_keeps_what_it_has_written(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    num_layers = len(soak_of(EXTRA, 1).scheduler.cache.req_to_token_pool.mamba_map)
    assert prefilled(monkeypatch, num_layers, lambda flags: None).plans
    assert "were not written" not in caplog.text
