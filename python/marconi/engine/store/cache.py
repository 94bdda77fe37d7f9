"""The cache of a hybrid model with a store behind its host tier (`--hicache-storage-backend`).

    written    between two steps the copies that the host drops next are chosen (`policy/store.py`) and written by
               SGLang's thread; they are locked meanwhile
    told       what was written and read is published beside the device's contents, for routers (`events/store_log.py`)
    asked      when a request comes whose prompt neither tier holds to its end, SGLang's thread asks the store for the
               pages of the whole path, and for the deepest state that follows them
    read       if that saves time and the host has room: the KV beyond what the host has of the path then, and the
               state. The request waits in the queue as `--hicache-storage-prefetch-policy` says
    adopted    what was read whole becomes a copy on the host like any other, and the request is matched anew
    saved      at the end of a server for `SAVE_S`, and on demand (`POST /marconi/save`): what both tiers hold, the most
               valuable first

A state and its KV come whole or not at all, so a path is never put together from parts that do not belong to it: pages
are named by the hash of all tokens before them. All ranks decide the same by the same numbers: what was found and read
is what every rank has, and the speed of reading is agreed on.

Source of what it extends: `srt/mem_cache/unified_radix_cache.py` (the queries, the threads and their queues) and
`srt/mem_cache/hybrid_cache/hybrid_cache_controller.py`. Owner: the scheduler's thread.
"""

import json
import logging
import math
import time
from array import array
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import PrefetchOperation, StorageOperation
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.components.base import CacheTransferPhase
from sglang.srt.mem_cache.utils import get_storage_hash_str

from marconi.engine.cache.tree_core import ROOT, namespace_of, path_of
from marconi.engine.host.cache import TieredRadixCache
from marconi.engine.launch.storage import written_bytes_per_day
from marconi.engine.reports.status import StoreUse
from marconi.engine.store.identity import ModelWeights, facts_of_states
from marconi.engine.store.saving import Saving
from marconi.engine.store.sealed import SealedStore
from marconi.events.base import StoreReach
from marconi.events.store_log import StoreLog
from marconi.events.tree_log import Tenant
from marconi.policy.store import StoreBehind, WriteAllowance, stored_above
from marconi.tree import HostCopy

if TYPE_CHECKING:
    from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.registry import TreeCacheBuildContext

logger = logging.getLogger(__name__)

SAVE_S: Final = 10.0
"""SGLang kills a scheduler that has not ended 15 s after it was asked to."""
_POLL_S: Final = 0.001


@dataclass(frozen=True, slots=True)
class _Write:
    """A state that is being written; its node may be gone once it was."""

    copy: HostCopy
    operation: StorageOperation
    path: bytes
    namespace: int


@dataclass(frozen=True, slots=True)
class _Read:
    """A state that is being read."""

    path: bytes
    """Up to the state."""
    namespace: int
    start: int
    """Tokens of the path that the host keeps until then, for `above`."""
    above: HostCopy | None
    depth: int
    stored_as: str
    """Hash of the path."""


class StoredRadixCache(TieredRadixCache):
    """KV and states on the device, on the host, and in a store."""

    store: SealedStore
    behind: StoreBehind
    num_reads = 0
    """States that were read and adopted."""
    num_writes = 0
    """States that were written, or were there."""
    num_lost = 0
    """States that could not be read or written whole, or that had no place any more."""

    def init_hicache(self, server_args: Any, params: "CacheInitParams") -> None:
        """Make SGLang's host pools and its store, and seal what is written there."""
        super().init_hicache(server_args, params)
        controller = self.cache_controller
        self._kind, config = controller.storage_backend_type, controller.storage_config
        a_day = written_bytes_per_day(config.extra_config)
        self._allowance = WriteAllowance(math.inf if a_day is None else a_day / config.tp_size)
        self.store = SealedStore(controller.storage_backend, self.host_pool_group)
        self._put_in_place()
        self._hold_nothing()

    def _put_in_place(self) -> None:
        """Let SGLang's threads move pages of KV by the sealed store, whichever interface its own one has."""
        controller = self.cache_controller
        controller.storage_backend = self.store
        controller.page_get_func, controller.page_set_func = controller._generic_page_get, controller._generic_page_set

    def identify(self, ctx: "TreeCacheBuildContext") -> None:
        """Find what servers like this one have written."""
        layouts = [
            f"{entry.name} {entry.host_pool.dtype} {entry.host_pool.layout} {entry.host_pool.page_size}"
            for entry in self.host_pool_group.entries
        ]
        facts = json.dumps([facts_of_states(ctx), layouts])
        self.store.identify(facts, partial(ModelWeights, ctx.tp_worker.model_runner.model))

    def weights_updated(self) -> None:
        """Neither read nor write until a flush: what is held is of no one set of weights."""
        self._is_ready = False
        self.store.end()

    def _hold_nothing(self) -> None:
        tier = self.tree_core.tier
        assert tier is not None
        self.behind = StoreBehind(tier, self._allowance)
        self._tenants: dict[int, Tenant] = {}
        self._reads: dict[CacheRequestHandle, _Read] = {}
        self._writes: dict[int, _Write] = {}
        self._is_ready = False
        """Whether the store is, on every rank."""
        self._saving: Saving | None = None
        self._told: StoreLog | None = None
        """Where this rank publishes events."""

    def reset(self) -> None:
        """Clear both tiers, once no thread reads or writes; the store stays, unless the weights are others."""
        super().reset()
        if self.cache_controller is not None:
            self._hold_nothing()
            self.store.renew()

    def release_host_resources(self) -> None:
        """End like SGLang, once what is held is written and no thread reads or writes."""
        if self.enable_storage and self._is_ready:
            try:
                self._save_last()
            except Exception:
                logger.exception("marconi: not all states were written to the store")
            self.shutdown()
            self.store.end()
        super().release_host_resources()

    def attach_storage_backend(self, storage_backend: str, *given: Any, **named: Any) -> tuple[bool, str]:
        """Attach the store of the start again, or change how long requests wait for it."""
        if storage_backend != self._kind:
            return super().attach_storage_backend(storage_backend)
        attached: tuple[bool, str] = super(TieredRadixCache, self).attach_storage_backend(
            storage_backend, *given, **named
        )
        controller = self.cache_controller
        if attached[0] and controller.storage_backend is not self.store:
            self.store.open(controller.storage_backend)
            self._put_in_place()
        return attached

    def detach_storage_backend(self) -> tuple[bool, str]:
        """Read and write nothing any more."""
        detached: tuple[bool, str] = super().detach_storage_backend()
        if detached[0]:
            self._is_ready, self._saving = False, None
            if self._told is not None:
                self._told.forget()
                self._told = None
            self._writes.clear()
            self.behind.being_written.clear()
            for request in list(self._reads):
                self._no_longer_expected(request)
        return detached

    def clear_storage_backend(self) -> bool:
        """Empty the store, and count nothing as stored."""
        is_cleared: bool = super().clear_storage_backend()
        if is_cleared:
            if self._told is not None:
                self._told.forget()
            for root in self.tree_core.hybrid.tree.roots.values():
                for node in root.walk():
                    if node.host_copy is not None:
                        node.host_copy.stored_as = None
        return is_cleared

    @property
    def store_reach(self) -> StoreReach | None:
        """The store, at the speed of reading that decisions take; None while it is not used."""
        tier, bytes_per_s = self.tree_core.tier, self.behind.bytes_per_s
        if not self._is_ready or tier is None:
            return None
        costs = tier.times.costs
        return StoreReach(self._number, costs.kv_bytes_per_token / bytes_per_s, costs.state_bytes / bytes_per_s)

    @property
    def store_use(self) -> StoreUse | None:
        """The store."""
        store = self.store
        return StoreUse(
            store.is_ready,
            self.num_writes,
            store.written.num_bytes,
            len(self._writes),
            self.num_reads,
            store.read.num_bytes,
            len(self._reads),
            self.num_lost,
            store.num_damaged,
            store.read.num_failed + store.written.num_failed,
            round(self.behind.bytes_per_s),
        )

    def check_hicache_events(self) -> None:
        """Take note of what was written and read, as well, and write what the host drops next."""
        super().check_hicache_events()
        if not self.enable_storage:
            return
        if not self._is_ready:
            self._name_store()
        if ended := self._ended_writes():
            said = [self.store.bytes_per_s or self.behind.bytes_per_s, *(_is_whole(each.operation) for each in ended)]
            self.behind.bytes_per_s, *are_whole = self._agreed(said, torch.float64, torch.distributed.ReduceOp.MIN)
            for write, is_whole in zip(ended, are_whole, strict=True):
                self._put(write, is_whole=bool(is_whole))
        if self._is_ready:
            for copy in self.behind.choose(self.clock()):
                self._write(copy)

    def _name_store(self) -> None:
        """Use the store once every rank knows its weights, by names that tell those of all."""
        own = self.store.own_identity
        (is_known,) = self._agreed([own is not None], torch.int64, torch.distributed.ReduceOp.MIN)
        if is_known and own is not None:
            parts = self._agreed([own >> 32, own & 0xFFFFFFFF], torch.int64, torch.distributed.ReduceOp.SUM)
            self.store.use("".join(f"{part:010x}" for part in parts))
            self._is_ready = True
            self._number = self.store.number
            if self.log is not None:
                self._told = StoreLog(self.log, self._number)

    def _agreed(self, numbers: list[Any], dtype: torch.dtype, by: Any) -> list[Any]:
        """`numbers` of all ranks, reduced."""
        tensor = torch.tensor(numbers, dtype=dtype)
        self._all_reduce(tensor, by)
        return list(tensor.tolist())

    # Writing

    def write_backup_storage(self, node_id: int) -> None:
        """Nothing: SGLang writes every copy as soon as it is made."""

    def _write(self, copy: HostCopy) -> None:
        """Begin to write a copy, and the KV of its path beyond the nearest stored state."""
        core, node = self.tree_core, copy.node
        rows = core.rows
        assert rows is not None
        above = stored_above(copy)
        from_depth, last_hash = (0, None) if above is None else (above.depth, above.stored_as)
        path, namespace = core.hybrid.tree.path_to(node)
        tenant = self._tenant_of(namespace)
        if tenant is None:
            return
        tokens = array("q", path)[from_depth:]
        key = RadixKey(tokens, extra_key=tenant.extra_key, cache_salt=tenant.cache_salt)
        hashes = get_storage_hash_str(key, last_hash, page_size=self.page_size)
        kv = PoolTransfer(name=PoolName.KV, host_indices=rows.path_rows(node, from_depth), keys=list(hashes))
        state = PoolTransfer(
            name=PoolName.MAMBA,
            host_indices=rows.states[node],
            keys=[hashes[-1]],
            hit_policy=PoolHitPolicy.TRAILING_PAGES,
        )
        sidecars = self._build_sidecar_transfers(CacheTransferPhase.BACKUP_STORAGE, kv, {ComponentType.MAMBA: [state]})
        assert kv.host_indices is not None
        operation = StorageOperation(
            kv.host_indices, key.token_ids, hash_value=kv.keys, pool_transfers=[state, *sidecars]
        )
        handle = core.handle(node)
        self.ongoing_backup[operation.id] = handle, self.inc_host_lock_ref(handle).to_dec_params()
        self._writes[operation.id] = _Write(copy, operation, path, namespace)
        self.behind.being_written[copy] = None
        self.cache_controller.backup_queue.put(operation)

    def _tenant_of(self, namespace: int) -> Tenant | None:
        return Tenant() if namespace == 0 else self._tenants.get(namespace)

    def _tell(self, path: bytes, namespace: int) -> None:
        """Publish that the store has the state at the end of `path`."""
        tenant = self._tenant_of(namespace)
        if self._told is not None and tenant is not None:
            self._told.stored(path, namespace, tenant)

    def _put(self, write: _Write, *, is_whole: bool) -> None:
        """The stores of all ranks have a copy, or one failed to take it: then it may be chosen once it was used."""
        self.behind.being_written.pop(write.copy, None)
        if is_whole:
            write.copy.stored_as = _stored_as(write.operation)
            self.num_writes += 1
            self._tell(write.path, write.namespace)
        else:
            self.num_lost += 1

    def save(self) -> dict[str, Any] | None:
        """Write on what both tiers hold, between two steps: None until all is written, then how much, or an `error`."""
        if not self._is_ready:
            return {"error": "the store cannot be used yet: the weights are being digested"}
        self._saving = self._saving or Saving(self, self.behind, self._write)
        if self._saving.advance():
            return None
        saved, self._saving = self._saving, None
        return {"num_states": saved.num_written, "num_held": saved.num_held}

    def _save_last(self) -> None:
        """Write what both tiers hold as long as a scheduler that ends may take, each rank by itself."""
        until_s, saving = time.monotonic() + SAVE_S, Saving(self, self.behind, self._write)
        self.settle()
        while saving.advance() and time.monotonic() < until_s:
            self._wait_for_copies()
            self.drain_storage_control_queues_local()
            for write in self._ended_writes():
                self._put(write, is_whole=_is_whole(write.operation))
            time.sleep(_POLL_S)
        logger.info("marconi: wrote %d of %d states to the store", saving.num_written, saving.num_held)

    def _ended_writes(self) -> list[_Write]:
        """Writes that SGLang has taken note of since the last call."""
        return [self._writes.pop(each) for each in list(self._writes) if each not in self.ongoing_backup]

    # Reading

    def prefetch_from_storage(
        self,
        request: "CacheRequestHandle",
        last_host_node_id: int,
        new_input_tokens: Any,
        last_hash: str | None = None,
        prefix_keys: list[str] | None = None,
        matched_prefix_tokens: Any = None,
        extra_key: str | None = None,
        cache_salt: str | None = None,
        storage_hit_end: int | None = None,
    ) -> bool | None:
        """Ask for the whole path of a prompt of which neither tier holds the last `new_input_tokens`."""
        self._tenants[namespace_of(extra_key, cache_salt)] = Tenant(extra_key, cache_salt)
        if len(self._tenants) > 64 + 2 * len(self.tree_core.hybrid.tree.roots):
            roots = self.tree_core.hybrid.tree.roots
            self._tenants = {each: tenant for each, tenant in self._tenants.items() if each in roots}
        if len(new_input_tokens) < self.prefetch_threshold:
            return None
        tokens = matched_prefix_tokens + new_input_tokens if matched_prefix_tokens else new_input_tokens
        asked: bool | None = super().prefetch_from_storage(
            request, ROOT, tokens, extra_key=extra_key, cache_salt=cache_salt
        )
        return asked

    def _invalidate_absent_from_hit_query(self, operation: PrefetchOperation) -> None:
        """The store has answered: a hit that is not to be read is none."""
        super()._invalidate_absent_from_hit_query(operation)
        info = self.ongoing_prefetch.get(operation.handle)
        if info is None or operation.is_terminated():
            return
        depth = int(operation.storage_hit_count)
        if self._told is not None:
            key = info.prefetch_key
            self._told.found(path_of(key.token_ids, len(key)), depth, namespace_of(key.extra_key, key.cache_salt))
        if depth:
            last_hash = operation.all_hash_values[depth // self.page_size - 1]
            read = self._to_read(info.prefetch_key, depth, last_hash)
            if read is None:
                operation.storage_hit_count = 0
            else:
                self._reads[operation.handle] = read
                self.cache_controller.trim_prefetch_full_head(operation, read.start)

    def _to_read(self, key: RadixKey, depth: int, last_hash: str) -> _Read | None:
        """The state at `depth` of a path, if reading it saves time and the host has room for it, which is kept."""
        core = self.tree_core
        tier, namespace = core.tier, namespace_of(key.extra_key, key.cache_salt)
        assert tier is not None
        path = path_of(key.token_ids, depth)
        match = core.hybrid.tree.match(path_of(key.token_ids, len(key)), len(key), namespace)
        above = None if match.hosted is None else match.hosted.host_copy
        start = 0 if above is None else above.depth
        num_tokens = depth - start
        if num_tokens < self.prefetch_threshold:
            return None
        if not self.behind.pays_to_read(match, depth, len(key) + 1, num_tokens):
            return None
        read = _Read(path, namespace, start, above, depth, last_hash)
        if above is not None:
            tier.lock(above)
        if tier.expect(num_tokens, self.clock()):
            return read
        if above is not None:
            tier.unlock(above)
        return None

    def _retire_ongoing_prefetch(self, request: "CacheRequestHandle", *given: Any) -> None:
        """Nothing, or not all, was read for a request."""
        if request in self._reads:
            self._no_longer_expected(request)
            self.num_lost += 1
        super()._retire_ongoing_prefetch(request, *given)

    def _no_longer_expected(self, request: "CacheRequestHandle") -> _Read:
        read, tier = self._reads.pop(request), self.tree_core.tier
        assert tier is not None
        tier.unexpect(read.depth - read.start)
        if read.above is not None:
            tier.unlock(read.above)
        return read

    def _handle_prefetch_result(self, operation: PrefetchOperation) -> None:
        """All reading for a request has ended: adopt the state if every rank has all of it."""
        handle, info = operation.handle, self.ongoing_prefetch[operation.handle]
        if not self._check_hybrid_prefetch_result(handle, operation, operation.hash_value, info.host_indices):
            return
        read = self._no_longer_expected(handle)
        (state,) = info.comp_xfers[ComponentType.MAMBA]
        num_tokens = self._adopt(read, info.host_indices, state.host_indices)
        if not num_tokens:
            self.num_lost += 1
            self._finish_storage_prefetch(handle, fulfilled_tokens=0, reason="dropped")
        self.dec_host_lock_ref(info.anchor_node_id, info.anchor_lock_params)
        del self.ongoing_prefetch[handle]
        self.cache_controller.prefetch_tokens_occupied -= len(info.prefetch_key)
        self.prefetch_loaded_tokens_by_reqid[handle] = num_tokens
        self.prefetch_loaded_storage_start_by_reqid.pop(handle, None)
        if num_tokens:
            self.prefetch_loaded_storage_start_by_reqid[handle] = read.start

    def _adopt(self, read: _Read, kv: torch.Tensor, slot: torch.Tensor) -> int:
        """Hold what was read as a copy, unless the host has it by now or had no room for all; returns its tokens."""
        core, pools = self.tree_core, self.host_pool_group
        tier, rows = core.tier, core.rows
        assert tier is not None
        assert rows is not None
        start = tier.copies.num_hosted_tokens(read.path, read.depth, read.namespace)
        hosted = core.hybrid.tree.match(read.path, read.depth, read.namespace).hosted
        is_known = hosted is not None and hosted.depth == read.depth
        is_cut = len(kv) != read.depth - read.start
        if is_known or is_cut or not tier.has_room(read.depth - start):
            pools.free(kv)
            pools.free(slot, pool=PoolName.MAMBA)
            return 0
        pools.free(kv[: start - read.start])
        node = tier.adopt(read.path, read.namespace, read.depth, self.clock())
        rows.fill(node, kv[start - read.start :].clone(), slot.clone())
        assert node.host_copy is not None
        node.host_copy.stored_as = read.stored_as
        self.num_reads += 1
        self._tell(read.path, read.namespace)
        return read.depth - start


def _stored_as(operation: StorageOperation) -> str:
    """The hash of the path that was written."""
    assert operation.hash_value is not None
    return str(operation.hash_value[-1])


def _is_whole(operation: StorageOperation) -> bool:
    """True if every object of a state was written, or was there."""
    written, others = operation.pool_storage_result.extra_pool_hit_pages, operation.pool_transfers or ()
    has_kv = operation.completed_tokens == len(operation.token_ids)
    return has_kv and all(written.get(each.name) == len(each.keys or ()) for each in others)
