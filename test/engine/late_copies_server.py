"""SGLang's server whose copies to and from the host run late, and whose freed memory is overwritten at once.

On a CPU a copy has ended when its call returns. Here one to the host runs when it has been asked for `NUM_ASKED` times,
and one from the host when a layer waits for it, so that what may change meanwhile does. The file that
`MARCONI_TEST_FAULT_FILE` names may say what is broken, for the negative controls:

    reused      a slot on the host is free, and used again, while it holds a copy
    unlocked    what is being copied may be evicted; a copy to the host of a state runs when that is, and never before
    unwaited    a layer does not wait for what is loaded
    undrafted   what a draft model knows of a prefix is not loaded with it, which may change no answer

Started in place of `-m sglang.launch_server`; the spawned scheduler imports this file too.
"""

import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import breaking
from sglang.srt.managers.cache_controller import LayerDoneCounter
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.l2_transfer import L2TransferEngine, TransferCompletion
from sglang.srt.mem_cache.pool_host.group import HostPoolGroup

from marconi.engine.cache.pools import DevicePools
from marconi.engine.host.cache import TieredRadixCache
from marconi.engine.host.core import TieredTreeCore
from marconi.engine.store.sealed import SealedStore

NUM_ASKED = 3
GARBAGE = 9.0
DRAFT_GARBAGE = 1e5
"""What the tests' heads attend to has little weight."""


def has(fault: str) -> bool:
    """True if this is broken now."""
    path = os.environ.get("MARCONI_TEST_FAULT_FILE")
    return path is not None and Path(path).read_text(encoding="utf-8") == fault


class Late:
    """A copy that is to run, in place of the event at its end."""

    def __init__(self, run: Callable[[], object]) -> None:
        self._run: Callable[[], object] | None = run
        self._num_asked = 0

    def query(self) -> bool:
        """Whether it has run."""
        self._num_asked += 1
        if self._num_asked >= NUM_ASKED and self not in unlocked:
            self.synchronize()
        return self.has_run

    @property
    def has_run(self) -> bool:
        return self._run is None

    def synchronize(self) -> None:
        """Run it, if it has not."""
        run, self._run = self._run, None
        if run is not None:
            run()


to_host, to_device = L2TransferEngine.submit_device_to_host, L2TransferEngine.submit_host_to_device
waiting: list[Late] = []
unlocked: dict[Late, set[int]] = {}
"""Copies that wait until one of these slots of states is freed."""
caches: list[TieredRadixCache] = []
"""Of this process: one, once it has a host tier."""


def late_to_host(engine: Any, transfers: Any) -> TransferCompletion:
    late = Late(lambda: to_host(engine, transfers))
    of_states = [each.device_indices for each in transfers if hasattr(each.host_pool, "temporal_buffer")]
    if has("unlocked") and of_states:
        unlocked[late] = {slot for slots in of_states for slot in slots.tolist()}
    return TransferCompletion(None, late, False)


def late_to_device(engine: Any, transfers: Any, **options: Any) -> TransferCompletion:
    options["start_event"] = None
    if has("undrafted"):
        without = [each for each in transfers if not each.is_draft]
        breaking.tell(len(transfers) - len(without))
        transfers = without
    waiting.append(Late(lambda: to_device(engine, transfers, **options)))
    return TransferCompletion(None, waiting[-1], False)


wait_until, free_on_host = LayerDoneCounter.wait_until, HostPoolGroup.free
give_back, finish = DevicePools.give_back, TieredTreeCore.finish_write_through
init_hicache, track = TieredRadixCache.init_hicache, TieredRadixCache._track_write_through_node


def wait(counter: Any, layer: int) -> None:
    if has("unwaited"):
        breaking.tell(sum(not each.has_run for each in waiting))
        waiting.clear()
    while waiting:
        waiting.pop().synchronize()
    wait_until(counter, layer)


def overwrite_on_device(pools: Any, core: Any) -> None:
    memory, (cache,) = core.memory, caches
    pool, states = pools.token_to_kv_pool_allocator.get_kvcache(), pools.req_to_token_pool.mamba_pool.mamba_cache
    for rows in memory._freed_kv:
        for each, garbage in ((pool, GARBAGE), *((draft, DRAFT_GARBAGE) for draft in _draft_pools(cache))):
            for layer in (*_attention(each).k_buffer, *_attention(each).v_buffer):
                layer[_places(pool, rows)] = garbage
    for slots in memory._freed_states:
        for each in (states.temporal, *states.conv):
            each[:, _places(pools.req_to_token_pool.mamba_pool, slots)] = GARBAGE
        for late, copied in list(unlocked.items()):
            if copied & set(slots.tolist()):
                del unlocked[late]
                breaking.tell(int(not late.has_run))
                late.synchronize()
    give_back(pools, core)


def _places(pool: Any, names: Any) -> Any:
    """Where what the names of one pool stand for lies; of two pools the names are places."""
    translate = getattr(_attention(pool), "host_transfer_translate", None)
    return names if translate is None else translate(names)


def _attention(pool: Any) -> Any:
    return getattr(pool, "full_kv_pool", pool)


def _draft_pools(cache: Any) -> list[Any]:
    """KV of draft models, whose rows are the model's."""
    entries = cache.cache_controller.mem_pool_host.entry_map
    beside = [entries[PoolName.DRAFT].device_pool] if PoolName.DRAFT in entries else []
    return [*beside, *(pool for entry in entries.values() for pool in entry.packed_draft_device_pools)]


def overwrite_on_host(pools: Any, indices: Any, *, pool: Any = None) -> int:
    host = pools.get_entry(pool).host_pool
    if pool is PoolName.MAMBA:
        for each in (host.temporal_buffer, *host.conv_buffer):
            each[indices] = GARBAGE
    else:
        for each in host.kv_buffer:
            each[indices // host.page_size, :, indices % host.page_size] = GARBAGE
    return int(free_on_host(pools, indices, pool=pool))


def finish_and_reuse(core: Any, node_ids: Any, ack_id: int) -> None:
    finish(core, node_ids, ack_id)
    for node_id in node_ids if has("reused") else ():
        breaking.tell(1)
        overwrite_on_host(core.rows._pools, core.rows.states[core._nodes[node_id]], pool=PoolName.MAMBA)


def remember(cache: Any, *given: Any) -> None:
    caches.append(cache)
    init_hicache(cache, *given)


def track_unlocked(cache: Any, node_id: int, lock: Any, publish_node_ids: Any) -> None:
    if has("unlocked"):
        cache.dec_lock_ref(node_id, lock)
        lock = None
    track(cache, node_id, lock, publish_node_ids)


L2TransferEngine.submit_device_to_host = late_to_host
L2TransferEngine.submit_host_to_device = late_to_device
LayerDoneCounter.wait_until = wait
DevicePools.give_back = overwrite_on_device
TieredRadixCache.init_hicache = remember
HostPoolGroup.free = overwrite_on_host
TieredTreeCore.finish_write_through = finish_and_reuse
TieredRadixCache._track_write_through_node = track_unlocked
# Files of a few kB are read slower than these models compute, so that nothing would be read.
SealedStore.bytes_per_s = property(lambda _store: 1e12)

if "MARCONI_TEST_MOONCAKE" in os.environ:
    sys.path.insert(0, str(Path(__file__).with_name("loopback_mooncake")))

if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=False)
