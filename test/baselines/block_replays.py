"""A trace on a block cache, without bytes and without counters."""

from marconi.policy.request import Trace
from marconi_lab.block import BlockCache
from marconi_lab.block.server import access_prompt


def hit_tokens(trace: Trace, cache: BlockCache) -> list[int]:
    """The hit tokens of each request."""
    return [access_prompt(cache, request, trace.unit_tokens).num_hit_tokens for request in trace.requests]


def replay(trace: Trace, cache: BlockCache) -> dict[str, float]:
    """The numbers that the Mooncake-format block replays print, by name."""
    total_hit_tokens = sum(hit_tokens(trace, cache))
    total_prompt_tokens = sum(request.num_prompt_tokens for request in trace.requests)
    return {
        "overall_hit_rate": total_hit_tokens / total_prompt_tokens if total_prompt_tokens else 0.0,
        "total_hit_tokens": total_hit_tokens,
        "total_prompt_tokens": total_prompt_tokens,
        "final_cache_blocks": cache.num_blocks,
    }
