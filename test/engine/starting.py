"""What a server says of command lines as it starts, up to its weights: SGLang's own way there, and this backend's.

    command line    `prepare_server_args`, with the plugin's hooks
    arguments       `resolve_once` and `check_server_args`, of a folder with the model's configuration
    scheduler       the groups of its ranks, the model's class, how its experts are quantised, and its attention
                    backends by their classes
    heads           as every model asserts while it is built: each rank has as many
    pools           how many requests may run, by SGLang's rule, in pools whose sizes are the flags' or plentiful
    cache           `backend.build`, as far as it decides

Run as a program, it reads a JSON list of command lines, and prints a JSON list with the words in which each is refused,
or null. Where `SGLANG_PLATFORM` names no platform it does so on a card that is not there (`fake_cuda.py`). Stand-ins
are the card, the pools, what an attention backend allocates, and the model with its weights.
"""

import contextlib
import io
import json
import logging
import os
import sys
import traceback
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, Final
from unittest.mock import patch

from .fake_cuda import Card, Owners

PLENTY: Final = 10_000
"""State slots, and KV tokens of each, where no flag says how many there are."""
CARD_MIB: Final = 80 * 1024
_HYBRID = "sglang.srt.layers.attention.hybrid_linear_attn_backend"
_LINEAR = "sglang.srt.layers.attention.linear"
_BACKENDS: Final = (
    f"{_HYBRID}.Mamba2AttnBackend",
    f"{_LINEAR}.gdn_backend.GDNAttnBackend",
    f"{_LINEAR}.kda_backend.KDAAttnBackend",
    f"{_LINEAR}.lightning_backend.LightningAttentionBackend",
    f"{_LINEAR}.short_conv_backend.ShortConvAttnBackend",
)


def main() -> None:
    """Print what is said of each command line."""
    is_on_card = "SGLANG_PLATFORM" not in os.environ
    if is_on_card:
        Card(Owners({})).put_in()
    from sglang.srt.plugins import load_plugins

    load_plugins()
    logging.disable(logging.CRITICAL)
    with stand_ins(is_on_card):
        said = [said_of(argv) for argv in json.load(sys.stdin)]
    json.dump(said, sys.stdout)


def said_of(argv: list[str]) -> str | None:
    """The words in which `argv` is refused; None if it is served as far as its weights."""
    from sglang.srt.runtime_context import reset_context

    environ = dict(os.environ)
    written = io.StringIO()
    try:
        with contextlib.redirect_stderr(written), contextlib.redirect_stdout(io.StringIO()):
            start(argv)
    except SystemExit:
        return written.getvalue().strip().splitlines()[-1]
    except Exception as error:
        return f"{type(error).__name__}: {error if error.args else traceback.extract_tb(error.__traceback__)[-1].line}"
    finally:
        reset_context()
        os.environ.clear()
        os.environ.update(environ)
    return None


def start(argv: list[str]) -> Any:
    """What the launching process does, and then a scheduler; returns what it built its cache from."""
    from sglang.srt.arg_groups.model_override_base import model_config_of
    from sglang.srt.model_executor.model_runner_components.moe_ep_setup import check_quantized_moe_compatibility
    from sglang.srt.model_loader.utils import get_model_architecture
    from sglang.srt.runtime_context import SpawnRanks, get_parallel, publish
    from sglang.srt.server_args import prepare_server_args

    from marconi.engine.plugin import backend

    record = prepare_server_args(argv)
    record.resolve_once()
    record.check_server_args()
    publish(record, role="scheduler", ranks=SpawnRanks(world_rank=0, dp_rank=0, gpu_id=0))
    config = model_config_of(record)
    get_model_architecture(config)
    parallel = get_parallel()
    check_quantized_moe_compatibility(
        model_config=config,
        tp_size=parallel.tp_size,
        moe_ep_size=parallel.moe_ep_size,
        moe_dp_size=parallel.moe_dp_size,
    )
    require_shared(config.num_attention_heads, parallel.attn_tp_size, may_be_copied=False)
    require_shared(config.get_total_num_kv_heads(), parallel.attn_tp_size, may_be_copied=True)
    context = context_of(record, config)
    backend.build(context)
    return context


def require_shared(num_heads: int, num_ranks: int, *, may_be_copied: bool) -> None:
    """`ValueError` for heads of which the ranks cannot have as many each."""
    if num_heads % num_ranks and not (may_be_copied and num_ranks % num_heads == 0):
        raise ValueError(f"{num_heads} heads over {num_ranks} ranks")


def context_of(record: Any, config: Any) -> Any:
    """What a scheduler builds its cache from; its pools are as large as they are asked to be, or plentiful."""
    from sglang.srt.arg_groups.overrides import resolved_view
    from sglang.srt.configs.hybrid_arch import mambaish_config
    from sglang.srt.configs.model_config import AttentionArch
    from sglang.srt.layers.attention.attention_registry import attn_backend_wrapper
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.mem_cache.allocation_sizing import get_mamba_tracking_slots
    from sglang.srt.mem_cache.kv_cache_builder import uses_ssm_state
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
    from sglang.srt.mem_cache.registry import TreeCacheBuildContext
    from sglang.srt.runtime_context import get_context, get_exec, get_memory, get_parallel, get_schedule

    from marconi.engine.plugin import upstream
    from marconi.engine.plugin.touch import hook_into

    view, states = resolved_view(record), mambaish_config(config)
    page_tokens, num_dp = view.page_size, get_parallel().attn_dp_size
    num_slots = PLENTY if view.max_mamba_cache_size is None else view.max_mamba_cache_size // num_dp
    num_tokens = (PLENTY * page_tokens if view.max_total_tokens is None else view.max_total_tokens) // page_tokens
    get_context().override("pools", max_mamba_cache_size=num_slots)
    hook_into(upstream.RUNNING)
    sizes = SimpleNamespace(
        server_args=record,
        page_size=page_tokens,
        model_config=config,
        attn_dp_size=num_dp,
        mambaish_config=states,
        _calculate_mamba_ratio=lambda: KVCacheConfigurator._calculate_mamba_ratio(sizes),
    )
    num_requests = KVCacheConfigurator.resolve_max_num_reqs(sizes, num_tokens * page_tokens)
    temporal = None
    if states is not None:
        # As many bytes as a rank's share of a state has: its heads are shared.
        _ = states.mamba2_cache_params.mamba_cache_per_req
        temporal = SimpleNamespace(dtype=states.mamba2_cache_params.dtype.temporal)
    pool = SimpleNamespace(
        size=num_requests,
        mamba_allocator=SimpleNamespace(size=num_slots),
        mamba_initial_tracking_slots=get_mamba_tracking_slots(
            extra_buffer=get_exec().mamba.enable_mamba_extra_buffer,
            overlap=not get_schedule().disable_overlap_schedule,
            lazy=get_exec().mamba.enable_mamba_extra_buffer_lazy,
        ),
        short_conv_pool=SimpleNamespace(enabled=False),
        ngram_pool=SimpleNamespace(enabled=False),
        mamba_pool=SimpleNamespace(mamba_cache=SimpleNamespace(temporal=temporal)),
    )
    runner = SimpleNamespace(
        model_config=config,
        req_to_token_pool=pool,
        use_mla_backend=config.attention_arch == AttentionArch.MLA,
        is_draft_worker=False,
        prefill_attention_backend_str=view.prefill_attention_backend or view.attention_backend,
        decode_attention_backend_str=view.decode_attention_backend or view.attention_backend,
    )
    attention = type("Attention", (AttentionBackend,), {})
    full = object.__new__(attention)
    full.token_to_kv_pool = full.req_to_token_pool = full.kv_index_translator = None
    runner.attn_backend = attn_backend_wrapper(runner, full)
    allocator = SimpleNamespace(size=num_tokens * page_tokens, is_joint=get_memory().enable_unified_memory)
    return TreeCacheBuildContext(
        server_args=record,
        params=SimpleNamespace(req_to_token_pool=pool, token_to_kv_pool_allocator=allocator, page_size=page_tokens),
        is_hybrid_swa=config.is_hybrid_swa and not record.disable_hybrid_swa_memory,
        is_hybrid_ssm=uses_ssm_state(config),
        enable_hierarchical_cache=get_memory().enable_hierarchical_cache,
        disable_radix_cache=get_memory().disable_radix_cache,
        tp_worker=SimpleNamespace(model_runner=runner),
        model_config=config,
        tp_size=view.tp_size,
        tp_rank=0,
        tp_group=None,
    )


@contextlib.contextmanager
def stand_ins(is_on_card: bool) -> Iterator[None]:
    """What a cache and its backends are made of, once it is decided that there are some."""
    from sglang.srt.arg_groups import memory_hook
    from sglang.srt.layers.attention.linear import kda_backend

    from marconi.engine.plugin import backend

    def make(linear: Any, runner: Any) -> None:
        linear.needs_cpu_seq_lens, linear.accept_lens_pool = False, None
        linear.prefill_graph_max_seqs = 1
        kernel = kda_backend.TritonKDAKernel if runner.linear_attn_backends.prefill.is_triton() else object
        linear.kernel_dispatcher = SimpleNamespace(extend_kernel=object.__new__(kernel))

    with contextlib.ExitStack() as stack:

        def replace(target: Any, name: str, stand_in: Any) -> None:
            stack.enter_context(patch.object(target, name, stand_in))

        for path in _BACKENDS:
            stack.enter_context(patch(f"{path}.__init__", make))
        for name in ("hook_into", "require_hooked", "register_tree_core", "require_alike"):
            replace(backend, name, lambda *_: None)
        for name in ("warm_up_drafts", "warm_up_prefills"):
            replace(backend, name, lambda *_: None)
        for name in ("pool_costs", "settings_of", "create_unified_radix_cache", "default_radix_cache_factory"):
            replace(backend, name, lambda *_, **__: None)
        replace(backend.JointMemory, "of", classmethod(lambda _, allocator: True if allocator.is_joint else None))
        if is_on_card:
            replace(memory_hook, "get_device_memory_capacity", lambda *_: CARD_MIB)
        yield


if __name__ == "__main__":
    main()
