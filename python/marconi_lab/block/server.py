"""A cache of blocks as a replay drives it, in bytes and counters as a server has them.

A hybrid model can use a block only from a state at its end, so a block takes the bytes of its KV and of one state
(`block_bytes`); for a model without states that is its KV. What a request hits is the format's own rule
(`marconi_lab.block.replay`), which lets the whole prompt hit.
"""

from marconi.lifecycle.pools import Amount
from marconi.policy.base import Costs, Need
from marconi.policy.counters import Counters
from marconi.policy.request import Request
from marconi.replay.target import block_bytes
from marconi_lab.block import make
from marconi_lab.block.base import BlockCache
from marconi_lab.block.replay import access_prompt


class BlockServer:
    """Serves requests from a block cache of `memory_bytes`."""

    def __init__(self, name: str, memory_bytes: int, unit_tokens: int, costs: Costs) -> None:
        """`ValueError` for a trace of tokens, and for memory that holds fewer blocks than the rule needs."""
        if unit_tokens <= 1:
            raise ValueError(
                "it caches blocks: the trace must be one of blocks, or --block-tokens N, 2 or more; got a unit of "
                "one token"
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
