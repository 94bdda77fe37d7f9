"""A server's policies: what its flags choose of those on offer (`policy/catalog.py`).

What a state takes comes from the pools, what it saves from the model's configuration.
"""

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from marconi.model import huggingface
from marconi.model.huggingface.config import from_mapping
from marconi.model.latency import LatencyModel
from marconi.policy.admission.plan import STEP_TOKENS
from marconi.policy.base import Costs, Need, PrefixFlops
from marconi.policy.catalog import PolicyInputs, served
from marconi.policy.eviction.order import Order
from marconi.policy.eviction.utility import ALPHA
from marconi.policy.host_tier import HostMemory, LoadTimes
from marconi.policy.hybrid_cache import HybridCache
from marconi.policy.write_behind import WriteBehind
from marconi.tree import Node, RadixTree
from marconi.tree.memory import Memory

if TYPE_CHECKING:
    from marconi.engine.host.link import LinkSpeed

logger = logging.getLogger(__name__)

TWO_POOLS: Final = frozenset({Need.KV, Need.STATE})
ONE_POOL: Final = frozenset({Need.BYTES})
"""`--enable-unified-memory`."""

JUDICIOUS: Final = "judicious"
CHUNK_END: Final = "chunk-end"
"""States where SGLang itself would leave them."""
ADMISSIONS: Final = (JUDICIOUS, CHUNK_END)
"""The values of `--marconi-admission`."""


@dataclass(frozen=True, slots=True)
class PolicyChoice:
    """The operator's choice of policies."""

    eviction: str = "best"
    """One of `catalog.SERVED`."""
    alpha: float = ALPHA
    """Weight of FLOP efficiency against recency, for `marconi`."""
    ttft_budget_s: float | None = None
    """Acceptable time to first token, for policies with a budget."""
    admission: str = JUDICIOUS
    max_ghosts: int = 1_000_000
    max_ghost_tokens: int | None = None
    step_tokens: int = STEP_TOKENS
    """Between two states that a long prefill leaves on its way."""


def costs_of(hf_config: Mapping[str, Any], kv_bytes_per_token: int, state_bytes: int) -> Costs:
    """The memory that a checkpoint takes, from the pools, and the FLOPs that it saves, from the configuration.

    A configuration that the cost model cannot read still has a cache, and the log says what is taken for its FLOPs.
    """
    try:
        flops: PrefixFlops = huggingface.profile(from_mapping(hf_config, "config.json"), "served").prefix_flops
    except ValueError as error:
        logger.warning("marconi: FLOPs are taken to grow with the tokens alone (%s)", error)
        flops = float
    return Costs(kv_bytes_per_token, state_bytes, flops)


@dataclass(frozen=True, slots=True)
class HostTierConfig:
    """The host tier of a server's cache: its memory, its link and its rows."""

    memory: HostMemory
    link: "LinkSpeed"
    """Bandwidth each way."""
    prefill_s: Callable[[int, int], float]
    """Seconds of a prefill, by cached tokens and prompt tokens."""
    rows: Memory
    """Where copies lie."""
    copy_now: Callable[[Node], None]
    """Fills the copy of a node before it returns, or abandons it."""


def hybrid_cache(
    choice: PolicyChoice,
    costs: Costs,
    page_tokens: int,
    ids_per_page: int,
    memory: Memory | None,
    latency: LatencyModel | None = None,
    needs: frozenset[Need] = TWO_POOLS,
    below: HostTierConfig | None = None,
    *,
    explains: bool = True,
) -> HybridCache:
    """A tree of pages of `page_tokens`, with the chosen policies; positions are the pages' ends.

    `needs` are the resources of the device that can run short. `explains` is whether misses have causes.

    Raises `ValueError` if a parameter of the policy is missing.
    """
    policy = served(choice.eviction)
    inputs = PolicyInputs(
        costs=costs,
        needs=needs,
        unit_tokens=page_tokens,
        number=choice.alpha if choice.eviction == "marconi" else math.nan,
        latency=latency,
        ttft_budget_s=choice.ttft_budget_s,
    )
    try:
        rules = policy.rules(inputs)
    except ValueError as error:
        raise ValueError(f"eviction {choice.eviction}: {error}") from None
    tree = RadixTree(page_tokens, choice.max_ghosts, ids_per_page, memory, choice.max_ghost_tokens)
    host = None
    if below is not None:
        times = LoadTimes(costs, below.prefill_s, below.link.load, copy_bytes_per_s=below.link.copy)
        of_host = Order(policy.host_eviction(inputs, rules.eviction, times))
        host = WriteBehind(tree, of_host, below.memory, times, below.rows, below.copy_now)
        host.explains = explains
    return HybridCache(
        tree,
        rules.admission,
        Order(rules.eviction),
        choice.step_tokens,
        turns=rules.eviction.turns,
        host=host,
        explains=explains,
        fills_spare=Need.BYTES not in needs,
    )
