"""Frames of a replay: the replay's own numbers, divided over steps."""

import re
from collections import Counter

import msgspec
import pytest

from marconi.model import PrefillLatency, load
from marconi.model.device import device
from marconi.policy.catalog import PolicySpec
from marconi.policy.host_tier import HostTier
from marconi.replay import serial
from marconi.replay.catalog import build
from marconi.replay.server import ServerReplay
from marconi.replay.task import ReplayInputs, Task
from marconi.replay.trace import Demand, generate, preset
from marconi.view.frame import MAX_EVICTED, Frame, encoded
from marconi.view.record import record
from marconi.view.snapshot import NodeKind

from .trees import columns_by_definition

GB = 10**9
MODEL = load("nemotron-h-8b")


@pytest.fixture(scope="module")
def inputs() -> ReplayInputs:
    trace = generate(preset("chat-short"), Demand(num_sessions=10, session_rate=1.0, seed=0), 1)
    return ReplayInputs(trace, MODEL, device("h100"), PrefillLatency(MODEL, device("h100")))


TASKS = {
    "one pool": Task(PolicySpec.parse("best"), 2 * GB),
    "two pools": Task(PolicySpec.parse("lru"), 2 * GB),
    "a host tier": Task(PolicySpec.parse("best"), GB, host_bytes=2 * GB),
}


@pytest.mark.parametrize("name", TASKS)
def test_the_frames_add_up_to_the_replay(name: str, inputs: ReplayInputs) -> None:
    task = TASKS[name]
    frames = [*record(inputs, task, num_frames=7)]
    target = build(task.policy, task.config(inputs))
    outcome = serial.replay(inputs.trace, target, inputs.latency)
    assert isinstance(target, ServerReplay)
    counters, pools, held = target.counters, target.pools, target.held
    assert sum(frame.hit_tokens for frame in frames) == sum(outcome.hit_tokens) > 0
    num_prompt_tokens = sum(request.num_prompt_tokens for request in inputs.trace.requests)
    missed: Counter[str] = Counter()
    for frame in frames:
        missed.update(frame.missed_tokens)
    assert missed.total() == num_prompt_tokens - sum(outcome.hit_tokens)
    assert missed == {cause.replace("_", " "): num for cause, num in counters.num_missed_tokens.items() if num}
    assert sum(frame.num_evicted for frame in frames) == sum(counters.num_evictions.values()) > 0
    # The whole tree, as the definition has it.
    hybrid = target.hybrid
    assert frames[-1].nodes == columns_by_definition(hybrid.tree, hybrid.order, inputs.trace.requests[-1].arrival_s)
    is_ranked = [kind & (NodeKind.STATE | NodeKind.LOCKED) == NodeKind.STATE for kind in frames[-1].nodes.kind]
    assert [worth >= 0 for worth in frames[-1].nodes.worth] == is_ranked
    assert frames[-1].nodes.worth.count(0) == 1, "the next victim"
    assert max(frames[-1].nodes.worth) == 100
    assert (8 in {kind & 8 for kind in frames[-1].nodes.kind}) == (name == "a host tier")
    last = frames[-1].pools
    names = {
        "one pool": ["KV and states"],
        "two pools": ["KV", "states"],
        "a host tier": ["KV and states", "KV on the host", "states on the host"],
    }
    assert [pool.name for pool in last] == names[name]
    if name == "a host tier":
        assert isinstance(target.hybrid.host, HostTier)
        copies = target.hybrid.host.copies
        assert [pool.cached for pool in last[1:]] == [{"KV": copies.num_tokens}, {"states": copies.num_states}]
    for pool in last:
        assert pool.free + sum(pool.cached.values()) == pool.size
    if name == "two pools":
        assert [pool.cached for pool in last] == [{"KV": held.num_tokens}, {"states": held.num_states}]
        assert last[0].size == pools.num_tokens


def test_every_eviction_is_listed_with_what_it_was_for_and_what_it_freed(inputs: ReplayInputs) -> None:
    task = Task(PolicySpec.parse("best"), 2 * GB, mamba_ratio=0.9)
    frames = [*record(inputs, task, num_frames=len(inputs.trace.requests))]
    listed = [each for frame in frames for each in frame.evicted]
    assert sum(frame.num_evicted for frame in frames) == len(listed)
    assert max(frame.num_evicted for frame in frames) <= MAX_EVICTED
    target = build(task.policy, task.config(inputs))
    serial.replay(inputs.trace, target, inputs.latency)
    counters = target.counters
    by_need = {need.value: num for need, num in counters.num_evictions.items() if num}
    assert {need: sum(each.need == need for each in listed) for need in by_need} == by_need
    assert sum(each.tokens for each in listed) == counters.num_evicted_tokens
    assert all(each.idle_s >= 0 for each in listed)
    # Of the few at the end of a run no other state is weighed.
    told = [each.kept for each in listed if each.kept]
    assert len(told) > len(listed) / 2
    assert all(re.fullmatch(r"(a|an) [a-z' ]+ at [\d,]+ tokens, worth [\d.e+]+ times as much", text) for text in told)
    # The last of a path that went is listed under the hash that its ghost has in the frame.
    gone = [(each.hash, each.depth) for frame in frames for each in frame.evicted if each.tokens]
    ghosts = {
        (hash_, depth)
        for frame in frames
        for hash_, depth, kind in zip(frame.nodes.hash, frame.nodes.depth, frame.nodes.kind, strict=True)
        if kind == NodeKind.GHOST
    }
    assert gone
    assert {*gone} & ghosts


def test_frames_are_at_requests_that_are_evenly_spaced_the_last_after_the_last(inputs: ReplayInputs) -> None:
    num = len(inputs.trace.requests)
    frames = [*record(inputs, TASKS["one pool"], num_frames=5)]
    assert [frame.num_requests for frame in frames] == [num * each // 5 for each in range(1, 6)]
    assert frames[-1].time_s == round(inputs.trace.requests[-1].arrival_s, 3)
    assert len([*record(inputs, TASKS["one pool"], num_frames=10 * num)]) == num


def test_the_same_replay_gives_the_same_bytes(inputs: ReplayInputs) -> None:
    task = TASKS["a host tier"]
    assert encoded([*record(inputs, task, 3)]) == encoded([*record(inputs, task, 3)])


@pytest.mark.parametrize("policy", ["best", "marconi", "tail:0.2"])
def test_watching_changes_no_hit(policy: str, inputs: ReplayInputs) -> None:
    """The cache shows the recorder its victims, and its order; without it the replay hits the same by request."""
    task = TASKS["a host tier"] if policy == "best" else Task(PolicySpec.parse(policy), 2 * GB)
    hits = [frame.hit_tokens for frame in record(inputs, task, len(inputs.trace.requests))]
    target = build(task.policy, task.config(inputs))
    assert hits == serial.replay(inputs.trace, target, inputs.latency).hit_tokens


@pytest.mark.parametrize("policy", ["lfu", "static-oracle"])
def test_a_policy_without_a_tree_of_its_own_is_refused(policy: str, inputs: ReplayInputs) -> None:
    with pytest.raises(ValueError, match="--policy must be one policy with a tree"):
        [*record(inputs, Task(PolicySpec.parse(policy), GB), 2)]


def test_a_frame_survives_its_json(inputs: ReplayInputs) -> None:
    frames = [*record(inputs, TASKS["two pools"], 2)]
    read = msgspec.json.decode(encoded(frames), type=dict[str, list[Frame]])
    assert read == {"frames": frames}
