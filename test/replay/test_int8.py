"""Checkpoints in int8 in a replay: who holds which slot, how memory is divided, and what is refused."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marconi.cli import main
from marconi.model import DEVICES, PrefillLatency, load
from marconi.policy.admission.plan import Judicious
from marconi.policy.base import Need
from marconi.policy.catalog import PolicySpec
from marconi.policy.eviction.lru import SeparateLru
from marconi.policy.eviction.order import Order
from marconi.policy.hybrid_cache import HybridCache
from marconi.policy.int8 import divide
from marconi.policy.request import Request, pack
from marconi.replay.bound import limits_of
from marconi.replay.catalog import build, resolve_policy
from marconi.replay.grid import execute
from marconi.replay.int8 import PER_REQUEST, Int8, Int8Pools
from marconi.replay.queueing import Batching, replay
from marconi.replay.scheduling import Scheduling
from marconi.replay.server import ServerReplay
from marconi.replay.task import ReplayInputs, Task
from marconi.tree import RadixTree, check_invariants

from .worlds import SPEED, conversations

TWO_POOLS = frozenset({Need.KV, Need.STATE})
BEST = PolicySpec("best")


def server(pools: Int8Pools, page: int = 1, scheduling: Scheduling | None = None) -> ServerReplay:
    tree = RadixTree(page, max_ghosts=20, ids_per_unit=page)
    hybrid = HybridCache(tree, Judicious(page, least_tokens=1), Order(SeparateLru(TWO_POOLS)))
    return ServerReplay(hybrid, pools, scheduling or Scheduling())


def request(prompt: list[int], answer: list[int], arrival_s: float) -> Request:
    return Request(pack(prompt + answer), len(prompt), len(answer), len(prompt) + len(answer), arrival_s)


def inputs(max_running: int = 256, model: str = "nemotron-h-8b") -> ReplayInputs:
    profile, device = load(model), DEVICES["h100"]
    batching = Batching(max_running=max_running)
    return ReplayInputs(conversations(), profile, device, PrefillLatency(profile, device), batching=batching)


# Slots

PIECES = st.lists(st.integers(0, 1), min_size=1, max_size=20)
REQUESTS = st.lists(st.tuples(st.booleans(), PIECES, PIECES), min_size=1, max_size=60)


def serve_all(replayed: ServerReplay, drawn: list[tuple[bool, list[int], list[int]]]) -> None:
    """Prompts of two letters, some of which go on from the last answer; nothing is lost after any of them."""
    said: list[int] = []
    for index, (goes_on, letters, answer) in enumerate(drawn):
        prompt = [*(said[:30] if goes_on else []), *letters]
        hit = replayed.serve(request(prompt, answer, float(index)))
        assert hit < len(prompt)
        said = prompt + answer
        replayed.check_invariants()
        check_invariants(replayed.hybrid.tree)


@settings(max_examples=60)
@given(drawn=REQUESTS, num_live=st.integers(1, 5), num_checkpoints=st.integers(1, 6), page=st.sampled_from([1, 4]))
def test_every_slot_of_either_kind_is_free_or_held(
    drawn: list[tuple[bool, list[int], list[int]]], num_live: int, num_checkpoints: int, page: int
) -> None:
    serve_all(server(Int8Pools(80, num_live, num_checkpoints=num_checkpoints), page, Scheduling(8)), drawn)


@pytest.mark.parametrize("lost", ["num_free_slots", "num_free_checkpoints"])
def test_control_a_slot_that_is_not_given_back_is_missed(lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hand_over = Int8Pools.hand_over

    def keeps_one(pools: Int8Pools, num_states: int, num_kept: int) -> None:
        hand_over(pools, num_states, num_kept)
        setattr(pools, lost, getattr(pools, lost) - 1)

    monkeypatch.setattr(Int8Pools, "hand_over", keeps_one)
    with pytest.raises(AssertionError, match="are lost"):
        serve_all(server(Int8Pools(80, 3, num_checkpoints=4)), [(False, [0, 1], [1])])


def test_requests_beside_each_other_give_everything_back() -> None:
    trace = conversations(gap_s=0.5)
    replayed = server(Int8Pools(600, 8, num_checkpoints=9))
    outcome = replay(trace, replayed, SPEED, Batching(max_running=4))
    assert replayed.scheduling.max_running == 4, "8 live slots are 2 for each"
    assert sum(outcome.hit_tokens) > 0
    assert replayed.counters.num_evictions[Need.STATE] > 20
    replayed.check_invariants()


def test_a_hit_without_a_live_slot_is_a_miss() -> None:
    prompt = list(range(40))
    hits = {}
    for num_taken in (0, 4):
        replayed = server(Int8Pools(1000, 4, num_checkpoints=8))
        replayed.serve(request(prompt, [1, 2], 1.0))
        replayed.pools.take(num_slots=num_taken)
        match, _ = replayed.match(request(prompt, [], 2.0), 2.0)
        hits[num_taken] = match.checkpoint.depth
    assert hits == {0: 39, 4: 0}


def test_a_planned_state_takes_a_slot_of_either_kind() -> None:
    """One live slot is the request's: without a second the state before the prompt's end is not kept."""
    prompt, written = list(range(40)), {}
    for num_live, num_checkpoints in ((1, 8), (2, 8), (2, 1)):
        replayed = server(Int8Pools(1000, num_live, num_checkpoints=num_checkpoints))
        # Not by `serve`, which refuses a server of one live slot.
        run = replayed.run(request(prompt, [1, 2], 1.0), 1.0)
        run.begin()
        run.prefill()
        run.decode()
        run.finish()
        kept = sorted(node.depth for node in replayed.hybrid.tree.nodes() if node.has_state)
        written[num_live, num_checkpoints] = kept
        replayed.check_invariants()
    assert written == {(1, 8): [41], (2, 8): [39, 41], (2, 1): [39]}, "the one checkpoint is in use"


# Memory


def test_memory_is_divided_as_a_server_divides_it() -> None:
    state_bytes, checkpoint_bytes = 3000, 1000
    pools = Int8(state_bytes, 8).pools(500, 100 * state_bytes + 7, checkpoint_bytes)
    expected = divide(100, PER_REQUEST, 8, state_bytes, checkpoint_bytes)
    assert (pools.num_tokens, pools.num_slots, pools.num_checkpoints) == (
        500,
        expected.num_live,
        expected.num_checkpoints,
    )
    assert pools.num_rows(1) == 10
    nothing = Int8(state_bytes, 8).pools(500, 2 * state_bytes - 1, checkpoint_bytes)
    assert not nothing.holds(1, 1)


def test_more_requests_at_once_leave_fewer_checkpoints() -> None:
    num_checkpoints = []
    for max_running in (1, 8):
        given_inputs = inputs(max_running)
        memory_bytes = 200 * given_inputs.model.state_bytes
        config = Task(BEST, memory_bytes, int8_checkpoints=True).config(given_inputs)
        assert resolve_policy(BEST).laid_out(config).mamba_ratio == 0.9
        target = build(BEST, config)
        assert isinstance(target, ServerReplay)
        num_checkpoints.append(target.pools.num_checkpoints)
        assert target.fits(given_inputs.trace.requests[0])
    assert num_checkpoints[0] > num_checkpoints[1]


def test_what_is_held_and_its_bound_count_a_checkpoint_in_int8() -> None:
    given_inputs = inputs()
    model = given_inputs.model
    task = Task(BEST, 30 * model.state_bytes, int8_checkpoints=True)
    assert task.costs(given_inputs).state_bytes == model.int8_state_bytes < model.state_bytes
    run = execute(given_inputs, task)
    assert run.to_json(timings=False)["int8_checkpoints"]
    kv_bytes = run.held_bytes - run.num_states_kept * model.int8_state_bytes
    assert kv_bytes >= 0
    assert kv_bytes % model.kv_bytes_per_token == 0
    assert limits_of(given_inputs, run.task)[1].per_state == model.int8_state_bytes
    exact = execute(given_inputs, Task(BEST, 30 * model.state_bytes, 0.9))
    assert run.num_states_kept > exact.num_states_kept
    assert limits_of(given_inputs, run.task) != limits_of(given_inputs, exact.task)


# The command line

REPLAY = ["replay", "generate:agent-append", "--max-sessions", "2", "--memory", "8GB", "--int8-checkpoints"]


@pytest.mark.parametrize(
    ("given_args", "message"),
    [
        (
            ["--policy", "lru"],
            "policy 'lru': --int8-checkpoints: the admission must plan ahead, as lru@judicious does, got chunk-end",
        ),
        (["--policy", "best@every-block"], "the admission must plan ahead, as best@judicious does, got every-block"),
        (
            ["--policy", "seglen"],
            "'seglen': --int8-checkpoints: the policy must be one of lru, marconi, tail, best",
        ),
        (["--policy", "lfu"], "policy 'lfu': --int8-checkpoints: the policy must be one of lru, marconi, tail, best"),
        (["--host-memory", "3GB"], "--host-memory must be left out with --int8-checkpoints"),
        (
            ["--model", "vicuna-7b"],
            "--int8-checkpoints must be left out for vicuna-7b, which keeps no recurrent states",
        ),
        (["--replicas", "2"], "--int8-checkpoints must be left out with --replicas"),
    ],
)
def test_what_a_server_refuses_is_refused_in_one_line(
    given_args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*REPLAY, "--model", "nemotron-h-8b", *given_args]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert len(said.splitlines()) == 1


def test_by_default_it_replays_the_policies_that_a_server_offers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*REPLAY, "--model", "nemotron-h-8b"]) == 0
    printed = capsys.readouterr().out
    assert "marconi, ratio 0.9, int8" in printed
    assert "best, ratio 0.9, int8" in printed
    assert "lru" not in printed


def test_stock_s_rule_is_replayed_with_the_admission_that_a_server_has(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*REPLAY, "--model", "nemotron-h-8b", "--policy", "lru@judicious"]) == 0
    assert "lru@judicious, ratio 0.9, int8" in capsys.readouterr().out
