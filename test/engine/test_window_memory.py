"""Where there is a state, the window before it is whole and right, and no index of either pool is lost.

Requests are prefilled in chunks, leave states, move past their windows and end, on SGLang's own allocator and by its
own rule for what a request frees; only what it would compute is stood in for: each index of the pool of windows notes
the path up to its token. A request that resumes from a state looks at all of its window.
"""

import random
from array import array
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang", reason="the server extra is not installed: pip install '.[server]'")

import torch
from sglang.srt.managers.schedule_batch import ReqKvInfo
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import DecLockRefParams, EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.base_swa_memory_pool import BaseSWAKVPool
from sglang.srt.mem_cache.common import free_kv_row_segments, free_swa_out_of_window_slots
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.cache_action import (
    FreeComponentDeviceSlot,
    FreeDeviceKV,
    FreeDeviceKVFullOnly,
    RecoverEvictedSWA,
)
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

from marconi.engine.cache.tree_core import IDS_PER_TOKEN, ROOT, MarconiTreeCore
from marconi.engine.launch.policies import PolicyChoice, hybrid_cache
from marconi.engine.windows.memory import WindowedMemory
from marconi.engine.windows.pools import WindowedPools
from marconi.model.learned_latency import LearnedLatency
from marconi.policy.base import Costs
from marconi.tree.windows import Windows

COSTS = Costs(kv_bytes_per_token=3, state_bytes=20, flops=lambda num_tokens: num_tokens * (num_tokens + 10))
MAX_TOKENS, NUM_ROWS = 64, 3
SWA = ComponentType.SWA


class Slots:
    """Slots of states, as the pools of a cache ask for them."""

    def __init__(self, size: int) -> None:
        self.size, self.free_slots = size, list(range(1, size + 1))

    def available_size(self) -> int:
        return len(self.free_slots)

    schedulable_available_size = available_size

    def free(self, slots: torch.Tensor) -> None:
        self.free_slots += slots.tolist()


class Kv(BaseSWAKVPool):
    """Two pools of KV, of which only the places matter."""

    def __init__(self) -> None:
        pass

    def register_mapping(self, full_to_swa_index_mapping: torch.Tensor) -> None:
        self.mapping = full_to_swa_index_mapping

    def translate_loc_from_full_to_swa(self, kv_indices: torch.Tensor) -> torch.Tensor:
        return self.mapping[kv_indices]

    def get_state_buf_infos(self) -> Any:
        raise NotImplementedError

    get_contiguous_buf_infos = get_key_buffer = get_value_buffer = get_kv_buffer = get_state_buf_infos
    set_kv_buffer = get_kv_size_bytes = get_state_buf_infos


class Request:
    """One that is being prefilled: it holds a lock, a row and the KV beyond what it matched."""

    def __init__(self, tokens: list[int], row: int, node: int, depth: int) -> None:
        self.tokens, self.node = tokens, node
        self.kv = ReqKvInfo(req_pool_idx=row, cache_protected_len=depth, kv_allocated_len=depth)


class Server:
    """Drives a core the way SGLang's cache does, one call at a time."""

    def __init__(self, page: int, window: int, num_full: int, num_swa: int, num_slots: int) -> None:
        self.page, self.window, self.now_s = page, window, 0.0
        self.kv = SWATokenToKVPoolAllocator(num_full, num_swa, page, torch.float32, "cpu", Kv(), need_sort=False)
        self.slots = Slots(num_slots)
        self.sizes = num_full, num_swa, num_slots
        self.pools = WindowedPools(SimpleNamespace(mamba_allocator=self.slots), self.kv)
        params: Any = SimpleNamespace(page_size=page, token_to_kv_pool_allocator=self.kv, swa_retain_window=window)
        latency = LearnedLatency(COSTS.flops)
        self.core = MarconiTreeCore(
            params,
            lambda memory: hybrid_cache(PolicyChoice("best"), COSTS, page, page * IDS_PER_TOKEN, memory, latency),
            lambda: self.now_s,
        )
        self.rows = torch.zeros(NUM_ROWS, MAX_TOKENS, dtype=torch.int64)
        self.free_rows = list(range(NUM_ROWS))
        self.paths: dict[int, tuple[int, ...]] = {}
        """The path that each index of windows was computed for."""
        self.running: list[Request] = []
        self.num_brought = self.num_evicted_windows = 0

    def begin(self, tokens: list[int]) -> Request:
        self.now_s += 1.0
        match = self.core.match_prefix(MatchPrefixParams(key=RadixKey(array("q", tokens), None, limit=len(tokens) - 1)))
        depth, node = match.device_prefix_len, match.last_device_node
        self.core.inc_lock_ref(node)
        request = Request(tokens, self.free_rows.pop(), node, depth)
        self.rows[request.kv.req_pool_idx, :depth] = self.core.collect_full_device_indices(node, ROOT)
        self.running.append(request)
        self.require_window(request, depth)
        return request

    def require_window(self, request: Request, depth: int) -> None:
        start = max(depth - self.window, 0)
        places = self.kv.full_to_swa_index_mapping[self.rows[request.kv.req_pool_idx, start:depth]].tolist()
        assert 0 not in places, f"before {depth} a window has holes: {places}"
        expected = [tuple(request.tokens[: end + 1]) for end in range(start, depth)]
        assert [self.paths[place] for place in places] == expected, f"before {depth} stands another window"

    def compute(self, request: Request, num_tokens: int) -> bool:
        """Compute the next tokens; False where no memory can be made for them."""
        start = request.kv.kv_allocated_len
        full, swa = self.kv.full_available_size(), self.kv.swa_available_size()
        if full < num_tokens or swa < num_tokens:
            params = EvictParams(num_tokens=max(num_tokens - full, 0), swa_num_tokens=max(num_tokens - swa, 0))
            wanted = {ComponentType.FULL: params.num_tokens, SWA: params.swa_num_tokens}
            targets = {kind: (kind, num_tokens) for kind, count in wanted.items() if count}
            before = self.core.memory.num_window_tokens
            self.pools.evict(self.core, params, targets, self.available)
            self.pools.give_back(self.core)
            self.num_evicted_windows += before - self.core.memory.num_window_tokens
        if min(self.kv.full_available_size(), self.kv.swa_available_size()) < num_tokens:
            return False
        self.require_window(request, start)
        taken = self.kv.full_attn_allocator.alloc(num_tokens), self.kv.swa_attn_allocator.alloc(num_tokens)
        self.kv.set_full_to_swa_mapping(*taken)
        self.rows[request.kv.req_pool_idx, start : start + num_tokens] = taken[0]
        for offset, place in enumerate(taken[1].tolist()):
            self.paths[place] = tuple(request.tokens[: start + offset + 1])
        request.kv.kv_allocated_len += num_tokens
        return True

    def available(self, kind: ComponentType) -> int:
        return self.kv.swa_available_size() if kind is SWA else self.kv.full_available_size()

    def move_past_window(self, request: Request, num_tokens: int) -> None:
        free_swa_out_of_window_slots(
            request,  # type: ignore[arg-type]
            num_tokens - 1,
            sliding_window_size=self.window,
            page_size=self.page,
            req_to_token_pool=SimpleNamespace(req_to_token=self.rows),  # type: ignore[arg-type]
            token_to_kv_pool_allocator=self.kv,
        )

    def keep(self, request: Request) -> None:
        """A state after all that was computed joins the tree, and the lock moves there."""
        end, protected = request.kv.kv_allocated_len, request.kv.cache_protected_len
        if end == protected:
            return
        if not self.slots.free_slots:
            self.pools.evict(self.core, EvictParams(mamba_num=1), {}, self.available)
            self.pools.give_back(self.core)
        if not self.slots.free_slots:
            return
        self.move_past_window(request, end)
        row = self.rows[request.kv.req_pool_idx, :end]
        params = InsertParams(
            key=RadixKey(array("q", request.tokens[:end]), None),
            value=row.clone(),
            mamba_value=torch.tensor([self.slots.free_slots.pop()]),
            prev_prefix_len=protected,
        )
        params.set_evicted_seqlen(SWA, request.kv.get_evicted_seqlen(SWA))
        step = self.core.begin_insert(params)
        assert step.result is not None
        for action in step.actions:
            self.apply(action)
        if step.result.mamba_exist:
            assert params.mamba_value is not None
            self.slots.free(params.mamba_value)
        node = step.result.last_device_node
        self.rows[request.kv.req_pool_idx, :end] = self.core.collect_full_device_indices(node, ROOT)
        self.core.inc_lock_ref(node)
        self.unlock(request)
        request.node, request.kv.cache_protected_len = node, end
        self.require_window(request, end)

    def apply(self, action: Any) -> None:
        """As SGLang's cache and its component of windows do."""
        if isinstance(action, RecoverEvictedSWA):
            self.num_brought += 1
            places = self.kv.full_to_swa_index_mapping[action.incoming_full]
            assert 0 not in places.tolist(), "a window was brought that is gone"
            assert not self.kv.full_to_swa_index_mapping[action.kept_full].any(), "a window was there, and is lost"
            self.kv.clear_full_to_swa_mapping(action.incoming_full)
            self.kv.set_full_to_swa_mapping(action.kept_full, places)
            return
        free = {
            FreeDeviceKV: self.kv.free_segment,
            FreeDeviceKVFullOnly: self.kv.free_full_segment,
            FreeComponentDeviceSlot: self.kv.free_swa_segment,
        }[type(action)]
        for indices in action.indices:
            free(indices, start_pos=0)

    def end(self, request: Request) -> None:
        """Give back all that is the request's own."""
        kv = request.kv
        own = self.rows[kv.req_pool_idx, kv.cache_protected_len : kv.kv_allocated_len]
        free_kv_row_segments(
            self.kv,
            [(own, kv.cache_protected_len)] if len(own) else [],
            swa_evicted_seqlen=kv.get_evicted_seqlen(SWA),
            swa_dead_lo=kv.swa_dead_lo(self.page),
        )
        self.unlock(request)
        self.running.remove(request)
        assert kv.req_pool_idx is not None
        self.free_rows.append(kv.req_pool_idx)

    def unlock(self, request: Request) -> None:
        self.core.dec_lock_ref(request.node, DecLockRefParams(request.node))

    def check(self) -> None:
        core, num_full, num_swa = self.core, self.kv.full_available_size(), self.kv.swa_available_size()
        core.sanity_check([], [])
        for request in self.running:
            kv = request.kv
            num_full += kv.kv_allocated_len - kv.cache_protected_len
            first = max(kv.cache_protected_len, kv.get_evicted_seqlen(SWA))
            num_swa += max(kv.kv_allocated_len - first, 0)
        assert num_full + core.full_evictable_size() + core.full_protected_size() == self.sizes[0]
        assert num_swa + core.swa_evictable_size() + core.swa_protected_size() == self.sizes[1]
        assert len(self.slots.free_slots) + core.hybrid.tree.num_states == self.sizes[2]


def served(page: int, window: int, seed: int, num_steps: int = 250) -> Server:
    """A server of prompts of few letters, several at a time, some of which end before their prompt does."""
    rng = random.Random(f"{page} {window} {seed}")  # noqa: S311 - a workload, not a secret
    server = Server(page, window, num_full=40 * page, num_swa=18 * page + 6 * window // page * page, num_slots=9)
    for _ in range(num_steps):
        if server.free_rows and (not server.running or rng.random() < 0.4):
            units = [rng.randrange(2)] * rng.randint(1, 6) + [rng.randrange(2) for _ in range(rng.randint(1, 6))]
            server.begin([unit for unit in units for _ in range(page)] + [7])
        request = rng.choice(server.running)
        num_left = (len(request.tokens) - 1 - request.kv.kv_allocated_len) // page
        if not num_left or rng.random() < 0.1 or not server.compute(request, rng.randint(1, num_left) * page):
            server.end(request)
        elif rng.random() < 0.6:
            server.keep(request)
        server.check()
    return server


@pytest.mark.parametrize(("page", "window"), [(1, 3), (1, 5), (4, 6), (4, 8)])
def test_a_state_has_its_window_and_no_index_is_lost(page: int, window: int) -> None:
    num_brought = num_evicted = 0
    for seed in range(6):
        server = served(page, window, seed)
        for request in list(server.running):
            server.end(request)
        server.check()
        assert server.core.swa_protected_size() == server.core.full_protected_size() == 0
        num_brought += server.num_brought
        num_evicted += server.num_evicted_windows
    assert num_brought > 10, "windows that the tree had given back"
    assert num_evicted > 50


@pytest.mark.parametrize("broken", ["held too short", "never brought"])
def test_a_window_that_is_not_held_is_found(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if broken == "held too short":
        begin = Windows.__init__
        monkeypatch.setattr(Windows, "__init__", lambda self, tokens, is_state: begin(self, tokens - 1, is_state))
    else:
        settle = WindowedMemory.settle

        def without(self: WindowedMemory, *args: Any) -> list[Any]:
            return [action for action in settle(self, *args) if not isinstance(action, RecoverEvictedSWA)]

        monkeypatch.setattr(WindowedMemory, "settle", without)
    with pytest.raises(AssertionError, match="a window has holes" if broken == "held too short" else "window"):
        served(page=1, window=5, seed=0)
