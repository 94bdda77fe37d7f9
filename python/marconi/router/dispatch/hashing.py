"""A prompt's token ids as the chain of positions that an index knows, in the hashes of its workers' events.

    ids        |---- block ----|---- block ----|--- rest --- last id
    hashes                     1               2             .           of whole blocks before the last id
    tail(d)                                        of the partial block that ends at depth d, when a state is there

Sources: `events/hashes.py`.
"""

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

from marconi.events.hashes import ID_BYTES, HashSpace
from marconi.router.dispatch.base import Prompt
from marconi.router.index.base import Chain

KEY_TOKENS = 1024
"""Of a prompt's beginning, that its key is of: enough to tell two system prompts apart, few enough for turns of one
conversation to agree."""


def prompt_of(ids: Sequence[int], space: HashSpace, block_tokens: int, key: bytes | None = None) -> Prompt:
    """The prompt of `ids`, each 0 or more; `key` is what its client says of its session, else that of its beginning.

    `ValueError` for no ids, a negative one, or one beyond 63 bits.
    """
    try:
        packed = np.asarray(ids, dtype="<i8")
    except OverflowError:
        raise ValueError("a token id must be below 2^63: one is beyond 63 bits") from None
    if len(packed) and int(packed.min()) < 0:
        raise ValueError(f"a token id must be 0 or more, got {int(packed.min())}")
    text = packed.tobytes()
    num_blocks = max(len(packed) - 1, 0) // block_tokens
    digests = space.digests(space.start, text[: num_blocks * block_tokens * ID_BYTES], block_tokens)

    def tail(depth: int) -> int | None:
        start = depth // block_tokens * block_tokens
        if not start < depth < len(packed) or start > num_blocks * block_tokens:
            return None
        before = digests[start // block_tokens - 1] if start else space.start
        (digest,) = space.digests(before, text[start * ID_BYTES : depth * ID_BYTES], block_tokens)
        return space.hash(digest)

    chain = Chain(space.namespace, tuple(space.hash(digest) for digest in digests), tail)
    if key is None:
        key = blake2b(space.namespace + text[: KEY_TOKENS * ID_BYTES], digest_size=16).digest()
    return Prompt(chain, len(packed), key)
