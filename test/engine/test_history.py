"""The last hour in small figures: noted once a step, bounded, and by the status alone."""

from dataclasses import replace

import pytest

from marconi.engine.launch.policies import PolicyChoice
from marconi.engine.reports.history import NUM_STEPS, STEP_S, History
from marconi.engine.reports.status import Status, Use
from rig.joint_pools import KV_BYTES_PER_TOKEN, STATE_BYTES
from rig.pools import Division, Strategy

from .host_replays import Setting, agents, on_marconi

SETTING = Setting(1, Strategy.EXTRA_BUFFER, 2600, 9)


class UnixClock:
    def __init__(self) -> None:
        self.now_s = 1_796_070_003.0

    def __call__(self) -> float:
        return self.now_s


class Counted:
    """A status that says how often it was asked for."""

    def __init__(self, status: Status) -> None:
        self.status, self.num_asked = status, 0

    def __call__(self) -> Status:
        self.num_asked += 1
        return replace(self.status, num_prompt_tokens=self.num_asked)


@pytest.fixture
def counted() -> Counted:
    return Counted(on_marconi(SETTING, PolicyChoice("best")).cache.status())


@pytest.mark.usefixtures("sglang_configuration")
def test_a_step_is_noted_once_and_the_hour_is_bounded(counted: Counted) -> None:
    clock = UnixClock()
    history = History(counted, clock)
    for _ in range(100):
        history.report()
    assert counted.num_asked == 1
    clock.now_s += STEP_S - 4
    history.report()
    assert counted.num_asked == 1, "still within the step"
    clock.now_s += 1
    history.report()
    assert counted.num_asked == 2
    assert history.state()["at_s"] == [1_796_070_000, 1_796_070_010, 1_796_070_010]
    for _ in range(2 * NUM_STEPS):
        clock.now_s += STEP_S
        history.report()
    state = history.state()
    assert len(state["at_s"]) == NUM_STEPS + 1, "and what is so now"
    assert state["at_s"][-1] - state["at_s"][0] == (NUM_STEPS - 1) * STEP_S == 3600
    assert {len(column) for column in (*state["held"].values(), state["num_evictions"])} == {NUM_STEPS + 1}


@pytest.mark.usefixtures("sglang_configuration")
def test_steps_that_nothing_reported_are_left_out_and_forgotten_after_an_hour(counted: Counted) -> None:
    clock = UnixClock()
    history = History(counted, clock)
    history.report()
    clock.now_s += 1800
    history.report()
    assert [at_s - 1_796_070_000 for at_s in history.state()["at_s"]] == [0, 1800, 1803]
    clock.now_s += 1900
    assert [at_s - 1_796_070_000 for at_s in history.state()["at_s"]] == [1800, 3703]


@pytest.mark.usefixtures("sglang_configuration")
@pytest.mark.parametrize(("back_s", "num"), [(60, 1), (86_400, 2)])
def test_a_clock_that_is_set_back_is_awaited_for_an_hour_at_most(back_s: int, num: int, counted: Counted) -> None:
    clock = UnixClock()
    history = History(counted, clock)
    history.report()
    clock.now_s -= back_s
    history.report()
    history.report()
    assert counted.num_asked == num


@pytest.mark.usefixtures("sglang_configuration")
@pytest.mark.parametrize("memory", [Division.TWO_POOLS, Division.ONE_POOL])
def test_the_figures_of_a_served_trace_are_those_of_its_status(memory: Division) -> None:
    replay = on_marconi(replace(SETTING, memory=memory), PolicyChoice("best"))
    cache, clock = replay.cache, UnixClock()
    cache.stats.history = History(cache.status, clock)
    for request in agents(1):
        replay.serve(request)
        clock.now_s += STEP_S
    status, state = cache.status(), cache.stats.history.state()
    assert len(state["at_s"]) > 3, "the scheduler's own steps report"
    assert state["num_prompt_tokens"] == sorted(state["num_prompt_tokens"])
    assert (state["num_prompt_tokens"][-1], state["num_hit_tokens"][-1]) == (
        status.num_prompt_tokens,
        status.num_hit_tokens,
    )
    assert state["num_evictions"][-1] == sum(cache.tree_core.hybrid.counters.num_evictions.values()) > 0
    assert state["saved_s"] == status.saved_s
    sizes = {sum(amounts) for amounts in zip(*state["held"].values(), strict=True)}
    whole = status.kv_tokens.size * status.kv_bytes_per_token + status.state_slots.size * status.state_bytes
    assert sizes == {whole if status.joint_bytes is None else status.joint_bytes.size}
    assert (status.joint_bytes is None) == (memory is Division.TWO_POOLS)
    assert {"KV", "states", "in use", "free"} == state["held"].keys()
    assert state["held"]["KV"][-1] == status.kv_tokens.cached * status.kv_bytes_per_token > 0
    assert state["held"]["states"][-1] == status.num_states * status.state_bytes


def test_memory_in_use_counts_in_its_own_unit() -> None:
    status = on_marconi(SETTING, PolicyChoice("best")).cache.status()
    used = replace(
        status,
        kv_tokens=Use(100, 70, 20),
        state_slots=Use(10, 3, 5),
        kv_bytes_per_token=KV_BYTES_PER_TOKEN,
        state_bytes=STATE_BYTES,
    )
    kv, state = KV_BYTES_PER_TOKEN, STATE_BYTES
    assert used.held_bytes == {
        "KV": 20 * kv,
        "states": 5 * state,
        "in use": 10 * kv + 2 * state,
        "free": 70 * kv + 3 * state,
    }
    assert replace(used, joint_bytes=Use(1000, 300, 20 * kv + 7)).held_bytes == {
        "KV": 20 * kv,
        "states": 7,
        "in use": 700 - 20 * kv - 7,
        "free": 300,
    }
