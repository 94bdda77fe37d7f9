"""A cache of blocks as a replay drives it, in bytes and counters as a server has them.

A hybrid model can use a block only from a state at its end, so a block takes the bytes of its KV and of one state
(`block_bytes`); for a model without states that is its KV. What a request hits is the rule of Mooncake-format block
replays. Its blocks are those of its prompt, `ceil(num_prompt_tokens / unit_tokens)`, a partial last one too. In order
of arrival, one request after the other:

    1. k = resident blocks in a row from block 0, all looked up before the request touches the cache
    2. hit tokens = min(k * unit_tokens, num_prompt_tokens)
    3. every block is accessed, in order, hit or not

From this follow the corners. A request's own accesses cannot change its hit: a block counted in step 1 may be evicted
by an earlier block in step 3, as it is when the request has more blocks than the cache, and is then admitted anew. A
block that a request names twice counts at each of its positions and is accessed at each of them. A resident block after
the first gap counts for nothing, but is touched all the same. Blocks of different namespaces are different blocks. The
last prompt token may be hit, too: these are the format's own rules, while a server must recompute it for its logits.
"""

from typing import NamedTuple

from marconi.lifecycle.pools import Amount
from marconi.policy.base import Costs, Need
from marconi.policy.counters import Counters
from marconi.policy.request import Request, unpack
from marconi.replay.target import block_bytes
from marconi.tree.node import ID_BYTES
from marconi_lab.block import make
from marconi_lab.block.base import BlockCache


class BlockServer:
    """Serves requests from a block cache of `memory_bytes`."""

    def __init__(self, name: str, memory_bytes: int, unit_tokens: int, costs: Costs) -> None:
        """`ValueError` for a trace of tokens, and for memory that holds fewer blocks than the rule needs."""
        if unit_tokens <= 1:
            raise ValueError(
                "the trace must be one of blocks for a block cache, or be cut by --block-tokens N, 2 or more, got "
                "single tokens"
            )
        self._unit_tokens = unit_tokens
        self._block_bytes = block_bytes(unit_tokens, costs)
        try:
            self.blocks: BlockCache = make(name, memory_bytes // self._block_bytes)
        except ValueError as error:
            raise ValueError(f"{memory_bytes} bytes in blocks of {self._block_bytes} bytes: {error}") from None
        self.counters = Counters()

    @property
    def num_blocks(self) -> int:
        """Blocks held."""
        return self.blocks.num_blocks

    @property
    def held(self) -> Amount:
        """The contents of the cache, with a state a block."""
        return Amount(self.blocks.num_blocks * self._unit_tokens, self.blocks.num_blocks)

    def serve(self, request: Request) -> int:
        """Look the prompt up, then access each of its blocks; returns the tokens that were hit."""
        counters, blocks = self.counters, self.blocks
        num_before = blocks.num_blocks
        num_blocks, num_missed, num_hit_tokens = access_prompt(blocks, request, self._unit_tokens)
        counters.num_requests += 1
        counters.num_too_large += num_blocks > blocks.capacity_blocks
        counters.num_prompt_tokens += request.num_prompt_tokens
        counters.num_hit_tokens += num_hit_tokens
        counters.num_states_hit += num_hit_tokens > 0
        counters.num_states_written += num_missed
        num_evicted = num_before + num_missed - blocks.num_blocks
        counters.num_evictions[Need.BYTES] += num_evicted
        counters.num_evicted_tokens += num_evicted * self._unit_tokens
        return num_hit_tokens


class Access(NamedTuple):
    """One request's accesses to blocks, and its hit tokens."""

    num_blocks: int
    num_missed: int
    """Accesses whose block was evicted or never there."""
    num_hit_tokens: int


def access_prompt(cache: BlockCache, request: Request, block_tokens: int) -> Access:
    """Look the prompt up, then access each of its blocks: steps 1 to 3."""
    contains, access = cache.contains, cache.access
    block_ids = prompt_blocks(request, block_tokens)
    num_resident = 0
    for block_id in block_ids:
        if not contains(block_id):
            break
        num_resident += 1
    num_missed = sum(not access(block_id) for block_id in block_ids)
    return Access(len(block_ids), num_missed, min(num_resident * block_tokens, request.num_prompt_tokens))


def prompt_blocks(request: Request, block_tokens: int) -> list[int]:
    """The ids of the prompt's blocks, the partial last one included, distinct between namespaces."""
    num_blocks = -(-request.num_prompt_tokens // block_tokens)
    block_ids = unpack(request.path[: num_blocks * ID_BYTES])
    if request.namespace:
        first = request.namespace << (8 * ID_BYTES)
        return [first | block_id for block_id in block_ids]
    return block_ids
