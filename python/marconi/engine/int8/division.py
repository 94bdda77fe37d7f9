"""The sizes of a server's pools with checkpoints in int8, by SGLang's arguments and parameters (`policy/int8.py`)."""

import logging
from typing import Any

from marconi.engine.launch.flags import BACKEND
from marconi.engine.launch.running import tracking_of
from marconi.policy.int8 import RUNNING_SLOTS, PerRequest, divide

logger = logging.getLogger(__name__)


def is_ours(server_args: Any) -> bool:
    """True if this project divides the memory for states: int8 checkpoints under our backend, of no given number."""
    return (
        server_args.radix_cache_backend == BACKEND
        and server_args.enable_int8_mamba_checkpoint
        and server_args.int8_mamba_ckpt_size is None
    )


def checkpoint_bytes_of(cache_params: Any) -> int:
    """Bytes of a checkpoint of one rank, all layers, by SGLang's parameters of the states."""
    from sglang.srt.mem_cache.mamba_checkpoint_pool import MambaCheckpointPool

    num_heads, head_v_dim, head_k_dim = cache_params.shape.temporal
    estimate = MambaCheckpointPool.estimate_mem_usage_bytes(
        num_layers=len(cache_params.layers),
        num_slots=0,
        num_heads=num_heads,
        head_v_dim=head_v_dim,
        head_k_dim=head_k_dim,
        conv_shapes=list(cache_params.shape.conv),
        conv_dtype=cache_params.dtype.conv,
        temporal_dtype=cache_params.dtype.temporal,
    )
    return int(estimate["total"])


def per_request_of(view: Any, page_tokens: int) -> PerRequest:
    """State slots of a running request, by SGLang's resolved arguments; its cache plans states."""
    num_tracking, are_lent = tracking_of(view, page_tokens)
    return PerRequest(RUNNING_SLOTS + num_tracking, 1 if are_lent else 1 + num_tracking)


# Hooks


def after_handle_max_mamba_cache(rest: float, configurator: Any, _total: float) -> float:
    """After `KVCacheConfigurator._handle_max_mamba_cache`: its slots become live ones and checkpoints."""
    if is_ours(configurator.server_args):
        from sglang.srt.runtime_context import get_context, get_schedule

        schedule, params = get_schedule(), configurator.mambaish_config.mamba2_cache_params
        max_running = schedule.max_running_requests
        if max_running is not None:
            max_running //= configurator.attn_dp_size
        state_bytes, checkpoint_bytes = params.mamba_cache_per_req, checkpoint_bytes_of(params)
        divided = divide(
            schedule.max_mamba_cache_size, _per_request(configurator), max_running, state_bytes, checkpoint_bytes
        )
        if divided.warning is not None:
            logger.warning(divided.warning)
        get_context().override(
            "marconi.int8_checkpoints",
            max_mamba_cache_size=divided.num_live,
            int8_mamba_ckpt_size=divided.num_checkpoints,
        )
    return rest


def num_live_of(configurator: Any) -> int:
    """Live slots that count for a running request, by SGLang's `KVCacheConfigurator`."""
    return _per_request(configurator).num_live


def _per_request(configurator: Any) -> PerRequest:
    from sglang.srt.arg_groups.overrides import resolved_view

    return per_request_of(resolved_view(configurator.server_args), configurator.page_size)
