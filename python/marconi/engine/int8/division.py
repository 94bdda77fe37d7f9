"""Memory for states, divided between requests and checkpoints in int8.

    bytes          (N + 1) S, what SGLang would give N slots of full precision; one slot of a pool is padding
    live slots     A = R (held + 1) + 4, of S bytes each: what R running requests hold, and for each of them, and four
                   more, a slot in which a prefill leaves a state until it is rounded
    checkpoints    C = (N - A) S / s, of s bytes each

SGLang itself adds a pool of 2 N checkpoints to its N slots, in memory that it does not count. Where
`--int8-mamba-ckpt-size` is given, both sizes are the operator's, as in SGLang.

    s = numbers + one scale for each channel of a head, in the state's dtype + convolution windows

so a state in float32 takes about a quarter, and one in bfloat16 about half. R is `--max-running-requests`, or as many
as SGLang would run with N slots. Source: `srt/mem_cache/kv_cache_configurator.py:_handle_max_mamba_cache`.
"""

from dataclasses import dataclass
from typing import Any, Final

from marconi.engine.flags import BACKEND
from marconi.engine.running import RUNNING_SLOTS, tracking_of

NUM_SPARE: Final = 4
"""Slots for states of a prefill, beside one for each running request."""
_PADDING: Final = 1


@dataclass(frozen=True, slots=True)
class Division:
    """Slots of both pools."""

    num_live: int
    num_checkpoints: int


@dataclass(frozen=True, slots=True)
class PerRequest:
    """State slots of one running request."""

    num_counted: int
    """By which SGLang limits how many run, in full precision."""
    num_held: int
    """Those that it holds."""

    @property
    def num_live(self) -> int:
        """Those that it holds, and one for a state that is not rounded yet."""
        return self.num_held + 1


def divide(
    num_slots: int, per_request: PerRequest, max_running: int | None, state_bytes: int, checkpoint_bytes: int
) -> Division:
    """Divide the bytes of `num_slots` slots of full precision, two or more; one at least becomes checkpoints."""
    num_running = max(1, num_slots // per_request.num_counted)
    if max_running is not None:
        num_running = min(num_running, max(1, max_running))
    num_live = max(1, min(num_running * per_request.num_live + NUM_SPARE, num_slots - 1))
    rest_bytes = (num_slots - num_live) * state_bytes
    return Division(num_live, max(1, rest_bytes // checkpoint_bytes - _PADDING))


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
