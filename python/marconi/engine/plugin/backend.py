"""The factory behind `--radix-cache-backend marconi`.

A model without recurrent layers has nothing that this project adds to, and gets the cache that SGLang itself would
build. A hybrid one gets `MarconiRadixCache` (`cache/radix_cache.py`), on the tree
core of `cache/tree_core.py`.
"""

import logging
import os
import platform
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import sglang.version
import torch
from sglang.srt.arg_groups.overrides import resolved_view
from sglang.srt.environ import envs
from sglang.srt.mem_cache.registry import create_unified_radix_cache, default_radix_cache_factory
from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, check_cuda_graph_backend
from sglang.srt.runtime_context import get_schedule

from marconi import __version__
from marconi.engine.cache.radix_cache import MarconiRadixCache, Surroundings
from marconi.engine.cache.registration import register_tree_core
from marconi.engine.cache.speculation import EndStateSource, drafts_a_chain, max_accepted
from marconi.engine.cache.tick import FirstRank, RequestClock
from marconi.engine.cpu_platform import is_active
from marconi.engine.events.publishing import CachePublisher, ServedModel, publishes
from marconi.engine.events.sglang_events import KvEventRecorder
from marconi.engine.faults import OF_PROCESS, Faults
from marconi.engine.host.cache import TieredRadixCache
from marconi.engine.joint.pools import JointMemory
from marconi.engine.launch import flags, running, split, support
from marconi.engine.launch.agreement import digest_of_logarithms, require_alike
from marconi.engine.launch.flags import BACKEND
from marconi.engine.launch.policies import CHUNK_END, JUDICIOUS, costs_of
from marconi.engine.launch.support import Facts, notes
from marconi.engine.plugin import upstream
from marconi.engine.plugin.touch import hook_into, require_hooked
from marconi.engine.prefill.hooks import why_not
from marconi.engine.prefill.side_states import bytes_beside, has_side_states
from marconi.engine.prefill.verified import are_captured_in_segments
from marconi.engine.prefill.warm_up import warm_up_drafts, warm_up_prefills
from marconi.engine.ranks import dp_rank, is_first_rank
from marconi.engine.store.cache import StoredRadixCache
from marconi.engine.version import Refusal, require_verified
from marconi.events.tree_log import TreeLog
from marconi.policy.base import Costs
from marconi.record import TraceRecorder

if TYPE_CHECKING:
    from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.registry import TreeCacheBuildContext

logger = logging.getLogger(__name__)

_LARGE: Final = 1e30
"""A logit in place of an infinite one; SGLang's, which divides it by a temperature."""


def build(ctx: "TreeCacheBuildContext") -> "BasePrefixCache":
    """The factory behind `--radix-cache-backend marconi`; what is refused is logged in one line and ends the server."""
    try:
        return _build(ctx)
    except Refusal as refusal:
        # SGLang logs a traceback of whatever ends its scheduler.
        logger.error("marconi: error: %s", refusal)
        raise


def _build(ctx: "TreeCacheBuildContext") -> "BasePrefixCache":
    require_verified(sglang.version.__version__, os.environ)
    require_hooked(*upstream.of_every_process(is_active()))
    given, facts = flags.from_environ(os.environ), facts_of(ctx)
    support.require(support.against_cache(ctx.server_args, given, facts))
    OF_PROCESS.set(Faults())
    hook_into(upstream.SCHEDULER)
    if not ctx.is_hybrid_ssm:
        logger.info("marconi: this model has no recurrent layers, its cache is SGLang's own")
        return default_radix_cache_factory(ctx)
    if ctx.disable_radix_cache:
        if ctx.server_args.disaggregation_mode == "decode":
            logger.info("marconi: a decode server keeps no prefixes, its cache is SGLang's own")
        return default_radix_cache_factory(ctx)
    hook_into(*upstream.of_a_cache(is_active()))
    register_tree_core()
    ctx.params.tree_core_backend = BACKEND
    choice = replace(given.policy, admission=facts.admission(given))
    if facts.falls_back(given):
        logger.warning(
            "marconi: this model's prefills cannot keep planned states (%s): --marconi-admission chunk-end",
            facts.why_not_planned,
        )
    if facts.has_one_pool:
        hook_into(upstream.ONE_POOL)
    if has_side_states(ctx.params.req_to_token_pool):
        hook_into(upstream.SIDE_STATES)
    if drafts_a_chain(ctx.server_args.speculative_algorithm):
        hook_into(upstream.CHAINS)
    require_room(ctx.params)
    hf_config = ctx.model_config.hf_config.to_dict()
    costs = pool_costs(ctx.params, hf_config)
    require_hooked(upstream.RUNNING, upstream.INT8)
    arguments, requests = resolved_view(ctx.server_args), ctx.params.req_to_token_pool
    num_requests, num_tracking = requests.size, requests.mamba_initial_tracking_slots
    if choice.admission == CHUNK_END:
        support.require(running.against_rows(num_requests, requests.mamba_allocator.size, num_tracking))
    require_alike(settings_of(ctx.params, costs), ctx.tp_group)
    ends = EndStateSource.of(arguments, ctx.params.page_size, requests.mamba_initial_tracking_slots)
    if choice.admission == JUDICIOUS:
        warm_up_prefills(ctx.tp_worker.model_runner)
        if ends is EndStateSource.LEFT:
            warm_up_drafts(requests, max_accepted(arguments))

    divided = split.memory_note(ctx.server_args)

    def make(params: "CacheInitParams") -> MarconiRadixCache:
        first_rank = None
        if is_first_rank():
            num_slots = get_schedule().max_mamba_cache_size
            at_once = None if facts.has_int8_checkpoints else running.excess_note(num_requests, num_slots, num_tracking)
            for note in (divided, at_once, *notes(ctx.server_args)):
                if note is not None:
                    logger.info("marconi: %s", note)
            clock = RequestClock() if given.time is flags.Time.REQUESTS else time.monotonic
            first_rank = FirstRank(clock, costs.flops)
        ours = TreeLog() if publishes(given) else None
        theirs = TreeLog(also=ours) if params.enable_kv_cache_events else None
        publisher = recorder = None
        if ours is not None:
            publisher = CachePublisher(ours, given, ServedModel.of(ctx), params.kv_event_lora_names)
            hook_into(upstream.LOAD)
        if given.record is not None and first_rank is not None:
            rank = dp_rank()
            path = given.record.with_name(f"{given.record.name}.rank-{rank}") if rank else given.record
            recorder = TraceRecorder(path, first_rank.clock(), "--marconi-record")
        has_own_stream = not (arguments.disable_overlap_schedule or facts.is_on_cpu)
        around = Surroundings(
            log=theirs or ours,
            publisher=publisher,
            kv_events=None if theirs is None else KvEventRecorder(theirs, params),
            recorder=recorder,
            split=divided,
            vocab_size=ctx.model_config.vocab_size,
            forward_stream=ctx.tp_worker.model_runner.forward_stream if has_own_stream else None,
        )
        kind: type[MarconiRadixCache] = MarconiRadixCache
        if facts.has_host_tier:
            kind = StoredRadixCache if arguments.hicache_storage_backend else TieredRadixCache
        return kind(params, choice, costs, given, first_rank, around, ends)

    cache: MarconiRadixCache = create_unified_radix_cache(ctx, cache_class=make)
    if isinstance(cache, StoredRadixCache):
        cache.identify(ctx)
    return cache


def facts_of(ctx: "TreeCacheBuildContext") -> Facts:
    """Facts that a refusal may hang on, from the model and the pools that are there."""
    has_own_cache = ctx.is_hybrid_ssm and not ctx.disable_radix_cache
    return Facts(
        is_hybrid=ctx.is_hybrid_ssm,
        has_sliding_window=ctx.is_hybrid_swa,
        why_not_planned=why_not(ctx.tp_worker.model_runner) if has_own_cache else None,
        is_cache_disabled=ctx.disable_radix_cache,
        has_one_pool=JointMemory.of(ctx.params.token_to_kv_pool_allocator) is not None,
        has_host_tier=ctx.enable_hierarchical_cache,
        has_int8_checkpoints=has_own_cache and ctx.server_args.enable_int8_mamba_checkpoint,
        skips_decode_lock=envs.SGLANG_OPT_MAMBA_SKIP_DECODE_LOCK.get(),
        num_ranks=support.num_attention_ranks(ctx.server_args),
        captures_layers=check_cuda_graph_backend(Phase.PREFILL, Backend.BREAKABLE)
        and are_captured_in_segments(ctx.model_config.hf_config.architectures),
        is_on_cpu=is_active(),
    )


def clean_logits(logits: torch.Tensor, _sampler: Any, _logits: torch.Tensor, sampling_info: Any) -> None:
    """After `Sampler._preprocess_logits`: make NaN and infinite logits finite before SGLang samples from them.

    A bias or a repetition penalty that overflows leaves some, and so does a grammar that allows only the end of the
    answer while `min_new_tokens` forbids it; with top-k, top-p or min-p in the same request, that ends the scheduler. A
    batch without any of these has the model's own logits, and is skipped: all logits would be read twice. Where the
    operator has set `SGLANG_SANITIZE_NAN_LOGITS`, to either value, SGLang has obeyed it already.
    """
    if _may_overflow(sampling_info) and not envs.SGLANG_SANITIZE_NAN_LOGITS.is_set():
        torch.nan_to_num_(logits, nan=-_LARGE, posinf=_LARGE, neginf=-_LARGE)


def _may_overflow(sampling_info: Any) -> bool:
    """True if a request of the batch has had its logits changed: SGLang's own changes are all that a sampler sees."""
    # With overlapped scheduling penalties have been added up, else the orchestrator has them.
    orchestrator = sampling_info.penalizer_orchestrator
    return (
        bool(sampling_info.grammars)
        or sampling_info.has_custom_logit_processor
        or (orchestrator is not None and orchestrator.is_required)
        or any(
            each is not None
            for each in (
                sampling_info.logit_bias,
                sampling_info.acc_additive_penalties,
                sampling_info.acc_scaling_penalties,
            )
        )
    )


def require_room(params: "CacheInitParams") -> None:
    """Raise `Refusal` for pools in which no request leaves or starts from a state."""
    states, kv = params.req_to_token_pool, params.token_to_kv_pool_allocator
    num_slots, num_tracking = states.mamba_allocator.size, states.mamba_initial_tracking_slots
    support.require(support.against_room(num_slots, num_tracking, kv.size, params.page_size))


def settings_of(params: "CacheInitParams", costs: Costs) -> dict[str, str]:
    """Settings that every rank of this server must have alike: our flags, the versions, and what the pools hold."""
    kv, states = params.token_to_kv_pool_allocator, params.req_to_token_pool
    return flags.texts_of(os.environ) | {
        "the version of marconi": __version__,
        "the version of Python": platform.python_version(),
        "the digest of a node's logarithms": digest_of_logarithms(),
        "the number of KV tokens": str(kv.size),
        "the number of state slots": str(states.mamba_allocator.size),
        "the number of checkpoints in int8": str(getattr(checkpoints_of(states), "num_slots", 0)),
        "the bytes of a KV token": str(costs.kv_bytes_per_token),
        "the bytes of a state": str(costs.state_bytes),
    }


def checkpoints_of(states: Any) -> Any:
    """The pool of checkpoints in int8 beside `states`, SGLang's pool of requests; None where there is none."""
    return getattr(states, "mamba_ckpt_pool", None)


def pool_costs(params: "CacheInitParams", hf_config: dict[str, Any]) -> Costs:
    """Costs of a token's KV and of a state in the pools, and what a prefix saves by the model's configuration."""
    kv, states = params.token_to_kv_pool_allocator, params.req_to_token_pool
    joint = JointMemory.of(kv)
    if joint is not None:
        return costs_of(hf_config, joint.kv_bytes_per_token, joint.state_bytes)
    # Slot 0 is padding: the pool holds one more than it lends.
    pools, checkpoints = states.mamba_pool.mamba_cache, checkpoints_of(states)
    if checkpoints is None:
        state_bytes = sum(pool[:, 0].nbytes for pool in (pools.temporal, *pools.conv))
    else:
        state_bytes = checkpoints.mem_usage_bytes() // (checkpoints.num_slots + 1)
    pool = kv.get_kvcache()
    window, windows = params.swa_retain_window, getattr(pool, "swa_kv_pool", None)
    if window is None or windows is None:
        kv_bytes = bytes_per_token(pool, kv.size + params.page_size)
    else:
        kv_bytes = bytes_per_token(pool.full_kv_pool, kv.size_full + params.page_size)
        state_bytes += window * bytes_per_token(windows, kv.size_swa + params.page_size)
    return costs_of(hf_config, max(kv_bytes, 1), max(state_bytes + bytes_beside(states), 1))


def bytes_per_token(pool: Any, num_tokens: int) -> int:
    """Bytes of a token's KV in SGLang's `pool` of `num_tokens`."""
    # Pools with keys and values apart tell two sizes, latent-attention pools one.
    sizes = pool.get_kv_size_bytes()
    return int(sum(sizes) if isinstance(sizes, tuple) else sizes) // num_tokens
