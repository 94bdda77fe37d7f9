"""What a server's cache keeps of a request, and what it uses, on pools of the host's memory and without a model."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from marconi.engine.launch.policies import ONE_POOL, TWO_POOLS, PolicyChoice, hybrid_cache
from marconi.engine.prefill.checkpoint import Checkpoint, mark_written
from marconi.policy.base import Costs, Need, Role
from marconi.policy.forecast.turns import closing_of
from marconi.policy.request import Lease, Request, pack
from rig import driver
from rig.driver import HostReplay
from rig.pools import Strategy

from .host_replays import Setting, on_marconi

pytestmark = pytest.mark.usefixtures("sglang_configuration")

SETTING = Setting(1, Strategy.NO_BUFFER, 10_000, 30, chunk_tokens=8192)
PROMPT, ANSWER, MORE = list(range(100)), list(range(500, 530)), list(range(700, 720))


def send(replay: HostReplay, prompt: list[int], answer: list[int], arrival_s: float) -> int | None:
    """Tokens that were hit; nothing is lost afterwards."""
    num_tokens = len(prompt) + len(answer)
    hit = replay.serve(Request(pack(prompt + answer), len(prompt), len(answer), num_tokens, arrival_s))
    replay.check_invariants()
    return hit


def states(replay: HostReplay) -> list[int]:
    """Positions of the states that are kept."""
    return sorted(node.depth for node in replay.cache.tree_core.hybrid.tree.nodes() if node.has_state)


@pytest.mark.parametrize("num_missing", [0, 1])
def test_a_state_that_a_layer_did_not_write_is_not_kept(num_missing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end's is: SGLang's working slot. What is not kept is counted, and its slot is free."""

    def written(checkpoints: Sequence[Checkpoint], num_layers: int) -> None:
        mark_written(checkpoints, num_layers - num_missing)

    monkeypatch.setattr(driver, "mark_written", written)
    replay = on_marconi(SETTING, PolicyChoice())
    send(replay, PROMPT, ANSWER, 1.0)
    assert states(replay) == ([129] if num_missing else [99, 129])
    assert replay.cache.status().num_states_not_written == num_missing
    assert send(replay, PROMPT, ANSWER, 2.0) == (0 if num_missing else 99)


def test_the_state_of_a_working_slot_that_stands_beyond_the_kept_tokens_is_not_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The answer stops before the last computed token, as where SGLang strips what a model thought."""
    release = driver.Run.release

    def release_to_the_stop(run: Any) -> None:
        run._req.finished_len = 10
        release(run)

    monkeypatch.setattr(driver.Run, "release", release_to_the_stop)
    replay = on_marconi(SETTING, PolicyChoice())
    send(replay, PROMPT, ANSWER, 1.0)
    assert states(replay) == [99]
    assert send(replay, PROMPT + ANSWER[:10] + MORE, ANSWER, 2.0) == 99


def test_a_state_at_the_end_of_a_chunk_is_there_when_that_chunk_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another prompt diverges where the first of three chunks ends: whoever comes next may resume from there."""
    from sglang.srt.mem_cache import common

    replay, keep = on_marconi(replace(SETTING, chunk_tokens=40), PolicyChoice()), common.checkpoint_kv_cache
    send(replay, PROMPT, ANSWER, 1.0)
    kept = []

    def keep_and_look(*args: Any) -> None:
        keep(*args)
        kept.append(40 in states(replay))

    monkeypatch.setattr(common, "checkpoint_kv_cache", keep_and_look)
    send(replay, PROMPT[:40] + MORE * 3, ANSWER, 2.0)
    assert kept == [True, True, True]


def test_a_hit_at_the_end_of_a_request_is_a_conversations_and_one_within_it_is_not() -> None:
    replay = on_marconi(SETTING, PolicyChoice())
    send(replay, PROMPT, ANSWER, 1.0)
    assert send(replay, PROMPT + ANSWER + MORE, ANSWER, 2.0) == 129
    assert send(replay, PROMPT, ANSWER, 3.0) == 99
    assert replay.cache.status().hits == {"none": 1, "conversation": 1, "input_prefix": 1}


def test_a_state_that_nobody_has_asked_for_takes_no_slot_of_one_that_is_worth_more() -> None:
    """That of a short prompt finds no slot among those of longer ones; that of a longer one does."""
    replay = on_marconi(Setting(1, Strategy.NO_BUFFER, 10_000, 8), PolicyChoice())
    for number in range(8):
        send(replay, list(range(1000 * number, 1000 * number + 400)), ANSWER, 1.0 + number)
    num_not_written = replay.cache.status().num_states_not_written
    send(replay, list(range(50_000, 50_020)), ANSWER, 9.0)
    assert 19 not in states(replay)
    assert replay.cache.status().num_states_not_written == num_not_written + 1
    send(replay, list(range(60_000, 60_800)), ANSWER, 10.0)
    assert any(700 < depth < 800 for depth in states(replay))


@pytest.mark.parametrize(("needs", "fills_spare"), [(TWO_POOLS, True), (ONE_POOL, False)])
def test_a_server_of_one_pool_plans_no_state_between_steps(needs: frozenset[Need], fills_spare: bool) -> None:
    costs = Costs(64, 4096, flops=float)
    hybrid = hybrid_cache(PolicyChoice(step_tokens=120), costs, 1, 1, None, needs=needs)
    request = Request(pack(range(400)), 400, 0, 400, 0.0)
    made = hybrid.plan(Lease(request, hybrid.match(request)))
    assert (Role.WAYPOINT in made.roles.values()) == fills_spare


def strip_thinking(monkeypatch: pytest.MonkeyPatch) -> None:
    """`--strip-thinking-cache`, of answers that thought."""
    from sglang.srt.managers import schedule_batch
    from sglang.srt.mem_cache import common

    for module in (schedule_batch, common):
        monkeypatch.setattr(module, "get_serving", lambda: SimpleNamespace(strip_thinking_cache=True))
    make = HostReplay._req

    def that_thought(replay: HostReplay, request: Request) -> Any:
        req = make(replay, request)
        req.reasoning_tokens = 5
        return req

    monkeypatch.setattr(HostReplay, "_req", that_thought)


@pytest.mark.parametrize("strips", [False, True])
def test_where_thinking_is_stripped_a_request_leaves_its_prompts_states_alone(
    strips: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if strips:
        strip_thinking(monkeypatch)
    replay = on_marconi(SETTING, PolicyChoice())
    send(replay, PROMPT, ANSWER, 1.0)
    assert states(replay) == ([99] if strips else [99, 129])
    assert send(replay, PROMPT + MORE, ANSWER, 2.0) == 99


def test_a_forced_miss_starts_from_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang drops the hit and would leave the copy of its state in the request's slot."""
    replay = on_marconi(SETTING, PolicyChoice())
    send(replay, PROMPT, ANSWER, 1.0)
    copied: list[Any] = []
    prefill = driver.Run.prefill

    def watched(run: Any) -> None:
        copied.append(run._req.kv.mamba_cow_src_index)
        prefill(run)

    monkeypatch.setattr(driver.Run, "prefill", watched)
    assert send(replay, PROMPT, ANSWER, 2.0) == 99
    monkeypatch.setenv("SGLANG_RADIX_FORCE_MISS", "1")
    assert send(replay, PROMPT + MORE, ANSWER, 3.0) == 0
    assert [each is not None for each in copied] == [True, False]


def test_the_end_of_an_answer_is_kept_with_how_it_closed() -> None:
    """Its last token but one, which tells apart who goes on from an answer."""
    replay = on_marconi(SETTING, PolicyChoice())
    for turn, closing in enumerate((7, 8)):
        send(replay, [*range(1000 * turn, 1000 * turn + 100)], [*ANSWER[:10], closing, 1], 1.0 + turn)
    nodes = sorted(replay.cache.tree_core.hybrid.tree.nodes(), key=lambda node: node.serial)
    ends = [node for node in nodes if node.has_state and node.depth == 111]
    assert [node.left_by.closing for node in ends] == [closing_of(7), closing_of(8)]
