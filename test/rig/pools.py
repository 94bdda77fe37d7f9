"""A cache as a scheduler builds it, on pools of the host's memory whose entries are as small as they get.

The pools are SGLang's: slots, pages and rows are lent and taken back by its allocators, and bytes play no part. What a
state takes and saves is therefore given by the caller that builds our cache (`Costs`). SGLang keeps its configuration
for the whole process: building a cache replaces that of the one before, which must not be used any more.

Sources: `srt/mem_cache/kv_cache_configurator.py`, `srt/mem_cache/kv_cache_builder.py`, `srt/mem_cache/registry.py`.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest.mock import patch

import torch

from marconi.engine.cache.speculation import EndStateSource
from marconi.engine.host.link import LinkSpeed
from marconi.engine.launch.flags import BACKEND, Explain, Flags
from marconi.engine.launch.policies import PolicyChoice
from marconi.engine.plugin import upstream
from marconi.engine.plugin.touch import hook_into
from marconi.events.tree_log import TreeLog
from marconi.policy.base import Costs
from marconi_cpu import tiny_model
from rig.clock import TraceClock
from rig.joint_pools import KV_BYTES_PER_TOKEN, STATE_BYTES, joint_pools

if TYPE_CHECKING:
    from marconi.engine.cache.radix_cache import MarconiRadixCache
    from marconi.engine.cache.tick import FirstRank

TRACK_INTERVAL_TOKENS = 256
"""SGLang's `--mamba-track-interval`, unless a page is longer."""
LINK = LinkSpeed(25e9, 25e9)
"""Between the device and the host: PCIe 4."""
COSTS = Costs(kv_bytes_per_token=3, state_bytes=200, flops=lambda num_tokens: num_tokens * (num_tokens + 1000.0))
"""States and KV are worth about the same on pools of a few hundred tokens."""
JOINT_COSTS = replace(COSTS, kv_bytes_per_token=KV_BYTES_PER_TOKEN, state_bytes=STATE_BYTES)
"""Where they share one pool, its bytes are real."""


class Strategy(StrEnum):
    """SGLang's `--mamba-radix-cache-strategy`."""

    EXTRA_BUFFER = "extra_buffer"
    NO_BUFFER = "no_buffer"


class Core(StrEnum):
    """What holds the stock cache's tree."""

    PYTHON = "python"
    RUST = "rust"


class Division(StrEnum):
    """How memory is divided between KV and states."""

    TWO_POOLS = "two-pools"
    """`--mamba-full-memory-ratio`."""
    ONE_POOL = "one-pool"
    """`--enable-unified-memory`: the bytes of so many tokens and slots, for whatever takes them."""


@dataclass(frozen=True, slots=True)
class HostPools:
    """How much is lent, and by which flags of a server."""

    num_kv_tokens: int
    num_state_slots: int
    max_context_tokens: int
    """The longest sequence, prompt and answer."""
    page_tokens: int = 1
    """In the tree."""
    strategy: Strategy = Strategy.EXTRA_BUFFER
    chunk_tokens: int = 8192
    """`--chunked-prefill-size`."""
    num_rows: int = 1
    """`--max-running-requests`; a replay has one at a time."""
    track_tokens: int = TRACK_INTERVAL_TOKENS
    """`--mamba-track-interval`, unless a page is longer."""
    memory: Division = Division.TWO_POOLS
    host_ratio: float = 0.0
    """`--hicache-ratio` of a host tier over the device's pools; 0 where there is none."""
    write_policy: str = "write_through"
    """`--hicache-write-policy`, which stock follows."""
    num_checkpoints: int = 0
    """`--int8-mamba-ckpt-size` of a server with `--enable-int8-mamba-checkpoint`; 0 without."""
    closes_sessions: bool = False
    """`--enable-session-radix-cache`."""
    are_tracking_slots_lent: bool = False
    """True if a request of the cache on them holds none."""
    explains: bool = True
    """`--marconi-explain`."""
    dcp_size: int = 1
    """`--dcp-size`, over whose ranks the KV of a page is dealt out: one has every such row of it."""

    def __post_init__(self) -> None:
        """Raise `ValueError` for pools that SGLang could not serve one request from."""
        if self.num_kv_tokens < 1 or self.num_kv_tokens % self.page_tokens:
            raise ValueError(
                f"num_kv_tokens must be a multiple of the page, {self.page_tokens}, got {self.num_kv_tokens}"
            )
        if self.page_tokens % self.dcp_size:
            raise ValueError(f"page_tokens must be a multiple of dcp_size, {self.dcp_size}, got {self.page_tokens}")
        if self.num_rows < 1:
            raise ValueError(f"num_rows must be 1 or more, got {self.num_rows}")
        if self.num_state_slots < self.least_state_slots:
            raise ValueError(
                f"num_state_slots must be at least {self.least_state_slots}"
                f"{f' for {self.num_rows} requests at a time' if self.num_rows > 1 else ''}: a request holds "
                f"{self.num_working_slots}, the state that it starts from is in use, and what it leaves needs one; "
                f"got {self.num_state_slots}"
            )
        if self.host_ratio and self.host_ratio <= 1:
            raise ValueError(f"host_ratio must be 0 or more than 1, got {self.host_ratio:g}")
        if self.strategy is Strategy.NO_BUFFER and self.page_tokens > 1:
            raise ValueError(f"no_buffer with pages of {self.page_tokens} tokens: SGLang wants pages of 1")

    @property
    def costs(self) -> Costs:
        """What KV and states cost on them."""
        return COSTS if self.memory is Division.TWO_POOLS else JOINT_COSTS

    @property
    def num_working_slots(self) -> int:
        """Slots that a request holds throughout: one, and with tracking two more, as overlap scheduling has it."""
        return 3 if self.strategy is Strategy.EXTRA_BUFFER else 1

    @property
    def track_interval_tokens(self) -> int:
        """`--mamba-track-interval`: as given, or the page where that is larger."""
        return max(self.track_tokens, self.page_tokens)

    @property
    def least_state_slots(self) -> int:
        """With fewer, a request could find no slot: each may run, and from a state of its own."""
        num_held = 1 if self.are_tracking_slots_lent else self.num_working_slots
        return self.num_rows * (num_held + 1) + 1


class Pools(NamedTuple):
    """SGLang's pools."""

    requests: Any
    """A `HybridReqToTokenPool`: rows of token indices, and state slots."""
    kv: Any
    """A KV allocator."""


def stock(host: HostPools, core: Core = Core.RUST) -> Any:
    """SGLang's own cache on new pools; raises `ValueError` where the core that is asked for is not there."""
    _publish(host)
    cache = _build(host, core)
    name = type(cache.tree_core).__name__
    if ("Rust" in name) is not (core is Core.RUST):
        raise ValueError(f"core {core}: SGLang gives its {name} here")
    return cache


def marconi(
    host: HostPools, choice: PolicyChoice, costs: Costs, clock: TraceClock, log: TreeLog | None = None
) -> "MarconiRadixCache":
    """Our cache on new pools, its policies by `choice`, with `costs` in place of what the small pools take.

    It reads `clock`, and notes what it holds in `log`.
    """
    from marconi.engine.cache.tick import FirstRank

    return clock.ticks(marconi_rank(host, choice, costs, FirstRank(clock, costs.flops), log))


def marconi_rank(
    host: HostPools, choice: PolicyChoice, costs: Costs, first_rank: "FirstRank | None", log: TreeLog | None = None
) -> "MarconiRadixCache":
    """Our cache as one of several ranks has it, on new pools; it follows the ticks that it is given."""
    _publish(host)
    from marconi.engine.cache.radix_cache import MarconiRadixCache, Surroundings
    from marconi.engine.cache.registration import register_tree_core
    from marconi.engine.host.cache import TieredRadixCache

    register_tree_core()
    hook_into(upstream.TRACKING)
    if host.memory is Division.ONE_POOL:
        hook_into(upstream.ONE_POOL)
    ends = EndStateSource.WORKING if host.page_tokens == 1 else EndStateSource.TRACKED
    made = TieredRadixCache if host.host_ratio else MarconiRadixCache

    def make(params: Any) -> "MarconiRadixCache":
        given = Flags(explanations=Explain.ON if host.explains else Explain.OFF)
        cache = made(params, choice, costs, given, first_rank, Surroundings(log), ends)
        if isinstance(cache, TieredRadixCache):
            # Measured, it would be another in every run.
            cache.link = LINK
        return cache

    return _build(host, BACKEND, make)


def _publish(host: HostPools) -> None:
    """Make the flags of a server on these pools, which want a model, the configuration of this process."""
    from sglang.srt.arg_groups import hicache_hook
    from sglang.srt.runtime_context import SpawnRanks, mamba_cache_chunk_size, process_model_config, publish
    from sglang.srt.server_args import ServerArgs

    # Of the model only the pools matter, and those are of latent attention where a host tier is dealt out (`_pools`).
    is_latent = patch.object(hicache_hook, "use_mla_backend", lambda _: True) if host.dcp_size > 1 else nullcontext()
    with TemporaryDirectory() as folder, is_latent:
        model = Path(folder) / "model"
        tiny_model.write(tiny_model.Family.GDN, model)
        args = ServerArgs(
            model_path=str(model),
            device="cpu",
            dtype="float32",
            attention_backend="torch_native",
            disable_cuda_graph=True,
            page_size=host.page_tokens // host.dcp_size,
            tp_size=host.dcp_size,
            dcp_size=host.dcp_size,
            chunked_prefill_size=host.chunk_tokens,
            max_total_tokens=host.num_kv_tokens // host.dcp_size,
            max_mamba_cache_size=host.num_state_slots,
            max_running_requests=host.num_rows,
            mamba_radix_cache_strategy=str(host.strategy),
            mamba_track_interval=host.track_interval_tokens,
            disable_overlap_schedule=host.strategy is Strategy.NO_BUFFER,
            enable_int8_mamba_checkpoint=host.num_checkpoints > 0,
            int8_mamba_ckpt_size=host.num_checkpoints or None,
            **_host_tier(host),
        )
        publish(args, role="scheduler", ranks=SpawnRanks(world_rank=0, dp_rank=0, gpu_id=0))
        # Both are read from the folder once, and remembered.
        process_model_config()
        mamba_cache_chunk_size()


def _host_tier(host: HostPools) -> dict[str, Any]:
    """The flags of a host tier."""
    if not host.host_ratio:
        return {}
    return {
        "enable_hierarchical_cache": True,
        "hicache_ratio": host.host_ratio,
        "hicache_write_policy": host.write_policy,
        "hicache_io_backend": "direct",
        "hicache_mem_layout": "page_first_direct",
    }


def _build(host: HostPools, core: str, cache_class: "Callable[[Any], MarconiRadixCache] | None" = None) -> Any:
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.registry import TreeCacheBuildContext, create_unified_radix_cache
    from sglang.srt.runtime_context import get_server_args, process_model_config

    from marconi_cpu import host_copies

    if host.host_ratio:
        host_copies.register()
    pools, model_config = _pools(host), process_model_config()
    params = CacheInitParams(
        disable=False,
        req_to_token_pool=pools.requests,
        token_to_kv_pool_allocator=pools.kv,
        page_size=_tree_page(host),
        enable_mamba_extra_buffer=host.strategy is Strategy.EXTRA_BUFFER,
        chunked_prefill_size=host.chunk_tokens,
        tree_core_backend=str(core),
        enable_session_radix_cache=host.closes_sessions,
    )
    context = TreeCacheBuildContext(
        server_args=get_server_args(),
        params=params,
        is_hybrid_swa=False,
        is_hybrid_ssm=True,
        enable_hierarchical_cache=bool(host.host_ratio),
        disable_radix_cache=False,
        tp_worker=SimpleNamespace(register_hicache_layer_transfer_counter=lambda _: None),
        model_config=model_config,
        tp_size=1,
        tp_rank=0,
        tp_group=None,
    )
    cache = create_unified_radix_cache(context, cache_class=cache_class)
    if host.host_ratio and host.memory is Division.ONE_POOL:
        # As SGLang's scheduler does: what is copied stays where it is.
        pools.kv.set_hicache_transfer_done_event = lambda *_: None
        pools.kv.set_host_transfer_move_gate(lambda: not cache.cache_controller.has_inflight_device_transfers())
    return cache


def _tree_page(host: HostPools) -> int:
    """What SGLang makes the page of its tree, in tokens: that of its allocator."""
    return host.page_tokens


def _pools(host: HostPools) -> Pools:
    if host.memory is Division.ONE_POOL:
        bundle = joint_pools(
            num_kv_tokens=host.num_kv_tokens // host.dcp_size,
            num_state_slots=host.num_state_slots,
            page_tokens=host.page_tokens // host.dcp_size,
            max_context_tokens=host.max_context_tokens,
            num_rows=host.num_rows,
            tracks=host.strategy is Strategy.EXTRA_BUFFER,
        )
        return Pools(bundle.req_to_token_pool, bundle.token_to_kv_pool_allocator)
    from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateDType, Mamba2StateShape
    from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
    from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
    from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, HybridReqToTokenPool

    dtype = torch.int8
    shape = Mamba2StateShape.create(
        tp_world_size=1, intermediate_size=1, n_groups=1, num_heads=1, head_dim=1, state_size=1, conv_kernel=2
    )
    requests = HybridReqToTokenPool(
        size=host.num_rows,
        mamba_size=host.num_state_slots,
        mamba_spec_state_size=host.num_rows,
        max_context_len=host.max_context_tokens,
        device="cpu",
        enable_memory_saver=False,
        cache_params=Mamba2CacheParams(
            shape=shape, layers=[0], dtype=Mamba2StateDType(conv=torch.bfloat16, temporal=torch.bfloat16)
        ),
        mamba_layer_ids=[0],
        enable_mamba_extra_buffer=host.strategy is Strategy.EXTRA_BUFFER,
        enable_overlap_schedule=host.strategy is Strategy.EXTRA_BUFFER,
    )
    kv_pool = HybridLinearKVPool(
        size=host.num_kv_tokens // host.dcp_size,
        dtype=dtype,
        page_size=host.page_tokens // host.dcp_size,
        head_num=1,
        head_dim=1,
        full_attention_layer_ids=[1],
        device="cpu",
        mamba_pool=requests.mamba_pool,
        # SGLang deals out copies on the host of latent attention alone.
        **({"use_mla": True, "kv_lora_rank": 1, "qk_rope_head_dim": 1} if host.dcp_size > 1 else {}),
    )
    if host.page_tokens == 1:
        kv = TokenToKVPoolAllocator(host.num_kv_tokens, dtype, "cpu", kv_pool, need_sort=False)
    else:
        kv = PagedTokenToKVPoolAllocator(host.num_kv_tokens, host.page_tokens, dtype, "cpu", kv_pool, need_sort=False)
    return Pools(requests, kv)
