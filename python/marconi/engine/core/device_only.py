"""The part of SGLang's tree-core interface that this core does not serve, each method saying so.

Host tiers (hierarchical cache, storage backends, external linkers), sliding windows and pins by sparse attention are
refused when the cache is built (`engine/support.py`); what is left here are questions with a fixed answer, and methods
that nobody calls without those features. Source: `srt/mem_cache/unified_cache/unified_tree_core_interface.py`.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from sglang.srt.mem_cache.unified_cache.unified_tree_core_interface import (
    DriveHostEvictionResult,
    UnifiedTreeCoreInterface,
)

if TYPE_CHECKING:
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType


class DeviceOnlyCore(UnifiedTreeCoreInterface):
    """A tree core without a host tier or sliding windows."""

    def is_write_through_compatible(self) -> bool:
        """Nothing is on a host."""
        return True

    def is_backuped(self, node_id: int) -> bool:
        """Nothing is on a host."""
        return False

    def get_last_hash_value(self, node_id: int) -> str | None:
        """Nodes are not hashed."""
        return None

    def get_prefix_hash_values(self, node_id: int) -> list[str]:
        """Nodes are not hashed."""
        return []

    def get_hash_values(self, node_id: int) -> list[str]:
        """Nodes are not hashed."""
        return []

    def backfill_missing_hash_values(self) -> int:
        """Nodes are not hashed."""
        return 0

    def swa_evictable_size(self) -> int:
        """No sliding windows."""
        return 0

    def swa_protected_size(self) -> int:
        """No sliding windows."""
        return 0

    def component_has_host_value_only(self, node_id: int, component_type: "ComponentType") -> bool:
        """Nothing is on a host."""
        return False

    def drive_host_eviction(self, component_type: "ComponentType", num_tokens: int) -> DriveHostEvictionResult:
        """Nothing is on a host."""
        return DriveHostEvictionResult()

    def evict_excess_path_states(self, *_: Any) -> None:
        """States go by worth: there is no cap per path, and `--mamba-max-states-per-path` is refused."""

    def finish_load_back(self, anchor_node_id: int) -> None:
        """Nothing is loaded back."""

    def snapshot_buffer_backup(self, *_: Any, **__: Any) -> NoReturn:
        """A host tier."""
        _refuse("snapshot_buffer_backup")

    def validate_buffer_backup(self, *_: Any, **__: Any) -> NoReturn:
        """A host tier."""
        _refuse("validate_buffer_backup")

    def dec_swa_lock_only(self, *_: Any, **__: Any) -> NoReturn:
        """A sliding window."""
        _refuse("dec_swa_lock_only")

    def finish_mamba_state_eviction(self, node_id: int) -> NoReturn:
        """A host tier."""
        _refuse("finish_mamba_state_eviction")

    def finish_swa_state_eviction(self, node_id: int) -> NoReturn:
        """A host tier."""
        _refuse("finish_swa_state_eviction")

    def drop_subtree_no_host(self, node_id: int) -> NoReturn:
        """A host tier."""
        _refuse("drop_subtree_no_host")

    def demote(self, node_id: int) -> NoReturn:
        """A host tier."""
        _refuse("demote")

    def inc_host_lock_ref(self, node_id: int) -> NoReturn:
        """A host tier."""
        _refuse("inc_host_lock_ref")

    def dec_host_lock_ref(self, *_: Any, **__: Any) -> NoReturn:
        """A host tier."""
        _refuse("dec_host_lock_ref")

    def inc_full_pin(self, node_id: int) -> NoReturn:
        """A pin on KV whose state may go."""
        _refuse("inc_full_pin")

    def dec_full_pin(self, node_id: int) -> NoReturn:
        """A pin on KV whose state may go."""
        _refuse("dec_full_pin")

    def set_hicache_enabled(self) -> NoReturn:
        """A host tier."""
        _refuse("set_hicache_enabled")

    def set_host_memory_buffer_only(self) -> NoReturn:
        """A host tier."""
        _refuse("set_host_memory_buffer_only")

    def insert_host(self, *_: Any, **__: Any) -> NoReturn:
        """A host tier."""
        _refuse("insert_host")

    def build_backup_spec(self, node_id: int) -> NoReturn:
        """A host tier."""
        _refuse("build_backup_spec")

    def build_storage_backup_spec(self, *_: Any, **__: Any) -> NoReturn:
        """A host tier."""
        _refuse("build_storage_backup_spec")

    def build_hicache_transfers(self, *_: Any, **__: Any) -> NoReturn:
        """A host tier."""
        _refuse("build_hicache_transfers")

    def build_load_back_spec(self, *_: Any, **__: Any) -> NoReturn:
        """A host tier."""
        _refuse("build_load_back_spec")

    def prefetch_anchor_info(self, node_id: int) -> NoReturn:
        """A host tier."""
        _refuse("prefetch_anchor_info")

    def commit_hicache_transfers(self, *_: Any, **__: Any) -> NoReturn:
        """A host tier."""
        _refuse("commit_hicache_transfers")

    def commit_backup(self, *_: Any, **__: Any) -> NoReturn:
        """A host tier."""
        _refuse("commit_backup")

    def commit_load_back(self, *_: Any, **__: Any) -> NoReturn:
        """A host tier."""
        _refuse("commit_load_back")

    def build_external_linker_offload_transfers(self, node_id: int) -> NoReturn:
        """An external store."""
        _refuse("build_external_linker_offload_transfers")

    def mark_external_cache_stored_path(self, *_: Any, **__: Any) -> NoReturn:
        """An external store."""
        _refuse("mark_external_cache_stored_path")

    def mark_external_linker_offload_pending(self, node_id: int) -> NoReturn:
        """An external store."""
        _refuse("mark_external_linker_offload_pending")

    def finish_external_linker_offload(self, *_: Any, **__: Any) -> NoReturn:
        """An external store."""
        _refuse("finish_external_linker_offload")

    def mark_write_through_pending(self, *_: Any, **__: Any) -> NoReturn:
        """A host tier."""
        _refuse("mark_write_through_pending")

    def finish_write_through(self, *_: Any, **__: Any) -> NoReturn:
        """A host tier."""
        _refuse("finish_write_through")

    def swa_tombstone_ranges(self, *_: Any, **__: Any) -> NoReturn:
        """A sliding window."""
        _refuse("swa_tombstone_ranges")

    def attach_swa_window(self, *_: Any, **__: Any) -> NoReturn:
        """A sliding window."""
        _refuse("attach_swa_window")

    def adjust_component_size(self, *_: Any, **__: Any) -> NoReturn:
        """A backing that changes."""
        _refuse("adjust_component_size")

    def set_component_device_value(self, *_: Any, **__: Any) -> NoReturn:
        """A value put in from outside."""
        _refuse("set_component_device_value")

    def collect_path_info(self, end_node_ids: Sequence[int]) -> NoReturn:
        """Paths for transfers."""
        _refuse("collect_path_info")


def _refuse(method: str) -> NoReturn:
    raise NotImplementedError(f"the marconi tree core keeps KV and states on the device only: {method} is not served")
