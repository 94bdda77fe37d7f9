"""States of both tiers are saved, and the next server's host tier has them while it serves."""

import logging
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import PoolName

from marconi.engine.host import pages as pages_module
from marconi.engine.launch.policies import PolicyChoice
from marconi.engine.persistence import background
from marconi.engine.persistence.files import INDEX
from marconi.engine.persistence.saver import Saver
from marconi.tree import Node
from rig.clock import TraceClock
from rig.driver import HostReplay
from rig.pools import HostPools, Strategy, marconi

from .host_replays import COSTS, agents
from .test_saver import Held, StandInWeights, on_demand

pytestmark = pytest.mark.usefixtures("sglang_configuration")

POOLS = {
    "page-1": HostPools(1_600, 16, 4_096, host_ratio=3.0, save_dir=Path("saved")),
    "page-16": HostPools(1_600, 16, 4_096, page_tokens=16, host_ratio=3.0, save_dir=Path("saved")),
    "no-buffer": HostPools(1_600, 16, 4_096, strategy=Strategy.NO_BUFFER, host_ratio=3.0, save_dir=Path("saved")),
}
SMALL = POOLS["page-1"]
REQUESTS = agents(seed=1)
NUM_BEFORE = len(REQUESTS) // 2
LIMIT_S = 30.0


def started(host: HostPools = SMALL) -> HostReplay:
    """An empty cache whose pools hold noise, another in each place of each pool."""
    clock = TraceClock()
    replay = HostReplay(marconi(host, PolicyChoice(), COSTS, clock), host, 1, clock)
    draw = torch.Generator().manual_seed(7)
    pool = replay.cache.token_to_kv_pool_allocator.get_kvcache()
    states = pool.mamba_pool.mamba_cache
    for tensor in (*pool.full_kv_pool.k_buffer, *pool.full_kv_pool.v_buffer, states.temporal, *states.conv):
        tensor.copy_(torch.randint(-128, 128, tensor.shape, generator=draw).to(tensor.dtype))
    return replay


def serve(replay: HostReplay, requests: object = REQUESTS[:NUM_BEFORE]) -> None:
    """Serve, with a step of the scheduler and its copies between two requests."""
    for request in requests:  # type: ignore[attr-defined]
        replay.serve(request)
        replay.cache.check_hicache_events()
        replay.cache.settle()
    replay.check_invariants()


def path_of(node: Node) -> bytes:
    return b"" if node.parent is None else path_of(node.parent) + node.key


def as_bytes(*parts: torch.Tensor) -> tuple[bytes, ...]:
    return tuple(part.contiguous().view(torch.uint8).numpy().tobytes() for part in parts)


def on_device(replay: HostReplay) -> Held:
    """The bytes of the state of every state on the device, by its path."""
    core = replay.cache.tree_core
    states = replay.cache.token_to_kv_pool_allocator.get_kvcache().mamba_pool.mamba_cache
    return {
        path_of(node): as_bytes(*(buffer[:, core.memory.states[node]] for buffer in (states.temporal, *states.conv)))
        for node in core.hybrid.tree.nodes()
        if node.has_state
    }


def on_host(replay: HostReplay) -> Held:
    """The bytes of the KV and of the state of every copy on the host, by its path."""
    rows, pools = replay.cache.tree_core.rows, replay.cache.host_pool_group
    page, held = replay.host.page_tokens, {}
    kv_pool, state_pool = pools.get_pool(PoolName.KV), pools.get_pool(PoolName.MAMBA)
    for node, slot in rows.states.items():
        kv = [kv_pool.get_data_page(row) for row in rows.path_rows(node, 0)[::page].tolist()]
        held[path_of(node)] = as_bytes(torch.cat(kv), state_pool.get_data_page(int(slot)))
    return held


def saver_of(replay: HostReplay, tmp_path: Path) -> Saver:
    return Saver(replay.cache, tmp_path / "rank-0", {"the model": "a"}, StandInWeights())


def check(replay: HostReplay) -> None:
    """Nothing is lost on either tier: what a pool of the host lacks, the tree holds."""
    replay.check_invariants()
    core, pools = replay.cache.tree_core, replay.cache.host_pool_group
    held = core.tier.copies
    for name, num_held in ((PoolName.KV, held.num_tokens), (PoolName.MAMBA, held.num_states)):
        pool = pools.get_pool(name)
        assert pool.available_size() + num_held == pool.size, f"{name} is lost on the host"


def steps(replay: HostReplay, saver: Saver) -> int:
    """Steps of the scheduler until all is loaded."""
    replay.cache.saver = saver
    num_steps, deadline_s = 0, time.monotonic() + LIMIT_S
    while saver._loading is not None:
        assert time.monotonic() < deadline_s
        replay.cache.check_hicache_events()
        num_steps += 1
    return num_steps


def restarted(tmp_path: Path, host: HostPools = SMALL, host_ratio: float = 6.0) -> HostReplay:
    """The next server, whose host tier has room for all of both."""
    replay = started(replace(host, host_ratio=host_ratio))
    saver = saver_of(replay, tmp_path)
    saver.load()
    steps(replay, saver)
    check(replay)
    return replay


@pytest.mark.parametrize("host", POOLS.values(), ids=POOLS)
def test_the_next_host_tier_holds_the_bits_of_both_tiers(host: HostPools, tmp_path: Path) -> None:
    first = started(host)
    serve(first)
    device, copies = on_device(first), on_host(first)
    assert device.keys() - copies.keys(), "some are on the device alone"
    assert copies.keys() - device.keys(), "and some on the host alone"
    saver_of(first, tmp_path).save()
    check(first)
    assert (on_device(first), on_host(first)) == (device, copies), "saving changes nothing"
    second = restarted(tmp_path, host)
    found = on_host(second)
    assert found.keys() == device.keys() | copies.keys()
    for path in device.keys() - copies.keys():
        # On the device layers lie apart, in the file one state together.
        assert sorted(b"".join(device[path])) == sorted(found[path][1]), "the state of one that had no copy"
    # A prefix that was computed anew on the device may have other KV than its copy; the state has its own bits.
    assert {path: copy[1] for path, copy in copies.items()} == {path: found[path][1] for path in copies}
    num_same = sum(found[path] == copies[path] for path in copies)
    assert num_same >= len(copies) / 2
    assert not on_device(second), "the device is free for what comes"
    serve(second, REQUESTS[NUM_BEFORE:])
    check(second)


def test_the_control_states_that_are_zeroed_are_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = started()
    serve(first)
    copies = on_host(first)
    saver_of(first, tmp_path).save()
    write = pages_module.HostPages.write

    def zeroed(self: pages_module.HostPages, name: PoolName, rows: torch.Tensor, pages: torch.Tensor) -> None:
        write(self, name, rows, torch.zeros_like(pages) if name is PoolName.MAMBA else pages)

    monkeypatch.setattr(pages_module.HostPages, "write", zeroed)
    found = on_host(restarted(tmp_path))
    assert found.keys() >= copies.keys()
    written = [path for path, copy in copies.items() if any(copy[1])]
    assert written, "the control broke no state"
    assert all(found[path][1] != copies[path][1] for path in written)


def test_a_flipped_byte_is_named_and_nothing_is_loaded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = started()
    serve(first)
    saver_of(first, tmp_path).save()
    path = sorted((tmp_path / "rank-0").glob("*.safetensors"))[-1]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with caplog.at_level(logging.WARNING):
        assert on_host(restarted(tmp_path)) == {}
    assert f"marconi: {path} must have the CRC-32" in caplog.text
    data[-1] ^= 1
    path.write_bytes(data)
    assert on_host(restarted(tmp_path)) != {}, "the control: without the flip it is loaded"


def test_a_server_without_a_host_tier_refuses_it_by_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = started()
    serve(first)
    saver_of(first, tmp_path).save()
    second = started(replace(SMALL, host_ratio=0.0))
    with caplog.at_level(logging.WARNING):
        saver_of(second, tmp_path).load()
    assert f"{INDEX} must be of a server like this one: the layout of KV and states must be" in caplog.text
    assert not on_device(second)


def test_a_smaller_tier_holds_the_most_valuable(tmp_path: Path) -> None:
    first = started()
    serve(first)
    saver_of(first, tmp_path).save()
    whole = on_host(restarted(tmp_path))
    found = on_host(restarted(tmp_path, host_ratio=1.1))
    assert 0 < len(found) < len(whole)
    assert found.items() <= whole.items()


def test_it_serves_while_it_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page a step; requests that come meanwhile leave states of their own, on paths that are being loaded, too."""
    monkeypatch.setattr(background, "SLICE_S", 0.0)
    monkeypatch.setattr(background, "_PAGES_AT_ONCE", 16)
    first = started()
    serve(first)
    held = on_device(first).keys() | on_host(first).keys()
    saver_of(first, tmp_path).save()
    second = started()
    saver = second.cache.saver = saver_of(second, tmp_path)
    saver.load()
    num_during = 0
    for request in REQUESTS[NUM_BEFORE - 10 :]:
        num_during += saver._loading is not None
        second.serve(request)
        while (loading := saver._loading) is not None and loading._read.empty() and loading._thread.is_alive():
            time.sleep(0.001)
        second.cache.check_hicache_events()
        second.cache.settle()
        second.check_invariants()
    assert num_during > 5
    steps(second, saver)
    check(second)
    assert len(held & on_host(second).keys()) > 5


def test_what_is_flushed_while_it_loads_does_not_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "SLICE_S", 0.0)
    first = started()
    serve(first)
    saver_of(first, tmp_path).save()
    second = started()
    saver = second.cache.saver = saver_of(second, tmp_path)
    saver.load()
    deadline_s = time.monotonic() + LIMIT_S
    while len(on_host(second)) < 3:
        assert time.monotonic() < deadline_s
        second.cache.check_hicache_events()
    second.cache.reset()
    for _ in range(50):
        second.cache.check_hicache_events()
    assert on_host(second) == {}
    check(second)


def test_a_server_that_stops_while_it_loads_leaves_the_folder_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "SLICE_S", 0.0)
    first = started()
    serve(first)
    saver_of(first, tmp_path).save()
    index = (tmp_path / "rank-0" / INDEX).read_bytes()
    second = started()
    saver = second.cache.saver = saver_of(second, tmp_path)
    saver.load()
    assert saver.advance() is None, "and one who asks waits"
    second.cache.check_hicache_events()
    saver.save()
    check(second)
    assert (tmp_path / "rank-0" / INDEX).read_bytes() == index


def test_on_demand_the_same_is_saved(tmp_path: Path) -> None:
    first = started()
    serve(first)
    saver = saver_of(first, tmp_path)
    saver.save()
    shutil.move(tmp_path / "rank-0", tmp_path / "stop")
    answer = on_demand(saver)
    assert answer["num_states"] == answer["num_held"] > 0
    assert (tmp_path / "rank-0" / INDEX).read_bytes() == (tmp_path / "stop" / INDEX).read_bytes()
    check(first)
