"""SGLang's tree core on this project's tree: `HybridCache` behind the interface of the unified radix cache.

Source of the interface: `srt/mem_cache/unified_cache/unified_tree_core_interface.py`; the Rust core answers it without
SGLang's Python tree too. What differs from stock, beyond policy:

- no dead KV: KV beyond the deepest state of its path is not held (`marconi.tree.radix`), so an insert always ends at a
  state, and a lock on a node holds its state and the KV of its path;
- a match touches nothing: the scheduler matches waiting requests again and again. The state that a request starts
  from is touched when it begins (`engine/cache/radix_cache.py`);
- a victim frees a state, and its KV if it has no live children, in one step (`evict_device_next_node`).

A node's handle is its serial, and 0 the root of every name space. A path is a key's own memory: eight bytes a token, as
an `array("q")` holds it, since the ids that stand for images have up to 63 bits
(`managers/schedule_batch.py:_compute_pad_values`). A name space is a number of 128 bits: equal adapters and salts share
one, others do not, and 0 is the one of requests with neither. Owner: the scheduler's thread.
"""

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any, Final, TypeVar

import torch
from sglang.srt.mem_cache.base_prefix_cache import (
    DecLockRefParams,
    DecLockRefResult,
    IncLockRefResult,
    InsertParams,
    InsertResult,
    MatchPrefixParams,
    MatchResult,
    _dfs_weight_order,
)
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.events import KVCacheEventRecorder
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.cache_action import CacheAction, ComponentAction
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.unified_tree_core_interface import (
    EvictDeviceLeafResult,
    EvictDeviceNextNodeResult,
    InsertStepResult,
    RadixCacheWalkResult,
)

from marconi.engine.cache.device_only import DeviceOnlyCore
from marconi.engine.cache.memory import DeviceMemory
from marconi.engine.cache.waiting import paths_above
from marconi.engine.windows.memory import WindowedMemory
from marconi.events.tree_log import Tenant, TreeLog
from marconi.policy.base import Need
from marconi.policy.hybrid_cache import HybridCache
from marconi.policy.request import Lease, Request
from marconi.tree import Freed, Match, Node
from marconi.tree.memory import Memory

_T = TypeVar("_T")

ROOT = 0
NEEDS = {ComponentType.FULL: Need.KV, ComponentType.MAMBA: Need.STATE}
"""The need of a victim when a component is short, where each has a pool of its own."""
IDS_PER_TOKEN: Final = 2
"""A token takes the room of two of the tree's four-byte ids."""


class MarconiTreeCore(DeviceOnlyCore):
    """KV and states of one scheduler, on the device."""

    def __init__(
        self,
        params: CacheInitParams,
        make: Callable[[Memory], HybridCache],
        clock: Callable[[], float],
        needs: Mapping[ComponentType, Need] = NEEDS,
        log: TreeLog | None = None,
    ) -> None:
        """A core for the pools of `params`, whose tree and policies `make` makes anew at every reset.

        `clock` gives seconds that never decrease, the same on every rank that shares the cache.
        What the tree holds is noted in `log`, if there is one.
        """
        self.page_size = params.page_size
        self.is_eagle = False
        self.enable_hicache = self.enable_storage = self.enable_external_cache_linker = False
        self.is_host_memory_buffer_only = self.is_write_back = self.has_swa_host_pool = False
        self.enable_session_radix_cache = False
        self.write_through_threshold = 256
        self.device = torch.device(params.token_to_kv_pool_allocator.device)
        self.kv_events = KVCacheEventRecorder(enabled=False, page_size=self.page_size)
        self._make = make
        self._before: HybridCache | None = None
        self._clock = clock
        self.needs = needs
        self._log = log
        window = params.swa_retain_window
        # A page is freed whole.
        self._window_tokens = None if window is None else -(-window // self.page_size) * self.page_size
        self._empty_match = MatchResult(0, ROOT, ROOT, ROOT, cache_actions=[])
        self.reset()

    def reset(self) -> None:
        """Hold nothing, and keep counting. What was held is not freed: the pools are cleared with it."""
        self.memory = self._make_memory()
        if self._log is not None:
            self._log.flushed()
        self.hybrid = self._make(self.memory)
        if self._before is not None:
            self.hybrid.succeed(self._before, self._clock())
        self._before = self.hybrid
        self._nodes: dict[int, Node] = {}
        self._walk: tuple[Need, int] | None = None

    def _make_memory(self) -> DeviceMemory:
        if self._window_tokens is None:
            return DeviceMemory(self.device, self._log)
        return WindowedMemory(self.device, self._window_tokens, self._log)

    # Matching

    def look_up(self, key: RadixKey, packed: Request | None = None) -> Lease:
        """Look up what is known of the whole of `key`, and the deepest state within its limit; touches nothing.

        `packed` is the request of `key`, where it was packed before.
        """
        if packed is None:
            request = self.request_of(key.token_ids, key.extra_key, key.cache_salt)
        else:
            request = replace(packed, arrival_s=self._clock())
        return Lease(request, self.hybrid.tree.match(request.path, len(key), request.namespace))

    def request_of(self, token_ids: "array[int]", extra_key: str | None, cache_salt: str | None) -> Request:
        """A prompt that comes now."""
        num, namespace = len(token_ids) // self.page_size * self.page_size, namespace_of(extra_key, cache_salt)
        return Request(path_of(token_ids, num), len(token_ids), 0, num, self._clock(), namespace=namespace)

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """Match in SGLang's terms; see `look_up`."""
        return self.answer(self.look_up(params.key).match, params)

    def answer(self, match: Match, params: MatchPrefixParams) -> MatchResult:
        """A match in SGLang's words."""
        handle, num_live_tokens = self.handle(match.checkpoint), min(match.num_live_tokens, len(params.key))
        return MatchResult(
            match.checkpoint.depth, handle, handle, handle, full_kv_hit_length=num_live_tokens, cache_actions=[]
        )

    def match_full_device_prefix(self, key: RadixKey) -> tuple[int, int, int]:
        """Tokens whose KV is held on the path of `key`; there is no node that one could pin there."""
        return min(self.look_up(key).match.num_live_tokens, len(key)), ROOT, 0

    @property
    def empty_match_result(self) -> MatchResult:
        """A match of nothing."""
        return self._empty_match

    # Handles

    def handle(self, node: Node) -> int:
        """The handle of a node that may be asked for by it later."""
        if node.parent is None:
            return ROOT
        self._nodes[node.serial] = node
        return node.serial

    def node_by_id(self, node_id: int) -> Any:
        """The node of a handle; `KeyError` if it was dropped."""
        if node_id == ROOT:
            root = Node(b"", None, 0, ROOT)
            root.children = {each.serial.to_bytes(8): each for each in self.hybrid.tree.roots.values()}
            return root
        return self._nodes[node_id]

    def is_root(self, node_id: int) -> bool:
        """True for the handle of a root."""
        return node_id == ROOT

    def root_node_handle(self, extra_key: str | None = None) -> int:
        """The handle of every root."""
        return ROOT

    def start_of(self, node_id: int, namespace: int) -> Node:
        """The node of a handle; of the root's, that of the name space."""
        return self.hybrid.tree.root(namespace) if node_id == ROOT else self._nodes[node_id]

    @property
    def root_node(self) -> Any:
        """The node above everything."""
        return self.node_by_id(ROOT)

    def dfs_weight_order(self, node_ids: Sequence[int]) -> list[int]:
        """Order of all waiting requests, in which those below one another follow each other."""
        nodes = [self._nodes.get(node_id) for node_id in node_ids]
        root, waiting = paths_above(node if node is not None and node.is_live else None for node in nodes)
        return _dfs_weight_order(root, waiting, lambda above: above)

    # Locks

    def inc_lock_ref(self, node_id: int, skip_lock_components: Sequence[ComponentType] = ()) -> IncLockRefResult:
        """Lock a node's state and the KV of its path, whatever is skipped: a path without a state is dead."""
        if node_id != ROOT:
            node = self._nodes[node_id]
            self.hybrid.lock(node)
            self.memory.protect(node)
        return IncLockRefResult(node_id=node_id)

    def dec_lock_ref(self, node_id: int, params: DecLockRefParams, skip_swa: bool = False) -> DecLockRefResult:
        """Give a lock back; a part of one, without the KV, is given back with the rest."""
        assert params.node_id == node_id, f"a receipt for {params.node_id} on {node_id}"
        if node_id != ROOT and ComponentType.FULL not in params.skipped_lock_components:
            node = self._nodes[node_id]
            self.hybrid.unlock(node)
            self.memory.unprotect(node)
        return DecLockRefResult()

    def move_lock(self, node_id: int, node: Node) -> int:
        """Take a lock on `node`, and give one back on a node at or above it on its path; returns the node's handle."""
        old = None if node_id == ROOT else self._nodes[node_id]
        self.hybrid.move_lock(old, node)
        self.memory.move_protection(old, node)
        return self.handle(node)

    # Inserting

    def insert(self, indices: torch.Tensor, from_depth: int, tenant: Tenant, insert: Callable[[], _T]) -> _T:
        """Run `insert`, which inserts a path of `tenant` whose KV beyond `from_depth` lies at `indices`."""
        self.memory.offer(indices, from_depth, tenant)
        try:
            return insert()
        finally:
            self.memory.withdraw()
            self._forget_handles()

    def begin_insert(self, params: InsertParams) -> InsertStepResult:
        """An insert from SGLang's own code: of a key whose end has a state."""
        key, slot = params.key, params.mamba_value
        assert key is not None, "an insert without a key"
        assert params.value is not None, "an insert without KV"
        assert slot is not None, "an insert without a state"
        num_tokens = len(key) // self.page_size * self.page_size
        path, namespace = path_of(key.token_ids, num_tokens), namespace_of(key.extra_key, key.cache_salt)
        request = Request(path, num_tokens, 0, num_tokens, self._clock(), namespace=namespace)
        lease = Lease(request, self.hybrid.tree.match(path, num_tokens, namespace))
        num_held = min(lease.match.num_live_tokens, num_tokens)
        tenant = Tenant(key.extra_key, key.cache_salt)
        (node,) = self.insert(
            params.value, 0, tenant, lambda: self.hybrid.insert(lease, [num_tokens], request.arrival_s)
        )
        exists = node in self.memory.states
        if not exists:
            self.memory.keep_state(node, slot)
        result = InsertResult(num_held, num_tokens, self.handle(node), mamba_exist=exists)
        return InsertStepResult(actions=self.memory.settle(node, params, num_held), result=result)

    def resume_insert(self) -> InsertStepResult:
        """An insert is one step."""
        raise AssertionError("no insert is under way")

    def has_ongoing_insert(self) -> bool:
        """An insert is one step."""
        return False

    def end_insert(self) -> list[CacheAction | ComponentAction]:
        """An insert leaves nothing to do."""
        return []

    # Evicting

    def evict_device_start(self, component_type: ComponentType, request_cnt: int) -> None:
        """Begin to free `request_cnt` tokens of KV, or states."""
        self._walk = self.needs[component_type], request_cnt

    def evict_device_next_node(
        self, component_type: ComponentType, tracker: dict[ComponentType, int]
    ) -> EvictDeviceNextNodeResult:
        """Evict one victim, whole; no progress when enough is freed, or nothing is evictable."""
        assert self._walk is not None, "no eviction has begun"
        need, num_wanted = self._walk
        if tracker[component_type] >= num_wanted:
            return EvictDeviceNextNodeResult()
        freed = self.evict_one(need)
        return EvictDeviceNextNodeResult() if freed is None else self.drain(freed)

    def evict_one(self, need: Need) -> Freed | None:
        """Evict one victim, whole; what it frees waits in `memory`. None if nothing is evictable."""
        freed = self.hybrid.evict(need, self._clock())
        self._forget_handles()
        return freed

    def evict_until(
        self, short: ComponentType, num_wanted: int, freed: Freed, num_short: Callable[[], int] | None
    ) -> Freed:
        """Evict victims one by one until `num_wanted` tokens or states are freed, `freed` before among them.

        Returns all that is freed. It ends before where `num_short` says that no more is missing, or nothing may be
        evicted. What an allocator has rises by no more than it is given, so `num_short` is asked again when enough was
        freed to get there: the last victim is that of SGLang's loop (`UnifiedRadixCache._evict_components`), which asks
        after each, and takes longer for it than to choose a victim here.
        """
        need, num_to_ask_at = self.needs[short], 0
        while (num_freed := freed.num_tokens if short is ComponentType.FULL else freed.num_states) < num_wanted:
            if num_short is not None and num_freed >= num_to_ask_at:
                num_missing = num_short()
                if num_missing <= 0:
                    break
                num_to_ask_at = num_freed + num_missing
            one = self.evict_one(need)
            if one is None:
                break
            freed = Freed(freed.num_tokens + one.num_tokens, freed.num_states + one.num_states)
        return freed

    def drain(self, freed: Freed) -> EvictDeviceNextNodeResult:
        """Hand over what an eviction gave back, for SGLang's allocators."""
        self._forget_handles()
        result = EvictDeviceNextNodeResult(made_progress=True)
        if kv := self.memory.take_freed_kv():
            result.device_frees[ComponentType.FULL] = kv
        if states := self.memory.take_freed_states():
            result.device_frees[ComponentType.MAMBA] = states
        result.tracker[ComponentType.FULL] = freed.num_tokens
        result.tracker[ComponentType.MAMBA] = freed.num_states
        return result

    def evict_device_leaf(self, node_id: int, is_write_back: bool) -> EvictDeviceLeafResult:
        """A victim is evicted where it is named."""
        raise AssertionError("this core names no leaf to evict")

    def evict_device_end(self, component_type: ComponentType) -> None:
        """The eviction is over."""
        self._walk = None

    def _forget_handles(self) -> None:
        """Drop the handles of nodes that went, when half of them did: a lookup of one is a fault either way."""
        if len(self._nodes) > 64 + 2 * self.hybrid.tree.num_nodes:
            self._nodes = {serial: node for serial, node in self._nodes.items() if node.is_live}

    # Sizes

    def evictable_size(self) -> int:
        """Tokens of KV that eviction can free."""
        return self.hybrid.tree.num_tokens - self.memory.num_protected_tokens

    def protected_size(self) -> int:
        """Tokens of KV in use."""
        return self.memory.num_protected_tokens

    full_evictable_size = evictable_size
    full_protected_size = protected_size

    def mamba_evictable_size(self) -> int:
        """States that eviction can free."""
        return self.hybrid.tree.num_states - self.memory.num_protected_states

    def mamba_protected_size(self) -> int:
        """States in use."""
        return self.memory.num_protected_states

    def swa_evictable_size(self) -> int:
        """Tokens of KV in sliding windows that eviction can free."""
        return self.memory.num_window_tokens - self.memory.num_protected_window_tokens

    def swa_protected_size(self) -> int:
        """Tokens of KV in sliding windows in use."""
        return self.memory.num_protected_window_tokens

    def component_evictable_size(self, component_type: ComponentType) -> int:
        """Tokens or states that eviction can free."""
        sizes = {
            ComponentType.FULL: self.evictable_size,
            ComponentType.SWA: self.swa_evictable_size,
            ComponentType.MAMBA: self.mamba_evictable_size,
        }
        return sizes[component_type]() if component_type in sizes else 0

    def component_protected_size(self, component_type: ComponentType) -> int:
        """Tokens or states in use."""
        sizes = {
            ComponentType.FULL: self.protected_size,
            ComponentType.SWA: self.swa_protected_size,
            ComponentType.MAMBA: self.mamba_protected_size,
        }
        return sizes[component_type]() if component_type in sizes else 0

    def total_size(self) -> tuple[int, int]:
        """Tokens and states held."""
        return self.hybrid.tree.num_tokens, self.hybrid.tree.num_states

    # Values

    def is_full_device_evicted(self, node_id: int) -> bool:
        """True if the node's KV was evicted."""
        return node_id != ROOT and not (node_id in self._nodes and self._nodes[node_id].is_live)

    def collect_full_device_indices(self, from_node_id: int, until_node_id: int) -> torch.Tensor:
        """KV of the path of a node, from the root, which is the only end that is asked for."""
        assert until_node_id == ROOT, "the KV of a part of a path"
        root = Node(b"", None, 0, ROOT)
        return self.memory.path_indices(self._nodes[from_node_id] if from_node_id != ROOT else root)

    def get_component_device_value(self, node_id: int, component_type: ComponentType) -> torch.Tensor | None:
        """The slot of a node's state."""
        assert component_type is ComponentType.MAMBA, f"a value of {component_type}"
        return self.memory.states.get(self._nodes[node_id]) if node_id != ROOT else None

    def all_values_flatten(self) -> torch.Tensor:
        """All KV that is held."""
        return self.memory.all_indices()

    def all_mamba_values_flatten(self) -> torch.Tensor:
        """All slots that are held."""
        return self.memory.all_states()

    def walk_for_kv_canary(self, unlocked_only: bool, swa_resident_only: bool) -> RadixCacheWalkResult:
        """Every token's index, its position, and the index before it on its path (-1 at the start)."""
        rows: list[torch.Tensor] = []
        for node in self.hybrid.tree.nodes():
            if unlocked_only and self.memory.is_protected(node):
                continue
            assert node.parent is not None
            path = self.memory.path_indices(node)
            before = torch.cat([torch.tensor([-1], device=path.device), path[:-1]])
            positions = torch.arange(len(path), device=path.device)
            first = node.depth - self.memory.num_resident(node) if swa_resident_only else node.parent.depth
            rows.append(torch.stack([path, positions, before])[:, first:])
        slots, positions, before = torch.cat(rows, dim=1) if rows else torch.empty((3, 0), dtype=torch.int64)
        return RadixCacheWalkResult(slot_indices=slots, positions=positions, prev_slot_indices=before)

    def sanity_check(
        self, ongoing_write_through: list[tuple[int, int]], ongoing_load_back: list[tuple[int, int]]
    ) -> None:
        """Raise `AssertionError` where tree, memory and totals disagree."""
        assert not ongoing_write_through
        assert not ongoing_load_back
        self.hybrid.check_invariants()
        self.memory.check_invariants(list(self.hybrid.tree.nodes()))

    def pretty_print(self) -> None:
        """Print every node, deeper ones further in."""
        for root in self.hybrid.tree.roots.values():
            for node in root.walk():
                print("  " * _level(node) + repr(node))


def _level(node: Node) -> int:
    level = 0
    while node.parent is not None:
        node, level = node.parent, level + 1
    return level


def path_of(token_ids: "array[int]", num_tokens: int, start: int = 0) -> bytes:
    """Pack the tokens from `start` to `num_tokens` of an `array("q")` as a path."""
    return memoryview(token_ids)[start:num_tokens].tobytes()


def namespace_of(extra_key: str | None, cache_salt: str | None) -> int:
    """The name space of an adapter and a tenant; 0 without either."""
    if not extra_key and not cache_salt:
        return 0
    digest = blake2b(digest_size=16)
    for part in (extra_key, cache_salt):
        text = (part or "").encode()
        digest.update(len(text).to_bytes(8, "little") + text)
    return int.from_bytes(digest.digest(), "little")
