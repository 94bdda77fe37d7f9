"""SGLang's store of files: a folder, of this host or of several, with a file an object.

The names of files, their atomic replacement and their removal beyond `max_size` are SGLang's, and so are the faults and
delays that its own tests ask for. What one server of a fleet removes, the others still count towards their `max_size`.

Source of what it drives: the class `HiCacheFile` of `srt/mem_cache/hicache_storage.py`.
"""

import secrets
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import torch
from sglang.srt.mem_cache.hicache_storage import PoolTransfer, PoolTransferResult

NAMED: Final = "marconi-store"
"""The file that tells a folder from all others."""


class Files:
    """Objects in a folder."""

    def __init__(self, backend: Any) -> None:
        """A folder in which nothing is yet becomes the user's own."""
        self._backend = backend
        self._files: Any = getattr(backend, "_backend", backend)
        """Below what SGLang injects faults with."""
        folder = Path(self._files.file_path)
        if not any(folder.iterdir()):
            folder.chmod(0o700)
        self.place = _number_of(folder)
        """A number in the folder: its path does not say which host's it is."""

    def find(self, names: list[str], transfers: list[PoolTransfer]) -> PoolTransferResult:
        """How many of the first of `names`, pages of KV, there are, up to one with a state: `NAME.POOL`."""
        found: PoolTransferResult = self._backend.batch_exists_v2(names, transfers)
        return found

    def missing(self, names: Sequence[str]) -> list[int]:
        """Which of `names` there are not, by their places."""
        return [at for at, name in enumerate(names) if not self._backend.exists(name)]

    def memory(self, num_bytes: int) -> torch.Tensor:
        """Any memory."""
        return torch.empty(num_bytes, dtype=torch.uint8)

    def read(self, names: Sequence[str], into: Sequence[torch.Tensor]) -> list[int | None]:
        """Read files, up to the first that is not there; one that is longer is cut to its part."""
        found = list[int | None]([None] * len(names))
        for at, (name, part) in enumerate(zip(names, into, strict=True)):
            try:
                if self._backend.get(name, part) is None:
                    break
                found[at] = len(part)
            except OSError:
                found[at] = 0
        return found

    def write(self, names: Sequence[str], parts: Sequence[torch.Tensor]) -> int:
        """Write files, up to the first that fails or has no place; returns how many were written."""
        for num_written, (name, part) in enumerate(zip(names, parts, strict=True)):
            if not self._backend.set(name, part):
                return num_written
        return len(names)

    def remove(self, name: str) -> str:
        """Remove a file; returns its path."""
        path = Path(self._files.file_path, f"{self._files._get_suffixed_key(name)}.bin")
        path.unlink(missing_ok=True)
        return str(path)

    def close(self) -> None:
        """Nothing: a folder stays."""


def _number_of(folder: Path) -> str:
    """The number of a folder, which the first server gives it: whole or not at all, as others may start with it."""
    number = secrets.token_hex(16)
    written = folder / f".{number}"
    written.write_text(number)
    with suppress(FileExistsError):
        (folder / NAMED).hardlink_to(written)
    written.unlink()
    return (folder / NAMED).read_text()
