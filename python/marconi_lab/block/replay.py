"""The block replay of a Mooncake-format trace: what a block cache hits, request by request.

A request's blocks are those of its prompt, `ceil(num_prompt_tokens / unit_tokens)` of them, a partial last one too. In
order of arrival, one request after the other:

    1. k = resident blocks in a row from block 0, all looked up before the request touches the cache
    2. hit tokens = min(k * unit_tokens, num_prompt_tokens)
    3. every block is accessed, in order, hit or not

From this follow the corners. A request's own accesses cannot change its hit: a block counted in step 1 may be evicted
by an earlier block in step 3, as it is when the request has more blocks than the cache, and is then admitted anew. A
block that a request names twice counts at each of its positions and is accessed at each of them. A resident block after
the first gap counts for nothing, but is touched all the same. Blocks of different namespaces are different blocks. The
last prompt token may be hit, too: these are the format's own rules, while a server must recompute it for its logits.

`access_prompt` is the rule; `hit_tokens` and `replay` apply it to a trace, as commands do, which count bytes.
"""

from collections.abc import Iterator
from typing import NamedTuple

from marconi.policy.request import Request, Trace, unpack
from marconi.replay.result import BlockReplay
from marconi.tree.node import ID_BYTES
from marconi_lab.block.base import BlockCache


def replay(trace: Trace, cache: BlockCache) -> BlockReplay:
    """Replay all of `trace` on `cache`.

    Raises ValueError for a trace of tokens, as `hit_tokens` does.
    """
    total_hit_tokens = sum(hit_tokens(trace, cache))
    total_prompt_tokens = sum(request.num_prompt_tokens for request in trace.requests)
    return BlockReplay(
        overall_hit_rate=total_hit_tokens / total_prompt_tokens if total_prompt_tokens else 0.0,
        total_hit_tokens=total_hit_tokens,
        total_prompt_tokens=total_prompt_tokens,
        final_cache_blocks=cache.num_blocks,
    )


def hit_tokens(trace: Trace, cache: BlockCache) -> Iterator[int]:
    """The hit tokens of each request; when one is given, the cache has accessed that request's blocks.

    Raises ValueError, before the first request, for a trace whose units are tokens: a token's id says nothing of the
    tokens before it, so it is no block.
    """
    if trace.unit_tokens <= 1:
        raise ValueError(
            f"trace {trace.name!r} has units of {trace.unit_tokens} token: a block cache replays blocks of 2 or more"
        )
    return _hit_tokens(trace, cache)


def _hit_tokens(trace: Trace, cache: BlockCache) -> Iterator[int]:
    for request in trace.requests:
        yield access_prompt(cache, request, trace.unit_tokens).num_hit_tokens


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
