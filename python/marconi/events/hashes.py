"""Hashes of blocks of tokens, as SGLang's KV events have them.

    digest of a block = SHA-256(digest of the block before it, ids)      ids: uint32, little-endian, 4 bytes a token
    hash              = its first 8 bytes, big-endian

An id above 32 bits (images have such) makes it SHA-256(digest before, 0xff, ids of 8 bytes). The first block follows
nothing, or SHA-256("sglang-cache-salt-v1\\0", salt) of a tenant. In a namespace with an `extra_key` or a salt the hash
is SHA-256(seed, those 8 bytes)[:8], its seed over both: SGLang's `dynamo` format, without which two adapters would
share hashes. In a store's namespace it is XOR the store (`base.Namespace`). So equal hashes are equal prefixes of one
namespace, whichever worker made them. The last block of a prefix may be short, and is hashed all the same.

Sources: `srt/mem_cache/utils.py:compute_node_event_hash_values`, `srt/mem_cache/hash_binding.cpp`,
`srt/disaggregation/kv_events.py:namespaced_block_hash`.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256
from typing import Final, Self

import numpy as np

from marconi.events.base import Namespace, namespace_in

ID_BYTES: Final = 8
"""Bytes of a token in packed ids: int64, little-endian, not negative."""
_MAX_NARROW: Final = (1 << 32) - 1


@dataclass(frozen=True, slots=True)
class HashSpace:
    """The hash scheme of one namespace."""

    namespace: Namespace
    start: bytes
    """The digest that the first block follows; empty for none."""
    seed: bytes | None
    store: int = 0
    """The store whose contents these are; 0 for those of a device."""

    @classmethod
    def of(cls, model: str | None, extra_key: str | None, cache_salt: str | None, store: int = 0) -> Self:
        """The hash scheme of an adapter and a tenant of `model`; an empty text counts as none."""
        extra_key, cache_salt = extra_key or None, cache_salt or None
        names = (model, extra_key, cache_salt)
        namespace = b"" if names == (None, None, None) else _joined(b"marconi-namespace-v1", names)[:16]
        start = b"" if cache_salt is None else sha256(b"sglang-cache-salt-v1\0" + cache_salt.encode()).digest()
        is_plain = extra_key is None and cache_salt is None
        seed = None if is_plain else _joined(b"sglang-kv-event-namespace-v1", (extra_key, cache_salt))
        return cls(namespace_in(store, namespace) if store else namespace, start, seed, store)

    def hash(self, digest: bytes) -> int:
        """The hash of a block with this digest."""
        if self.seed is not None:
            digest = sha256(self.seed + digest[:8]).digest()
        return int.from_bytes(digest[:8], "big") ^ self.store

    def digests(self, before: bytes, packed: bytes, block_tokens: int) -> list[bytes]:
        """The digests of the blocks of `packed` ids, the last of which may be short; they follow `before`."""
        ids = np.frombuffer(packed, dtype="<i8")
        is_narrow = not len(ids) or int(ids.max()) <= _MAX_NARROW
        narrow = ids.astype("<u4").tobytes() if is_narrow else b""
        found: list[bytes] = []
        for start in range(0, len(ids), block_tokens):
            end = start + block_tokens
            if is_narrow:
                before = sha256(before + narrow[start * 4 : end * 4]).digest()
            elif int(ids[start:end].max()) <= _MAX_NARROW:
                before = sha256(before + ids[start:end].astype("<u4").tobytes()).digest()
            else:
                before = sha256(before + b"\xff" + packed[start * ID_BYTES : end * ID_BYTES]).digest()
            found.append(before)
        return found


def _joined(tag: bytes, parts: Iterable[str | None]) -> bytes:
    digest = sha256(tag)
    for part in parts:
        encoded = (part or "").encode()
        digest.update(b"\0" if part is None else b"\1" + len(encoded).to_bytes(8, "little") + encoded)
    return digest.digest()
