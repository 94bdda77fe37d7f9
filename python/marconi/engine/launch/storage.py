"""Settings of a store behind the host that SGLang passes on, or would read as none without ending the start.

Source: `srt/mem_cache/storage/file/lru_file_evictor.py`, by which a size such as `2TB` is no bound at all.
"""

from collections.abc import Mapping
from typing import Any, Final

from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
from sglang.srt.mem_cache.storage.file.lru_file_evictor import _parse_size_to_bytes

MAX_WRITTEN_PER_DAY: Final = "max_written_per_day"
"""Ours, beside SGLang's own settings: the most that a server writes a day."""
_SIZES: Final = ("max_size", "min_free_space", MAX_WRITTEN_PER_DAY)


def has_wrong_size(text: str | None) -> bool:
    """True if `--hicache-storage-backend-extra-config` has a size that SGLang takes for none."""
    try:
        settings, *_ = HybridCacheController.parse_storage_backend_extra_config(text)
    except Exception:  # SGLang says so itself
        return False
    return any(
        str(settings[name]).strip() not in ("", "0") and not _parse_size_to_bytes(settings[name])
        for name in _SIZES
        if settings.get(name) is not None
    )


def written_bytes_per_day(settings: Mapping[str, Any] | None) -> int | None:
    """The most that a server may write to its store a day; None for any amount."""
    return _parse_size_to_bytes((settings or {}).get(MAX_WRITTEN_PER_DAY)) or None
