"""A scheduler among the ranks: the number of its cache behind one address, and whether it is the first of that cache.

The data-parallel rank is the number of the cache:

    --dp-size N                           of its replica
    --enable-dp-attention --dp-size N     of its group of attention ranks, which share a cache

A request names it as `routed_dp_rank`. Events, metrics, `GET /marconi` and the prefix of SGLang's log lines say it.
"""

from sglang.srt.disaggregation.kv_events import select_kv_publisher_dp_rank
from sglang.srt.runtime_context import get_parallel


def dp_rank() -> int:
    """The data-parallel rank of this process; 0 where there is one."""
    parallel = get_parallel()
    return select_kv_publisher_dp_rank(parallel.attn_dp_size, parallel.attn_dp_rank, parallel.dp_rank)


def is_first_rank() -> bool:
    """True if SGLang broadcasts requests from this rank to those that share its cache."""
    parallel = get_parallel()
    return parallel.pp_rank == parallel.attn_tp_rank == parallel.attn_cp_rank == 0
