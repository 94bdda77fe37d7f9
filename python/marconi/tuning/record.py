"""A server's record of a finished request for its tuner: hashes of blocks of tokens, and lengths. No text, no tokens.

A block's hash is a sum over its tokens, each times a weight of its place, modulo 2**64: equal blocks have equal hashes
wherever they stand, and a prefix of blocks is a path of the tuner's tree, two ids a block. One pass of additions makes
it cheap enough for the serving thread (some 35 us for 100,000 tokens). The weights are fixed and odd; two blocks that
differ in one token never collide, others by chance once in 2**64.

    record = header, then 8 bytes a block (the last may be partial)
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, Final

import numpy as np
from numpy.typing import NDArray

from marconi.policy.request import Request

BLOCK_TOKENS: Final = 64
IDS_PER_BLOCK: Final = 2
"""A block takes the room of two of the tree's four-byte ids."""
_HASH_BYTES: Final = 8
_SEED: Final = 20_260
_HEADER: Final = struct.Struct("<qqqqddd")
_FORGET: Final = -1


@dataclass(frozen=True, slots=True)
class Record:
    """A request that has finished."""

    request: Request
    """Its path is in blocks of hashes."""
    overhead_s: float
    s_per_flop: float
    """What prefills take, as the server has learned so far (`model/learned_latency.py`)."""


class Encoder:
    """Makes records."""

    def __init__(self, block_tokens: int = BLOCK_TOKENS) -> None:
        """`ValueError` for a block of no token."""
        if block_tokens < 1:
            raise ValueError(f"a block must be 1 token or more, got {block_tokens}")
        self.block_tokens = block_tokens
        generator = np.random.Generator(np.random.PCG64(_SEED))
        self._weights = generator.integers(1 << 64, size=block_tokens, dtype=np.uint64) | np.uint64(1)

    def encode(
        self,
        tokens: NDArray[np.int64],
        num_prompt_tokens: int,
        namespace: int,
        arrival_s: float,
        coefficients: tuple[float, float] = (0.0, 0.0),
    ) -> bytes:
        """The record of a request whose prompt and answer are `tokens`; `coefficients` are overhead and slope."""
        hashes = self.hashes(tokens)
        num_output_tokens = len(tokens) - num_prompt_tokens
        lengths = (len(hashes), num_prompt_tokens, num_output_tokens, namespace & (1 << 63) - 1)
        return _HEADER.pack(*lengths, arrival_s, *coefficients) + hashes.tobytes()

    def hashes(self, tokens: NDArray[np.int64]) -> NDArray[np.uint64]:
        """A hash a block, of the partial last one too."""
        ids, block = tokens.view(np.uint64), self.block_tokens
        num_whole = len(ids) // block
        whole: NDArray[np.uint64] = np.einsum(
            "ij,j->i", ids[: num_whole * block].reshape(num_whole, block), self._weights
        )
        rest = ids[num_whole * block :]
        if not len(rest):
            return whole
        return np.append(whole, (rest * self._weights[: len(rest)]).sum(dtype=np.uint64))


def forget() -> bytes:
    """The record that says: the cache was flushed."""
    return _HEADER.pack(_FORGET, 0, 0, 0, 0.0, 0.0, 0.0)


def read(stream: BinaryIO, block_tokens: int) -> Iterator[Record | None]:
    """The records of `stream` until it ends, None for a flush; `EOFError` if it ends within one."""
    while header := stream.read(_HEADER.size):
        if len(header) < _HEADER.size:
            raise EOFError(f"a header must be {_HEADER.size} bytes, got {len(header)}")
        num_blocks, num_prompt, num_output, namespace, arrival_s, overhead_s, s_per_flop = _HEADER.unpack(header)
        if num_blocks == _FORGET:
            yield None
            continue
        path = stream.read(num_blocks * _HASH_BYTES)
        if len(path) < num_blocks * _HASH_BYTES:
            raise EOFError(f"a path must be {num_blocks * _HASH_BYTES} bytes, got {len(path)}")
        num_known = (num_prompt + num_output) // block_tokens * block_tokens
        request = Request(path, num_prompt, num_output, num_known, arrival_s, namespace=namespace)
        yield Record(request, overhead_s, s_per_flop)
