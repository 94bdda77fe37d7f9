"""Every touch of SGLang that this project makes, in one list.

`UPSTREAM.md` is this list rendered (`python -m marconi.engine.ledger`), the contract test holds each entry against
the installed SGLang, and start-up holds each hook against the running process.
"""

from marconi.engine import request_guard, startup
from marconi.engine.cpu import is_active, launchers
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
        "counts a finished request's prompt and cached tokens",
        _UNTIL_PUBLIC,
    ),
    Touch(
        "sglang.srt.mem_cache.memory_pool.MambaPool.State.mem_usage_bytes",
        Kind.CALL,
        "(self)",
        "bytes of a state, for the start-up line",
        "the pool telling the bytes of a slot",
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

GUARD_TOUCHES = (
    Touch(
        request_guard.TARGET,
        Kind.AFTER,
        "(self, obj, input_ids)",
        "a token id outside the vocabulary gets HTTP 400 instead of ending the scheduler",
        "SGLang validating token ids",
        request_guard.refuse_unknown_tokens,
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

CPU_TOUCHES = launchers.TOUCHES

TOUCHES = PLUGIN_TOUCHES + (CPU_TOUCHES if is_active() else ())
"""The touches of this process: the CPU platform's only where it was chosen."""


def render() -> str:
    """`UPSTREAM.md`: the ledger as a page."""
    head = (
        "# Every touch of SGLang\n\n"
        f"Verified on SGLang {', '.join(VERIFIED_SGLANG)}. Written by `python -m marconi.engine.ledger`; the contract "
        "test fails when a target is missing, when its signature moved, or when this page is behind.\n"
    )
    sections = (
        ("The plugin", "In every process, whatever the device.", PLUGIN_TOUCHES),
        ("Requests", "In the process that answers HTTP, under our backend.", GUARD_TOUCHES),
        ("The demo", "In the process of `marconi demo`, a client of its servers.", DEMO_TOUCHES),
        ("The CPU platform", "Only with `SGLANG_PLATFORM=marconi_cpu`.", CPU_TOUCHES),
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
