"""A stand-in for Mooncake's client, whose objects are files: what its calls answer, and that memory is registered.

Its folder is `MARCONI_TEST_MOONCAKE`. While there is a file `down` in it every call fails, as without a master.
"""

import ctypes
import os
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Final

FOLDER: Final = "MARCONI_TEST_MOONCAKE"
DOWN: Final = "down"
INVALID, UNREACHABLE, ABSENT, LEASED = -600, -900, -704, -706


class MooncakeDistributedStore:
    """A client."""

    def __init__(self) -> None:
        self._folder = Path(os.environ[FOLDER])
        self._registered: dict[int, int] = {}
        self._leased: set[str] = set()
        self._is_closed = False

    def setup(self, *_given: object, **_named: object) -> int:
        self._folder.mkdir(parents=True, exist_ok=True)
        return 0

    def put(self, key: str, value: bytes) -> int:
        return self._put(key, value)

    def get(self, key: str) -> bytes:
        return (self._folder / key).read_bytes()

    def is_exist(self, key: str) -> int:
        return self.batch_is_exist([key])[0]

    def register_buffer(self, address: int, num_bytes: int) -> int:
        self._registered[address] = num_bytes
        return 0

    def unregister_buffer(self, address: int) -> int:
        return 0 if self._registered.pop(address, None) else INVALID

    def batch_is_exist(self, keys: Sequence[str]) -> list[int]:
        return [UNREACHABLE if self._is_down else int((self._folder / key).exists()) for key in keys]

    def batch_put_from(self, keys: Sequence[str], addresses: Sequence[int], sizes: Sequence[int]) -> list[int]:
        parts = zip(keys, addresses, sizes, strict=True)
        return [
            self._put(key, ctypes.string_at(address, size)) if self._may_move(address, size) else INVALID
            for key, address, size in parts
        ]

    def batch_get_into(self, keys: Sequence[str], addresses: Sequence[int], sizes: Sequence[int]) -> list[int]:
        return [self._get_into(*part) for part in zip(keys, addresses, sizes, strict=True)]

    def remove(self, key: str, force: bool = False) -> int:
        if key in self._leased and not force:
            return LEASED
        (self._folder / key).unlink(missing_ok=True)
        return 0

    def remove_all(self) -> int:
        paths = list(self._folder.iterdir())
        for path in paths:
            path.unlink(missing_ok=True)
        return len(paths)

    def close(self) -> int:
        self._is_closed = True
        return 0

    @property
    def _is_down(self) -> bool:
        return self._is_closed or (self._folder / DOWN).exists()

    def _may_move(self, address: int, size: int) -> bool:
        return any(start <= address and address + size <= start + num for start, num in self._registered.items())

    def _put(self, key: str, value: bytes) -> int:
        if self._is_down:
            return UNREACHABLE
        if not (self._folder / key).exists():
            part = self._folder / f".{uuid.uuid4().hex}"
            part.write_bytes(value)
            part.rename(self._folder / key)
        return 0

    def _get_into(self, key: str, address: int, size: int) -> int:
        if self._is_down:
            return UNREACHABLE
        try:
            value = (self._folder / key).read_bytes()
        except FileNotFoundError:
            return ABSENT
        if len(value) > size or not self._may_move(address, size):
            return INVALID
        self._leased.add(key)
        ctypes.memmove(address, value, len(value))
        return len(value)


class ReplicateConfig:
    """How an object is kept; SGLang asks what it knows."""
