"""SGLang's radix keys as paths of this project's tree.

A path is the key's own memory: eight bytes a token, as an `array("q")` holds it, since the ids that stand for images
have up to 63 bits (`managers/schedule_batch.py:_compute_pad_values`). A name space is a number of 128 bits: equal
adapters and salts share one, others do not, and 0 is the one of requests with neither.
"""

from array import array
from hashlib import blake2b
from typing import Final

IDS_PER_TOKEN: Final = 2
"""A token takes the room of two of the tree's four-byte ids."""


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
