"""Every touch of SGLang that this project makes, in one list.

`UPSTREAM.md` is this list rendered (`python -m marconi.engine.ledger`), the contract test holds each entry against
the installed SGLang, and start-up holds each hook against the running process.
"""

from marconi.engine import startup
from marconi.engine.cache_touches import CORE_TOUCHES
from marconi.engine.cpu import is_active
from marconi.engine.events.touches import EVENT_TOUCHES
from marconi.engine.prefill.touches import KERNEL_TOUCHES, PREFILL_TOUCHES
from marconi.engine.request_touches import CHAT_TOUCHES, GUARD_TOUCHES, SCHEDULER_GUARD_TOUCHES
from marconi.engine.status_touches import STATUS_TOUCHES
from marconi.engine.touch import Kind, Touch
from marconi.engine.version import VERIFIED_SGLANG

_FLAGS_SEAM = "a documented way for a plugin to add flags"
_UNTIL_PUBLIC = "a public class to extend"

PLUGIN_TOUCHES = (
    Touch(
        "sglang.srt.server_args.ServerArgs.add_cli_args",
        Kind.AFTER,
        "(parser)",
        "the --marconi-... flags join SGLang's command line; its parser's error about one of them is one line",
        _FLAGS_SEAM,
        startup.on_add_cli_args,
    ),
    Touch(
        "sglang.srt.server_args.ServerArgs.from_cli_args",
        Kind.AFTER,
        "(args)",
        "flags become environment variables, and what cannot be served is refused in one line",
        _FLAGS_SEAM,
        startup.on_from_cli_args,
    ),
    Touch(
        "sglang.srt.server_args.ServerArgs.resolve_once",
        Kind.AROUND,
        "(self)",
        "an offline Engine's arguments are checked; a command line that cannot be resolved gets one line",
        "a validation seam for plugins that also covers Engine",
        startup.around_resolve_once,
    ),
    Touch(
        "sglang.srt.server_args.ServerArgs",
        Kind.READ,
        None,
        "`radix_cache_backend`, `model_path`, `served_model_name`, `load_format`, `host`, `port`, `node_rank`, "
        "`tokenizer_worker_num`, `kv_events_config`, `allow_auto_truncate`, `disable_radix_cache` and the flags of "
        "other caches as given; "
        "`_resolution_finished`, since a resolved record comes by again in every child",
        _FLAGS_SEAM,
    ),
    Touch(
        "sglang.srt.plugins.hook_registry.HookRegistry.register",
        Kind.CALL,
        "(target, hook, hook_type=<HookType.AFTER: 'after'>, *, source=None)",
        "puts the hooks in",
        "nothing: this is the seam for it",
    ),
    Touch(
        "sglang.srt.plugins.hook_registry.HookType",
        Kind.READ,
        None,
        "as above",
        "as above",
    ),
    Touch(
        "sglang.srt.plugins.hook_registry.HookRegistry.apply_hooks",
        Kind.CALL,
        "()",
        "applies the hook on requests, which is registered after the plugins were loaded",
        "SGLang validating token ids",
    ),
    Touch(
        "sglang.version.__version__",
        Kind.READ,
        "",
        "a release that was not verified is refused",
        "nothing: this is the way to ask",
    ),
    Touch(
        "sglang.srt.mem_cache.registry.register_radix_cache_backend",
        Kind.CALL,
        "(name, factory)",
        "registers the backend `marconi`",
        "nothing: this is the seam for it",
    ),
    Touch(
        "sglang.srt.mem_cache.registry.create_unified_radix_cache",
        Kind.CALL,
        "(ctx, *, cache_class=None)",
        "builds the cache of a hybrid model with our class",
        "nothing: this is the seam for it",
    ),
    Touch(
        "sglang.srt.mem_cache.registry.default_radix_cache_factory",
        Kind.CALL,
        "(ctx)",
        "a model without recurrent layers gets SGLang's own cache",
        "nothing: this is the seam for it",
    ),
    Touch(
        "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache",
        Kind.SUBCLASS,
        "(params)",
        "`MarconiRadixCache` extends it",
        _UNTIL_PUBLIC,
    ),
    Touch(
        "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.checkpoint_into_tree",
        Kind.OVERRIDE,
        "(self, req, *, up_to, **kwargs)",
        "after a prefill the planned states join the tree, after the last token the working state does; counts a "
        "finished request's prompt and cached tokens",
        _UNTIL_PUBLIC,
    ),
    Touch(
        "sglang.srt.managers.schedule_batch.Req.finished",
        Kind.CALL,
        "(self)",
        "a request is counted when it has finished, by its `origin_input_ids` and `cached_tokens`",
        _UNTIL_PUBLIC,
    ),
    Touch(
        "sglang.srt.mem_cache.memory_pool.HybridReqToTokenPool",
        Kind.READ,
        None,
        "the cache's `req_to_token_pool`: `mamba_allocator` and `mamba_pool.mamba_cache` tell slots and their bytes",
        "the pool telling the bytes of a slot",
    ),
    Touch(
        "sglang.srt.mem_cache.memory_pool.HybridLinearKVPool.get_kv_size_bytes",
        Kind.CALL,
        "(self)",
        "bytes of a token, through the cache's `token_to_kv_pool_allocator`; one size or a pair, by kind of attention",
        "the pool telling the bytes of a token",
    ),
    Touch(
        "sglang.srt.mem_cache.memory_pool.MambaPool.State.mem_usage_bytes",
        Kind.CALL,
        "(self)",
        "bytes of a state",
        "the pool telling the bytes of a slot",
    ),
    Touch(
        "sglang.srt.environ.envs.SGLANG_OPT_MAMBA_SKIP_DECODE_LOCK",
        Kind.READ,
        "",
        "refused: it counts on a slot that is still needed",
        "a flag for it",
    ),
    Touch(
        "sglang.srt.environ.envs.SGLANG_ENABLE_TREE_CACHE_SANITY_CHECK",
        Kind.ASSIGN,
        "",
        "--marconi-check-invariants idle turns on the tree's own check",
        "a flag for it",
    ),
    Touch(
        "sglang.srt.managers.scheduler.run_scheduler_process",
        Kind.READ,
        "(server_args, port_args, gpu_id, tp_rank, pp_rank, dp_rank, pipe_writer, display_tp_rank=None, "
        "display_dp_rank=None, display_moe_ep_rank=None)",
        "a logging filter on this module shortens 'Scheduler hit an exception: ...' while the model is loaded",
        "SGLang reporting a load error without a traceback",
    ),
    Touch(
        "sglang.srt.runtime_context.get_memory",
        Kind.CALL,
        "()",
        "the logging filter acts only under our backend",
        "as above",
    ),
)

DEMO_TOUCHES = (
    Touch(
        "sglang.lang.backend.runtime_endpoint.RuntimeEndpoint.generate",
        Kind.OVERRIDE,
        "(self, s, sampling_params)",
        "a generation is streamed, so that its first token can be timed",
        "the frontend telling the time to first token",
    ),
    Touch(
        "sglang.lang.backend.runtime_endpoint.RuntimeEndpoint.generate_stream",
        Kind.CALL,
        "(self, s, sampling_params)",
        "as above",
        "as above",
    ),
    Touch(
        "sglang.lang.backend.runtime_endpoint.RuntimeEndpoint.commit_lazy_operations",
        Kind.OVERRIDE,
        "(self, s)",
        "the prefill of a forked prefix becomes a row of the demo's table",
        "the frontend returning that request's meta-information",
    ),
    Touch(
        "sglang.lang.backend.runtime_endpoint.RuntimeEndpoint._assert_success",
        Kind.CALL,
        "(self, res)",
        "as above",
        "as above",
    ),
    Touch(
        "sglang.srt.plugins.load_plugins",
        Kind.CALL,
        "()",
        "plugins' flags join SGLang's parser, which reads what is meant for the servers before one is started",
        "nothing: this is the seam for it",
    ),
    Touch(
        "sglang.srt.server_args.ServerArgs.add_cli_args",
        Kind.CALL,
        "(parser)",
        "as above",
        "as above",
    ),
    Touch(
        "sglang.srt.configs.model_config.ModelConfig",
        Kind.CALL,
        None,
        "reads a model's configuration for the question below",
        "a public question for it",
    ),
    Touch(
        "sglang.utils.http_request",
        Kind.CALL,
        "(url, json=None, stream=False, api_key=None, verify=None, method=None)",
        "as above",
        "as above",
    ),
    Touch(
        "sglang.srt.mem_cache.kv_cache_builder.uses_ssm_state",
        Kind.CALL,
        "(model_config)",
        "a model without recurrent layers is refused: the demo has nothing to show on it",
        "a public question for it",
    ),
)

BENCHMARK_TOUCHES = (
    Touch(
        "sglang.benchmark.serving",
        Kind.CALL,
        None,
        "`benchmark/serving.py` runs it as a program and reads `completed`, `request_throughput`, the times to first "
        "token and `cache_report` from its output file",
        "nothing: this is the program for it",
    ),
)


def cpu_touches() -> tuple[Touch, ...]:
    """The CPU platform's touches; importing them needs `sgl_kernel_ext`."""
    from marconi.engine.cpu import launchers

    return launchers.TOUCHES


def joint_touches() -> tuple[Touch, ...]:
    """What one pool for KV and states depends on; comes with SGLang's cache, which few processes import."""
    from marconi.engine.joint.touches import JOINT_TOUCHES

    return JOINT_TOUCHES


def server_touches() -> tuple[Touch, ...]:
    """What a server process depends on: the plugin's touches, and the CPU platform's where it was chosen."""
    return PLUGIN_TOUCHES + (cpu_touches() if is_active() else ())


def render() -> str:
    """`UPSTREAM.md`: the ledger as a page."""
    head = (
        "# Every touch of SGLang\n\n"
        f"Verified on SGLang {', '.join(VERIFIED_SGLANG)}. Written by `python -m marconi.engine.ledger`; the contract "
        "test fails when a target is missing, when its signature moved, or when this page is behind.\n"
    )
    sections = (
        ("The plugin", "In every process, whatever the device.", PLUGIN_TOUCHES),
        ("The tree core", "As the plugin's; under our backend and with a hybrid model.", CORE_TOUCHES),
        ("Prefills", "In a scheduler's process, under our backend and with a hybrid model.", PREFILL_TOUCHES),
        ("Kernels", "In a scheduler's process, as above, off the CPU platform.", KERNEL_TOUCHES),
        ("One pool", "In a scheduler's process, as above and with `--enable-unified-memory`.", joint_touches()),
        ("Status", "In a scheduler's process and in that which answers HTTP, as above.", STATUS_TOUCHES),
        ("Events", "In a scheduler's process, as above and with `--marconi-events`.", EVENT_TOUCHES),
        ("Requests", "In the process that answers HTTP, under our backend.", (*GUARD_TOUCHES, *CHAT_TOUCHES)),
        ("Requests in the scheduler", "In a scheduler's process, under our backend.", SCHEDULER_GUARD_TOUCHES),
        ("The demo", "In the process of `marconi demo`, a client of its servers.", DEMO_TOUCHES),
        ("The benchmark", "In the process of `make bench-serving`.", BENCHMARK_TOUCHES),
        ("The CPU platform", "Only with `SGLANG_PLATFORM=marconi_cpu`.", cpu_touches()),
    )
    return head + "".join(_section(*section) for section in sections)


def _section(title: str, scope: str, touches: tuple[Touch, ...]) -> str:
    rows = [
        f"| `{touch.target.removeprefix('sglang.')}` | {touch.kind} | {touch.why} | {touch.until} |"
        for touch in touches
    ]
    header = ("| target | how | why | what would let it go |", "|---|---|---|---|")
    return "\n".join(["", f"## {title}", "", f"{scope} Targets are below `sglang.`", "", *header, *rows, ""])


if __name__ == "__main__":
    print(render(), end="")
