"""The part of SGLang's tree-core interface that this core does not serve, each method saying so.

Storage backends, external linkers, sliding windows and pins by sparse attention are refused when the cache is built
(`engine/launch/support.py`), and a host tier is `engine/host`'s; what is left here are questions with a fixed answer,
and methods that nobody calls without those features. Source:
`srt/mem_cache/unified_cache/unified_tree_core_interface.py`.
"""

from abc import update_abstractmethods
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, NoReturn

from sglang.srt.mem_cache.unified_cache.unified_tree_core_interface import (
    DriveHostEvictionResult,
    UnifiedTreeCoreInterface,
)

if TYPE_CHECKING:
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

# By name, so that a method which upstream adds leaves the class abstract.
_HOST_TIER: Final = (
    "snapshot_buffer_backup",
    "validate_buffer_backup",
    "finish_mamba_state_eviction",
    "finish_swa_state_eviction",
    "drop_subtree_no_host",
    "demote",
    "inc_host_lock_ref",
    "dec_host_lock_ref",
    "set_hicache_enabled",
    "set_host_memory_buffer_only",
    "insert_host",
    "build_backup_spec",
    "build_storage_backup_spec",
    "build_hicache_transfers",
    "build_load_back_spec",
    "prefetch_anchor_info",
    "commit_hicache_transfers",
    "commit_backup",
    "commit_load_back",
    "mark_write_through_pending",
    "finish_write_through",
    "collect_path_info",
)
_EXTERNAL_STORE: Final = (
    "build_external_linker_offload_transfers",
    "mark_external_cache_stored_path",
    "mark_external_linker_offload_pending",
    "finish_external_linker_offload",
)
_SLIDING_WINDOW: Final = ("dec_swa_lock_only", "swa_tombstone_ranges", "attach_swa_window")
_SPARSE_ATTENTION: Final = ("inc_full_pin", "dec_full_pin")
_VALUES_FROM_OUTSIDE: Final = ("adjust_component_size", "set_component_device_value")
NOT_SERVED: Final = (*_HOST_TIER, *_EXTERNAL_STORE, *_SLIDING_WINDOW, *_SPARSE_ATTENTION, *_VALUES_FROM_OUTSIDE)


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

    def component_has_host_value_only(self, node_id: int, component_type: "ComponentType") -> bool:
        """Nothing is on a host."""
        return False

    def drive_host_eviction(self, component_type: "ComponentType", num_tokens: int) -> DriveHostEvictionResult:
        """Nothing is on a host."""
        return DriveHostEvictionResult()

    def evict_excess_path_states(self, *_: Any) -> None:
        """Do nothing: `--mamba-max-states-per-path` has no effect on eviction by worth (`launch/support.py`)."""

    def finish_load_back(self, anchor_node_id: int) -> None:
        """Nothing is loaded back."""


def _refusing(method: str) -> Callable[..., NoReturn]:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(
            f"the marconi tree core keeps KV and states on the device only: {method} is not served"
        )

    return refuse


for _method in NOT_SERVED:
    setattr(DeviceOnlyCore, _method, _refusing(_method))
update_abstractmethods(DeviceOnlyCore)
