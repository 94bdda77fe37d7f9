"""Policies by name: every one can be replayed, and what is wrong is said in a line."""

import itertools
import re
from dataclasses import replace

import pytest

from baselines.block_replays import replay as replay_blocks
from marconi.model import DEVICES, PrefillLatency, load
from marconi.policy.admission.plan import STEP_TOKENS, Judicious
from marconi.policy.base import Role
from marconi.policy.catalog import PolicySpec, parse_list
from marconi.policy.eviction.classed import ClassedEviction
from marconi.policy.request import Lease, Request, Trace, pack
from marconi.replay.admission.chunk_end import ExtraBuffer, NoBuffer
from marconi.replay.admission.every_block import EveryBlock
from marconi.replay.admission.named import admission_of
from marconi.replay.catalog import build, known_policies, resolve_policy
from marconi.replay.grid import execute, require_executable, run_tasks
from marconi.replay.pools import JointPool, TwoPools
from marconi.replay.server import ServerReplay
from marconi.replay.target import CacheConfig, Host, block_bytes
from marconi.replay.task import Mode, ReplayInputs, Task
from marconi.tree import RadixTree, check_invariants
from marconi_lab.block import VARIANTS, make
from marconi_lab.block.server import BlockServer
from marconi_lab.traffic import added_tokens, budget_tokens, turn_model

from .worlds import COSTS, STATE_BYTES, SecondAToken, conversations, request, trace

BLOCK = 16
BLOCKS = conversations(unit_tokens=BLOCK)
MODEL = load("nemotron-h-8b")
INPUTS = ReplayInputs(BLOCKS, MODEL, DEVICES["h100"], PrefillLatency(MODEL, DEVICES["h100"]), slo_s=0.01)
MEMORY_BYTES = 20 * (MODEL.checkpoint_bytes + 10 * BLOCK * MODEL.kv_bytes_per_token)
REPLAYABLE = [name for name, policy in known_policies().items() if not policy.alternatives]


def spec_of(name: str) -> PolicySpec:
    policy = known_policies()[name]
    needs_number = policy.parameter is not None and policy.parameter.default is None
    return PolicySpec(name, "0.5" if needs_number else None)


def config(what: Trace = BLOCKS, mamba_ratio: float | None = None) -> CacheConfig:
    return CacheConfig(what, INPUTS.costs, INPUTS.latency, MEMORY_BYTES, mamba_ratio, slo_s=INPUTS.slo_s)


def cache_of(text: str, mamba_ratio: float | None = None) -> ServerReplay:
    cache = build(PolicySpec.parse(text), config(mamba_ratio=mamba_ratio))
    assert isinstance(cache, ServerReplay)
    return cache


@pytest.mark.parametrize("name", REPLAYABLE)
def test_every_policy_serves_a_trace_within_its_memory(name: str) -> None:
    target = build(spec_of(name), config())
    for each in BLOCKS.requests:
        target.serve(each)
        held = target.held
        assert (
            held.num_tokens * INPUTS.costs.kv_bytes_per_token + held.num_states * INPUTS.costs.state_bytes
            <= MEMORY_BYTES
        )
    assert target.counters.num_requests == len(BLOCKS.requests)
    assert sum(target.counters.num_evictions.values()) > 0
    if isinstance(target, ServerReplay):
        target.check_invariants()
        check_invariants(target.hybrid.tree)


@pytest.mark.parametrize("name", REPLAYABLE)
def test_every_tree_policy_works_with_two_pools_and_beside_running_requests(name: str) -> None:
    inputs = ReplayInputs(BLOCKS, MODEL, INPUTS.device, INPUTS.latency, Mode.QUEUEING)
    task = Task(spec_of(name), MEMORY_BYTES, mamba_ratio=0.5)
    if isinstance(build(task.policy, config()), BlockServer):
        with pytest.raises(ValueError, match=f"policy '{name}': --mamba-full-memory-ratio must be left out .* got 0.5"):
            execute(replace(inputs, mode=Mode.SERIAL), task)
        with pytest.raises(ValueError, match="--mode must be serial"):
            execute(inputs, Task(task.policy, MEMORY_BYTES))
    else:
        run = execute(inputs, task)
        assert run.num_requests == len(BLOCKS.requests)
        assert run.num_hit_tokens > 0
        assert run.task.mamba_ratio == 0.5


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("name", REPLAYABLE)
def test_what_cannot_be_replayed_is_refused_beforehand_and_nothing_else_is(name: str, mode: Mode) -> None:
    no_second_turn = Trace("strangers", BLOCK, tuple(replace(each, session=-1) for each in BLOCKS.requests[:9]))
    tokens = conversations(num_sessions=2, num_turns=3)
    num_refused = 0
    for what, memory_bytes, ratio, model in itertools.product(
        (BLOCKS, no_second_turn, tokens), (1, MEMORY_BYTES), (None, 0.5), (MODEL, load("vicuna-7b"))
    ):
        inputs = ReplayInputs(what, model, INPUTS.device, PrefillLatency(model, INPUTS.device), mode)
        task = Task(spec_of(name), memory_bytes, ratio)
        refused: list[str | None] = []
        for tries in (require_executable, execute):
            try:
                tries(inputs, task)
                refused.append(None)
            except ValueError as error:
                refused.append(str(error))
        beforehand, then = refused
        assert (beforehand is None) == (then is None), (beforehand, then)
        assert beforehand is None or beforehand.startswith(f"policy '{task.policy}': ")
        num_refused += beforehand is not None
    assert num_refused > 0


def tasks(policies: str) -> list[Task]:
    return [Task(policy, MEMORY_BYTES) for policy in parse_list(policies)]


def test_a_policy_with_alternatives_is_refused_by_its_own_name() -> None:
    inputs = ReplayInputs(BLOCKS, MODEL, INPUTS.device, INPUTS.latency)
    with pytest.raises(ValueError, match=r"policy 'static-oracle@judicious:24': .* the trace's unit, 16 tokens"):
        run_tasks(inputs, tasks("lru,static-oracle@judicious:24"), 1, lambda _: None)


def test_nothing_is_replayed_before_every_policy_is_known_to_be_possible() -> None:
    inputs = ReplayInputs(BLOCKS, MODEL, INPUTS.device, INPUTS.latency)
    with pytest.raises(ValueError, match=r"policy 'lru@judicious:24'"):
        run_tasks(inputs, tasks("lru,lru@judicious:24"), 1, lambda _: pytest.fail("a replay ran"))


def test_a_model_without_states_has_all_its_memory_for_kv() -> None:
    model = load("vicuna-7b")
    assert model.state_bytes == 0
    memory_bytes = 40 * 10 * BLOCK * model.kv_bytes_per_token
    inputs = ReplayInputs(BLOCKS, model, INPUTS.device, PrefillLatency(model, INPUTS.device))
    stock, pools = (execute(inputs, Task(PolicySpec("lru", None, "judicious"), size)) for size in (memory_bytes, 10**9))
    joint = execute(inputs, Task(PolicySpec("lru-joint"), memory_bytes))
    made = build(PolicySpec("lru", None, "judicious"), Task(PolicySpec("lru"), memory_bytes).config(inputs))
    assert isinstance(made, ServerReplay)
    assert made.pools.num_tokens == 40 * 10 * BLOCK, "all of it is KV"
    assert stock.num_hit_tokens == pytest.approx(joint.num_hit_tokens, rel=0.03), "in one pool a state is a byte"
    assert stock.num_too_large == 0
    assert stock.task.mamba_ratio is joint.task.mamba_ratio is None
    assert pools.held_bytes > 0.6 * 10**9
    assert dict(pools.num_evictions)["state"] == 0 < dict(pools.num_evictions)["kv"]
    with pytest.raises(
        ValueError, match=r"policy 'lru': --mamba-full-memory-ratio must be left out for a model without states, got 2"
    ):
        execute(inputs, Task(PolicySpec("lru"), memory_bytes, 2.0))


def test_a_run_says_the_ratio_it_ran_at() -> None:
    ratios = [
        execute(INPUTS, Task(PolicySpec(name), MEMORY_BYTES, ratio)).task.mamba_ratio
        for name, ratio in (("lru", None), ("lru", 2.0), ("lru-joint", None), ("lru-joint", 0.5), ("lfu", None))
    ]
    assert ratios == [0.9, 2.0, None, 0.5, None]


@pytest.mark.parametrize("name", [name for name in known_policies() if name not in REPLAYABLE])
def test_a_policy_that_is_the_best_of_several_names_ones_that_can_be_replayed(name: str) -> None:
    choices = known_policies()[name].choices(PolicySpec(name, admission="judicious:64"))
    assert len(choices) > 1
    for choice in choices:
        assert choice.admission == "judicious:64"
        assert resolve_policy(choice).make is not None


def test_a_spec_is_name_number_and_admission() -> None:
    text = "lru,marconi-static:0.5,lru-joint@every-block:512,gdsf@judicious"
    assert parse_list(text) == (
        PolicySpec("lru"),
        PolicySpec("marconi-static", "0.5"),
        PolicySpec("lru-joint", None, "every-block:512"),
        PolicySpec("gdsf", None, "judicious"),
    )
    assert ",".join(map(str, parse_list(text))) == text


def test_the_number_reaches_the_rule() -> None:
    rule = cache_of("marconi-static:0.75").hybrid.order.rule
    assert isinstance(rule, ClassedEviction)
    assert rule.weight == 0.75


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must be NAME, NAME:NUMBER"),
        ("lru,,seglen", "must be NAME, NAME:NUMBER"),
        ("lru@", "must be NAME, NAME:NUMBER"),
        ("lru:", "must be NAME, NAME:NUMBER"),
        ("lru,seglen,lru", "--policy must name each policy once, got 'lru,seglen,lru'"),
        ("lru:3", "the policy must be lru, without a number, got 'lru:3'"),
        ("marconi-static", "the policy must be marconi-static:ALPHA, with a number, got 'marconi-static'"),
        ("marconi-static:much", "marconi-static:ALPHA must be a number, 0 or more"),
        ("marconi-static:-1", "marconi-static:ALPHA must be a number, 0 or more"),
        ("marconi-static:inf", "marconi-static:ALPHA must be a number, 0 or more"),
        ("tlru:1.9", "policy 'tlru:1.9': tlru:XI must be a whole number, 0 or more"),
        ("threshold-lru:0.5", "threshold-lru:TOKENS must be a whole number, 0 or more"),
        ("tail-belady:nan", "tail-belady:XI must be a whole number, 0 or more"),
        ("lfu@judicious", "policy 'lfu@judicious': a block cache must have no admission, got 'judicious'"),
        ("lru@chunk-end:0", "policy 'lru@chunk-end:0': admission 'chunk-end:0': INTERVAL must be"),
    ],
)
def test_a_wrong_spec_is_refused_in_a_line(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        list(map(resolve_policy, parse_list(text)))


def test_an_unknown_policy_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"a policy must be one of .*lru, .*belady.*, got 'lry'"):
        resolve_policy(PolicySpec("lry"))


@pytest.mark.parametrize(
    ("text", "unit", "expected"),
    [
        ("judicious", 1, Judicious(1)),
        ("judicious", 512, Judicious(512)),
        ("judicious:exact", 16, Judicious(16)),
        ("judicious:64", 16, Judicious(64)),
        ("every-block", 1, EveryBlock(32)),
        ("every-block", 512, EveryBlock(512, 512)),
        ("every-block:1024", 512, EveryBlock(1024, 512)),
        ("every-block:512:exact", 1, EveryBlock(512, 1)),
        ("every-block:528:64", 1, EveryBlock(528, 64)),
        ("chunk-end", 1, ExtraBuffer(64, 256, 8192)),
        ("chunk-end:1024", 512, ExtraBuffer(512, 1024, 8192)),
        ("chunk-end:512:128", 1, ExtraBuffer(128, 512, 8192)),
        ("chunk-end:256:64:2048", 1, ExtraBuffer(64, 256, 2048)),
        ("chunk-end:256:exact:2048", 16, ExtraBuffer(16, 256, 2048)),
        ("no-buffer", 48, NoBuffer(48, 8208)),
        ("no-buffer:4096", 1, NoBuffer(1, 4096)),
        ("no-buffer:4096:64", 1, NoBuffer(64, 4096)),
        ("no-buffer:4096:exact", 16, NoBuffer(16, 4096)),
    ],
)
def test_an_admission_stands_on_the_units_of_the_trace(text: str, unit: int, expected: object) -> None:
    assert admission_of(text, unit) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("always", "an admission must be one of judicious, every-block, .*, got 'always'"),
        ("judicious:0", "GRID must be a whole number of tokens, 1 or more, or exact, got '0'"),
        ("judicious:", "GRID must be a whole number of tokens, 1 or more, or exact, got ''"),
        ("judicious:64:64", "the admission must be judicious:GRID or a beginning of it, got 'judicious:64:64'"),
        ("every-block:exact", "N must be a whole number of tokens, 1 or more, got 'exact'"),
        ("every-block:512:8", "GRID must be a multiple of the trace's unit, 16 tokens, got 8"),
        ("chunk-end:256:64:8192:1", "must be chunk-end:INTERVAL:GRID:CHUNK or a beginning of it"),
        ("chunk-end:256:64:exact", "CHUNK must be a whole number of tokens, 1 or more, got 'exact'"),
        ("chunk-end:256:64:32", "CHUNK must be at least the grid of 64 tokens, got 32"),
        ("no-buffer:8192:1:1", "must be no-buffer:CHUNK:GRID or a beginning of it"),
        ("judicious:24", "GRID must be a multiple of the trace's unit, 16 tokens, got 24"),
    ],
)
def test_an_admission_that_cannot_be_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        admission_of(text, BLOCK)


def test_blocks_that_are_not_on_the_grid_are_cut_to_it() -> None:
    def depths(text: str, num_tokens: int) -> list[int]:
        new = request("x" * num_tokens)
        return list(admission_of(text, 1).depths(new, RadixTree().match(new.path, num_tokens - 1)))

    assert depths("every-block:10:exact", 45) == depths("every-block:10", 45) == [10, 20, 30, 40]
    assert depths("every-block:10:4", 45) == [8, 20, 28, 40]
    assert depths("every-block:3:8", 30) == [8, 16, 24]


def test_a_block_on_the_grid_lies_beyond_what_was_hit() -> None:
    tree, new = RadixTree(), request("x" * 45)
    tree.insert(new.path, [8])
    assert list(admission_of("every-block:10:4", 1).depths(new, tree.match(new.path, 44))) == [20, 28, 40]


def test_a_chunk_end_stands_on_the_grid_and_in_the_chunks_that_are_asked_for() -> None:
    new = request("x" * 100)
    match = RadixTree().match(new.path, 99)
    assert list(admission_of("chunk-end:256:16:40", 1).depths(new, match)) == [32, 72, 96]
    assert list(admission_of("chunk-end:256:exact:40", 1).depths(new, match)) == [40, 80, 100]
    assert list(admission_of("no-buffer:40:16", 1).depths(new, match)) == [32, 80, 96]


def test_stock_sglang_has_two_pools_at_its_default_ratio_and_others_one() -> None:
    stock, ours = cache_of("lru").pools, cache_of("lru-joint").pools
    assert isinstance(stock, TwoPools)
    kv_bytes, state_bytes = (
        INPUTS.costs.kv_bytes_per_token * stock.num_tokens,
        INPUTS.costs.state_bytes * stock.num_slots,
    )
    assert state_bytes / kv_bytes == pytest.approx(0.9, rel=0.1), "in whole states and units"
    assert 0.9 * MEMORY_BYTES < state_bytes + kv_bytes <= MEMORY_BYTES
    assert isinstance(ours, JointPool)
    assert ours.num_bytes == MEMORY_BYTES


@pytest.mark.parametrize("name", ["lru", "lru-joint", "marconi"])
def test_a_ratio_that_is_asked_for_splits_every_policy(name: str) -> None:
    pools, costs = cache_of(name, mamba_ratio=3.0).pools, INPUTS.costs
    kv_bytes, state_bytes = MEMORY_BYTES - int(MEMORY_BYTES * 0.75), int(MEMORY_BYTES * 0.75)
    num_units = kv_bytes // (costs.kv_bytes_per_token * BLOCK)
    assert pools == TwoPools(num_units * BLOCK, state_bytes // costs.state_bytes)


@pytest.mark.parametrize(
    ("admission", "num_working_slots", "num_lent_slots"),
    [("judicious", 1, 2), ("chunk-end", 3, 0), ("no-buffer", 1, 0), ("every-block", 1, 0)],
)
def test_a_request_works_on_as_many_slots_as_sglang_gives_it_or_as_it_needs(
    admission: str, num_working_slots: int, num_lent_slots: int
) -> None:
    scheduling = cache_of(f"lru@{admission}").scheduling
    assert (scheduling.num_working_slots, scheduling.num_lent_slots) == (num_working_slots, num_lent_slots)


@pytest.mark.parametrize("name", ["lru-block", "lfu", "s3fifo"])
def test_a_block_cache_hits_what_the_published_block_replay_hits(name: str) -> None:
    capacity_blocks = 40
    assert block_bytes(BLOCK, COSTS) == BLOCK + STATE_BYTES
    server = BlockServer(name, capacity_blocks * block_bytes(BLOCK, COSTS), BLOCK, COSTS)
    expected = replay_blocks(BLOCKS, make(name, capacity_blocks))
    assert sum(map(server.serve, BLOCKS.requests)) == expected["total_hit_tokens"] > 0
    assert server.held.num_states == expected["final_cache_blocks"]
    assert server.counters.num_states_written == server.held.num_states + sum(server.counters.num_evictions.values())


def test_the_entries_that_cache_blocks_are_the_block_caches() -> None:
    assert {policy.name for policy in known_policies().values() if policy.caches_blocks} == {
        each.name for each in VARIANTS
    }


def test_a_block_cache_takes_neither_tokens_nor_an_admission_nor_too_little_memory() -> None:
    with pytest.raises(ValueError, match=r"'lfu': .* --block-tokens N, 2 or more, got single tokens"):
        build(PolicySpec("lfu"), config(trace(request("abc"))))
    with pytest.raises(ValueError, match="must have no admission"):
        build(PolicySpec.parse("lfu@judicious"), config())
    with pytest.raises(ValueError, match="33 bytes in blocks of 26 bytes: s3fifo"):
        BlockServer("s3fifo", 33, BLOCK, COSTS)


def test_what_rules_assume_of_traffic_is_measured_on_the_trace() -> None:
    two_sessions = trace(
        request("abcd", "ef", 0.0, session=0),
        request("wxyz", "!", 2.0, session=1),
        request("abcdefgh", "ij", 10.0, session=0),
        request("abcdefghij12", "", 30.0, session=0),
    )
    assert added_tokens(two_sessions) == 2
    turns = turn_model(two_sessions)
    assert (turns.turn_per_s, turns.end_per_s) == pytest.approx((1 / 15, 1 / 15))
    assert budget_tokens(SecondAToken(), 7.5) == 7
    assert budget_tokens(SecondAToken(), 0.5) == 0


def test_a_trace_without_sessions_has_no_turns() -> None:
    lonely = trace(request("abcd"), request("abcd"))
    assert added_tokens(lonely) == 0
    with pytest.raises(ValueError, match="must have a session of 2 turns or more for et-lru"):
        turn_model(lonely)


@pytest.mark.parametrize(
    ("mamba_ratio", "host", "fills_spare"), [(None, None, False), (0.9, None, True), (0.9, Host(10**12, 1e9), False)]
)
def test_spare_slots_are_filled_in_two_pools_without_a_host_tier(
    mamba_ratio: float | None, host: Host | None, fills_spare: bool
) -> None:
    cache = build(spec_of("best"), replace(config(mamba_ratio=mamba_ratio), host=host))
    assert isinstance(cache, ServerReplay)
    num_blocks = 3 * STEP_TOKENS // BLOCK
    long = Request(pack(range(num_blocks)), num_blocks * BLOCK, 0, num_blocks * BLOCK, 0.0)
    plan = cache.hybrid.plan(Lease(long, cache.hybrid.match(long)))
    assert (Role.WAYPOINT in plan.roles.values()) == fills_spare
