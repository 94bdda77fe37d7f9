"""A cache saves its states and the next one loads them, on pools of the host's memory and without a model."""

import logging
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from marconi.engine.joint.pools import JointMemory
from marconi.engine.launch.policies import PolicyChoice
from marconi.engine.persistence import saver as module
from marconi.engine.persistence.files import INDEX, SavedFolder
from marconi.engine.persistence.saver import Saver
from marconi.engine.version import Refusal
from rig.driver import HostReplay
from rig.pools import Division, Strategy

from .host_replays import Setting, agents, on_marconi

pytestmark = pytest.mark.usefixtures("sglang_configuration")

SETTINGS = {
    "page-1": Setting(1, Strategy.EXTRA_BUFFER, 4000, 30),
    "page-16": Setting(16, Strategy.EXTRA_BUFFER, 4000 // 16 * 16, 30),
    "no-buffer": Setting(1, Strategy.NO_BUFFER, 4000, 30),
    "one-pool": Setting(1, Strategy.EXTRA_BUFFER, 4000, 30, memory=Division.ONE_POOL),
    "one-pool-page-16": Setting(16, Strategy.EXTRA_BUFFER, 4000, 30, memory=Division.ONE_POOL),
}
SETTING = SETTINGS["page-1"]
REQUESTS = agents(seed=1)
NUM_BEFORE = len(REQUESTS) // 2
IDENTITY = {"the model": "a"}
Held = dict[bytes, tuple[bytes, ...]]


def started(setting: Setting, choice: PolicyChoice | None = None) -> HostReplay:
    """An empty cache whose pools hold noise."""
    replay = on_marconi(setting, choice or PolicyChoice())
    draw = torch.Generator().manual_seed(7)
    pool = replay.cache.token_to_kv_pool_allocator.get_kvcache()
    states = pool.mamba_pool.mamba_cache
    for tensor in (*pool.full_kv_pool.k_buffer, *pool.full_kv_pool.v_buffer, states.temporal, *states.conv):
        noise = torch.randint(-128, 128, tensor.shape, generator=draw)
        tensor.copy_(noise.to(tensor.dtype))
    return replay


@dataclass
class StandInWeights:
    """Weights whose digest is known at once."""

    first: str = "w"
    now: str = "w"

    def digest(self, is_going_on: Callable[[], bool]) -> str:
        return self.first

    def were_updated(self) -> bool:
        return self.now != self.first

    def end(self) -> None:
        pass


def saver_of(replay: HostReplay, tmp_path: Path, weights: str = "w") -> Saver:
    return Saver(replay.cache, tmp_path / "rank-0", IDENTITY, StandInWeights(weights, weights))


def contents(replay: HostReplay) -> Held:
    """The bytes of the KV and of the state of every state, by its path."""
    core, allocator = replay.cache.tree_core, replay.cache.token_to_kv_pool_allocator
    pool, rows = allocator.get_kvcache(), replay.cache.req_to_token_pool
    states, held = pool.mamba_pool.mamba_cache, {}
    for node in core.hybrid.tree.nodes():
        if node.has_state:
            path, above = b"", node
            while above.parent is not None:
                path, above = above.key + path, above.parent
            kv, slot = core.memory.path_indices(node), rows.translate_mamba_indices(core.memory.states[node])
            if JointMemory.of(allocator) is not None:
                kv = allocator.translate_kv_loc(kv)
            parts = [buffer[kv] for buffer in (*pool.full_kv_pool.k_buffer, *pool.full_kv_pool.v_buffer)]
            parts += [buffer[:, slot] for buffer in (states.temporal, *states.conv)]
            held[path] = tuple(part.contiguous().view(torch.uint8).numpy().tobytes() for part in parts)
    return held


def served(replay: HostReplay, requests: Any) -> list[int | None]:
    hits = [replay.serve(request) for request in requests]
    replay.check_invariants()
    return hits


@pytest.mark.one_in(3)
@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_the_next_cache_holds_the_same_bits_and_hits_the_same_tokens(setting: Setting, tmp_path: Path) -> None:
    """In one pool by `lru`: what `best` has learned is not saved, and where all is evicted by worth that shows."""
    choice = PolicyChoice("lru") if setting.memory is Division.ONE_POOL else PolicyChoice()
    never_stopped = started(setting, choice)
    served(never_stopped, REQUESTS[:NUM_BEFORE])
    expected = served(never_stopped, REQUESTS[NUM_BEFORE:])
    first = started(setting, choice)
    served(first, REQUESTS[:NUM_BEFORE])
    before, ends = contents(first), len(first.cache.tree_core.memory.ends)
    saver_of(first, tmp_path).save()
    second = started(setting, choice)
    second.clock.now_s = first.clock.now_s
    second.clock.ticks(second.cache)
    saver_of(second, tmp_path).load()
    second.check_invariants()
    assert contents(second) == before
    assert len(before) > 10
    assert len(second.cache.tree_core.memory.ends) == ends
    hits = served(second, REQUESTS[NUM_BEFORE:])
    assert sum(map(int, filter(None, hits))) >= 0.95 * sum(map(int, filter(None, expected))) > 0
    cold = served(started(setting, choice), REQUESTS[NUM_BEFORE:])
    assert sum(map(int, filter(None, cold[:20]))) < 0.9 * sum(map(int, filter(None, hits[:20]))), "the control"


def saved(tmp_path: Path) -> Held:
    replay = started(SETTING)
    served(replay, REQUESTS[:NUM_BEFORE])
    held = contents(replay)
    saver_of(replay, tmp_path).save()
    return held


def loaded(tmp_path: Path, setting: Setting = SETTING, weights: str = "w") -> HostReplay:
    replay = started(setting)
    saver_of(replay, tmp_path, weights).load()
    replay.check_invariants()
    return replay


def test_a_flipped_byte_is_named_and_the_cache_starts_empty(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved(tmp_path)
    path = sorted((tmp_path / "rank-0").glob("*.safetensors"))[-1]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with caplog.at_level(logging.WARNING):
        assert contents(loaded(tmp_path)) == {}
    assert f"marconi: {path} must have the CRC-32" in caplog.text
    data[-1] ^= 1
    path.write_bytes(data)
    assert contents(loaded(tmp_path)) != {}, "the control: without the flip it is loaded"


@pytest.mark.parametrize("text", ["[" * 200_000, "[]", '{"crc32": 1, "body": {"format": 1}}'])
def test_an_odd_index_is_one_line_of_the_log_and_the_cache_starts_empty(
    text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path)
    (tmp_path / "rank-0" / INDEX).write_text(text)
    with caplog.at_level(logging.WARNING):
        assert contents(loaded(tmp_path)) == {}
    (record,) = [
        each for each in caplog.records if each.name.startswith("marconi.") and each.levelno >= logging.WARNING
    ]
    assert re.fullmatch(r"marconi: .*index\.json must .*; the cache starts empty", record.message)
    assert record.exc_info is None


def test_states_of_other_weights_are_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved(tmp_path)
    with caplog.at_level(logging.WARNING):
        assert contents(loaded(tmp_path, weights="other")) == {}
    assert f"{INDEX} must be of a server like this one: the weights must be other, got w" in caplog.text


def test_weights_that_were_updated_while_serving_are_not_saved_for(tmp_path: Path) -> None:
    replay = started(SETTING)
    served(replay, REQUESTS[:NUM_BEFORE])
    Saver(replay.cache, tmp_path / "rank-0", IDENTITY, StandInWeights("before", "after")).save()
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    "setting", [Setting(1, Strategy.EXTRA_BUFFER, 700, 30), Setting(1, Strategy.EXTRA_BUFFER, 4000, 9)]
)
def test_smaller_pools_load_what_fits(setting: Setting, tmp_path: Path) -> None:
    held = saved(tmp_path)
    replay = loaded(tmp_path, setting)
    found = contents(replay)
    assert 0 < len(found) < len(held)
    assert found.items() <= held.items()
    served(replay, REQUESTS[NUM_BEFORE:][:5])


def on_demand(saver: Saver, between: Callable[[], object] = lambda: None) -> dict[str, Any]:
    """Save on demand; `between` runs between two slices."""
    while True:
        answer = saver.advance()
        if answer is not None:
            return answer
        between()


@pytest.fixture
def slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """A state a slice."""
    monkeypatch.setattr(module, "SLICE_S", 0.0)


@pytest.mark.one_in(5)
@pytest.mark.usefixtures("slices")
@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_on_demand_the_same_is_saved_and_the_cache_goes_on_as_if_nobody_had_asked(
    setting: Setting, tmp_path: Path
) -> None:
    replay, other = started(setting), started(setting)
    for each in (replay, other):
        served(each, REQUESTS[:NUM_BEFORE])
    before, saver = contents(replay), saver_of(replay, tmp_path)
    answer = on_demand(saver)
    assert (answer["num_states"], answer["num_held"]) == (len(before), len(before))
    assert contents(replay) == before
    assert contents(loaded(tmp_path, setting)) == before
    assert served(replay, REQUESTS[NUM_BEFORE:]) == served(other, REQUESTS[NUM_BEFORE:])
    assert contents(replay) != before, "the control"


@pytest.mark.usefixtures("slices")
def test_what_is_evicted_between_two_slices_is_left_out_and_nothing_else_is_saved_in_its_place(tmp_path: Path) -> None:
    replay = started(SETTING)
    served(replay, REQUESTS[:NUM_BEFORE])
    before, saver, to_come = contents(replay), saver_of(replay, tmp_path), iter(REQUESTS[NUM_BEFORE:])
    saver.advance()
    for _ in range(5):
        replay.serve(next(to_come))
    answer = on_demand(saver, lambda: time.sleep(0.001))
    found = contents(loaded(tmp_path))
    assert 0 < len(found) == answer["num_states"] < answer["num_held"] == len(before)
    assert found.items() <= before.items()
    assert not before.items() <= contents(replay).items(), "the control"


@pytest.mark.usefixtures("slices")
def test_a_flush_while_saving_leaves_what_was_saved_before_it(tmp_path: Path) -> None:
    replay = started(SETTING)
    served(replay, REQUESTS[:NUM_BEFORE])
    before, saver, asked = contents(replay), saver_of(replay, tmp_path), count()
    answer = on_demand(saver, lambda: next(asked) == 5 and replay.cache.reset())
    assert 0 < answer["num_states"] < len(before)
    assert contents(loaded(tmp_path)).items() <= before.items()


@pytest.mark.usefixtures("slices")
def test_weights_that_are_updated_while_it_saves_leave_what_was_saved_before(tmp_path: Path) -> None:
    held = saved(tmp_path)
    replay = started(SETTING)
    served(replay, REQUESTS[NUM_BEFORE:])
    weights = StandInWeights()
    saver = Saver(replay.cache, tmp_path / "rank-0", IDENTITY, weights)
    assert "error" in on_demand(saver, lambda: setattr(weights, "now", "other"))
    assert contents(loaded(tmp_path)) == held
    assert "error" in on_demand(saver), "refused at once"
    weights.now = "w"
    assert "error" not in on_demand(saver), "the control"
    assert contents(loaded(tmp_path)) == contents(replay) != held


@pytest.mark.usefixtures("slices")
def test_a_stop_while_it_saves_on_demand_saves_all(tmp_path: Path) -> None:
    replay = started(SETTING)
    served(replay, REQUESTS[:NUM_BEFORE])
    before, saver = contents(replay), saver_of(replay, tmp_path)
    assert saver.advance() is None
    saver.save()
    assert contents(loaded(tmp_path)) == before
    assert [each.name for each in tmp_path.iterdir()] == ["rank-0"]


def test_on_demand_an_empty_cache_or_a_full_disk_leaves_what_was_saved_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = saved(tmp_path)
    replay = started(SETTING)
    saver = saver_of(replay, tmp_path)
    assert on_demand(saver)["num_states"] == 0
    served(replay, REQUESTS[NUM_BEFORE:])

    def full(*_: Any, **__: Any) -> int:
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(SavedFolder, "add", full)
        assert on_demand(saver) == {"error": "nothing was saved: OSError: no space left on device"}
    assert contents(loaded(tmp_path)) == held
    assert [each.name for each in tmp_path.iterdir()] == ["rank-0"]
    assert on_demand(saver)["num_states"], "the control"
    assert contents(loaded(tmp_path)) == contents(replay)


def test_saving_stops_when_its_time_is_over_and_what_was_saved_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replay = started(SETTING)
    served(replay, REQUESTS[:NUM_BEFORE])
    held, saver, seconds = contents(replay), saver_of(replay, tmp_path), count()
    with monkeypatch.context() as patch:
        patch.setattr(module, "time", SimpleNamespace(monotonic=lambda: float(next(seconds))))
        saver.save()
    found = contents(loaded(tmp_path))
    assert 0 < len(found) < 10 < len(held), "each state takes a second or two of the ten"
    assert found.items() <= held.items()


def test_a_write_that_fails_leaves_what_was_saved_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = saved(tmp_path)

    def full(*_: Any, **__: Any) -> int:
        raise OSError("no space left on device")

    monkeypatch.setattr(SavedFolder, "add", full)
    replay = started(SETTING)
    served(replay, REQUESTS[NUM_BEFORE:])
    saver_of(replay, tmp_path).save()
    assert contents(loaded(tmp_path)) == held


def test_a_server_that_served_nothing_leaves_what_was_saved_before(tmp_path: Path) -> None:
    held = saved(tmp_path)
    saver_of(started(SETTING), tmp_path).save()
    assert contents(loaded(tmp_path)) == held


def test_pools_that_are_not_copied_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replay = started(SETTING)
    kv = replay.cache.token_to_kv_pool_allocator
    monkeypatch.setattr(kv, "get_cpu_copy", lambda *_: {"kv": torch.zeros(1)})
    with pytest.raises(Refusal, match="the pools must be such as SGLang copies to the host, got HybridLinearKVPool"):
        saver_of(replay, tmp_path)
