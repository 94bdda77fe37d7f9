"""The ledger of SGLang, written down by `make ledger`: the page of what is changed, and the signatures of what is used.

`make drill SGLANG=VERSION` holds them against another release, and says which of our files use what moved.

    changed    the targets of both `upstream.toml`: of the cache; of the CPU platform and the demo
    used       in the source: imports of SGLang, what is read of them, and attributes of its objects, which are known by
               their annotation or by what they are called (`CALLED`); and what no source shows (`UNSEEN`)

The snapshot gives each name its signature, or says what else it is; the page is these three alone.
"""

import ast
import enum
import inspect
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, NamedTuple

from marconi.engine.plugin import upstream as of_engine
from marconi.engine.plugin.touch import Group, resolve
from marconi.engine.version import VERIFIED_SGLANG
from marconi_cpu import upstream as of_cpu

ROOT: Final = Path(__file__).parents[2]
GROUPS: Final = (*of_engine.GROUPS, *of_cpu.GROUPS, of_cpu.DEMO)
"""What a process takes on."""

PAGE: Final = ROOT / "python/marconi/engine/UPSTREAM.md"
SNAPSHOT: Final = Path(__file__).with_name("upstream_signatures.json")

_SERVER_ARGS: Final = "sglang.srt.server_args.ServerArgs"
"""Its constructor takes every flag of SGLang: the snapshot has the fields that are read, not its signature."""

CALLED: Final = {
    "req": "sglang.srt.managers.schedule_batch.Req",
    "batch": "sglang.srt.managers.schedule_batch.ScheduleBatch",
    "adder": "sglang.srt.managers.schedule_policy.PrefillAdder",
    "forward_batch": "sglang.srt.model_executor.forward_batch_info.ForwardBatch",
    "manager": "sglang.srt.managers.tokenizer_manager.TokenizerManager",
    "tokenizer_manager": "sglang.srt.managers.tokenizer_manager.TokenizerManager",
    "serving": "sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat",
    "server_args": _SERVER_ARGS,
    "req_to_token_pool": "sglang.srt.mem_cache.memory_pool.HybridReqToTokenPool",
}
"""The class of what is called so and is annotated with nothing else."""

UNSEEN: Final = {
    # What a subclass uses of itself.
    "sglang.lang.backend.runtime_endpoint.RuntimeEndpoint": "_assert_success base_url generate_stream",
    "sglang.srt.mem_cache.prefill_budget.PrefillBudget": "page_size tree_cache",
    "sglang.srt.mem_cache.unified_cache.unified_tree_core_interface.UnifiedTreeCoreInterface": (
        "device enable_external_cache_linker enable_hicache enable_storage has_swa_host_pool is_eagle is_write_back "
        "is_host_memory_buffer_only kv_events page_size write_through_threshold"
    ),
    "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache": (
        "_apply_eviction_result _build_sidecar_transfers _component_available_size _evict_device_next_node "
        "_execute_and_commit_kv_backup _finalize_match_result _track_write_through_node "
        "all_mamba_values_flatten all_values_flatten cache_controller components dec_lock_ref disable "
        "enable_mamba_extra_buffer evict evict_for_alloc flush_pending_backups "
        "full_evictable_size full_protected_size host_pool_group inc_host_lock_ref inc_lock_ref insert is_root lock "
        "mamba_evictable_size mamba_protected_size match_prefix ongoing_load_back ongoing_write_through page_size "
        "path_device_indices protected_size req_to_token_pool sanity_check token_to_kv_pool_allocator tree_core unlock "
        "update_eviction_metrics writing_check"
    ),
    "sglang.srt.mem_cache.unified_cache.session_ref_tracker.UnifiedSessionRefTracker": (
        "ensure_session_generation open_radix_session register_session_ref release_radix_session reset"
    ),
    "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller.HybridCacheController": "load",
    "sglang.srt.mem_cache.pool_host.group.HostPoolGroup": "free get_entry get_pool",
    # Pools, and what a request holds of them.
    "sglang.srt.managers.schedule_batch.ReqKvInfo": (
        "cache_inserted_len cache_protected_len holds_kv holds_mamba kv_allocated_len kv_committed_len "
        "mamba_cow_src_index mamba_last_track_idx mamba_last_track_seqlen mamba_needs_clear mamba_next_track_idx "
        "mamba_ping_pong_track_buffer mamba_pool_idx mamba_prev_track_seqlen req_pool_idx"
    ),
    "sglang.srt.mem_cache.allocator.base.BaseTokenToKVPoolAllocator": (
        "available_size device free_group_begin free_group_end free_segment get_all_free_pages get_kvcache page_size "
        "size verify_byte_accounting"
    ),
    "sglang.srt.mem_cache.allocator.mamba.MambaSlotAllocator": (
        "alloc alloc_group_begin alloc_group_end available_size free schedulable_available_size size"
    ),
    "sglang.srt.mem_cache.allocator.unified_mamba.UnifiedMambaTokenToKVPoolAllocator": "flush_deferred_full_frees",
    "sglang.srt.mem_cache.allocator.unified_sub_pool.MultiEndedAllocator": (
        "allocated_count entry_bytes entry_bytes_per_page min_slot_index num_pages"
    ),
    "sglang.srt.mem_cache.memory_pool.HybridLinearKVPool": "full_kv_pool get_kv_size_bytes set_kv_buffer",
    "sglang.srt.mem_cache.memory_pool.HybridReqToTokenPool": (
        "available_size free_mamba_cache get_speculative_mamba2_params_all_layers ngram_pool short_conv_pool"
    ),
    "sglang.srt.mem_cache.memory_pool.MambaPool": "copy_from mamba_cache",
    "sglang.srt.mem_cache.memory_pool.MambaPool.SpeculativeState": "intermediate_conv_window intermediate_ssm",
    "sglang.srt.mem_cache.memory_pool.MambaPool.State": "conv temporal",
    "sglang.srt.mem_cache.unified_cache.components.mamba.MambaComponent": (
        "_select_finished_checkpoint mamba_checkpoint_grid"
    ),
    "sglang.srt.mem_cache.unified_memory_pool.UnifiedMambaSlotAllocator": "_alloc_iter",
    # Called on what is made in the same expression.
    "sglang.srt.entrypoints.anthropic.serving.AnthropicServing": "_convert_to_chat_completion_request",
    # What hooks are given.
    "sglang.srt.configs.model_config.ModelConfig": "attention_arch context_len hf_config is_multimodal vocab_size",
    "sglang.srt.entrypoints.openai.protocol.ChatCompletionRequest": (
        "_format_add_generation_prompt chat_template_kwargs continue_final_message messages reasoning_effort "
        "response_format tool_choice tools"
    ),
    "sglang.srt.layers.attention.hybrid_linear_attn_backend.HybridLinearAttnBackend": (
        "_is_full_attn linear_attn_backend use_captured_forward_metadata_for_breakable_cuda_graph"
    ),
    "sglang.srt.layers.attention.hybrid_linear_attn_backend.MambaAttnBackendBase": (
        "forward_metadata init_forward_metadata req_to_token_pool"
    ),
    "sglang.srt.managers.io_struct.GenerateReqInput": (
        "contains_mm_input input_ids kv_hints logprob_start_len lora_path positional_embed_overrides priority "
        "return_logprob sampling_params session_id session_params text token_indices_to_pool top_logprobs_num"
    ),
    "sglang.srt.managers.kv_hints.KvHintAction": "action_id action_type action_version payload",
    "sglang.srt.managers.kv_hints.KvHintsEnvelope": "actions",
    "sglang.srt.managers.schedule_batch.Req": (
        "_check_token_based_finish eos_token_ids grammar output_ids_through_stop session tokenizer update_finish_state"
    ),
    "sglang.srt.managers.schedule_batch.ScheduleBatch": (
        "enable_overlap grammar_needs_sync mamba_track_indices prepare_for_decode"
    ),
    "sglang.srt.managers.utils.GenerationBatchResult": "accept_lens",
    "sglang.srt.sampling.sampling_params.SamplingParams": (
        "custom_params ignore_eos max_new_tokens stop_regex_strs stop_strs stop_token_ids"
    ),
    "sglang.srt.speculative.draft_utils.DraftBackendFactory": "draft_model_runner speculative_num_steps topk",
    "sglang.srt.server_args.ServerArgs": (
        "_resolution_finished allow_auto_truncate enable_flexkv enable_lmcache enable_unified_cache_external_linker "
        "model_path served_model_name"
    ),
    "sglang.srt.session.session_controller.Session": "req_nodes streaming",
    "sglang.srt.session.session_controller.SessionReqNode": "abort children req",
    # What the rig does in the place of SGLang's own.
    "sglang.srt.managers.scheduler.Scheduler": (
        "_get_new_batch_prefill_raw abort_request chunked_req enable_overlap flush_cache get_next_batch_to_run "
        "load_inquirer process_pending_chunked_abort result_queue running_batch "
        "update_running_batch waiting_queue"
    ),
    "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor": (
        "_handle_finish_state_updated_req _mamba_prefix_cache_update"
    ),
    "sglang.srt.managers.scheduler_components.load_inquirer.SchedulerLoadInquirer": (
        "get_num_waiting_uncached_tokens max_running_requests"
    ),
    "sglang.srt.managers.scheduler_components.invariant_checker.SchedulerInvariantChecker": "self_check_during_busy",
    "sglang.srt.mem_cache.allocation": "ensure_mamba_capacity",
    # What the CPU platform mends, and the program that `make bench BENCH=serving` runs.
    "sglang.benchmark": "serving",
    "sglang.srt.models.qwen3_next": "Qwen3GatedDeltaNet",
}
"""By owner: what of SGLang is used, or done in its place, where no source shows whose it is."""


def users() -> dict[str, set[str]]:
    """Every name of SGLang's that is used or changed, with our files that do."""
    found: dict[str, set[str]] = {}
    for owner, names in UNSEEN.items():
        for name in names.split():
            found.setdefault(f"{owner}.{name}", set()).add(_place(Path(__file__)))
    for group in GROUPS:
        for touch in group.touches:
            file = inspect.getsourcefile(touch.function) if touch.hook else None
            found.setdefault(touch.target, set()).add(group.title if file is None else _place(Path(file)))
    ours = ((f"python/{name}", CALLED) for name in ("marconi/engine", "marconi/check", "marconi_cpu"))
    for folder, called in (*ours, ("test/rig", CALLED), ("benchmark", {})):
        for path in (ROOT / folder).rglob("*.py"):
            for name in names_in(path.read_text(encoding="utf-8"), called):
                found.setdefault(name, set()).add(_place(path))
    return found


def _place(path: Path) -> str:
    return str(path.relative_to(ROOT))


def names_in(source: str, called: Mapping[str, str] = CALLED) -> set[str]:
    """The names of SGLang's that `source` uses; what only type checkers import tells what an annotation means."""
    uses = _Uses(called)
    uses.visit(ast.parse(source))
    return uses.found


class _Uses(ast.NodeVisitor):
    """Collects the names of SGLang's that one file uses."""

    def __init__(self, called: Mapping[str, str]) -> None:
        self.found: set[str] = set()
        self._paths: dict[str, str] = {}
        """What imported names stand for."""
        self._classes: dict[str, str | None] = dict(called)
        """Of objects, by what they are called here."""
        self._is_typing = False

    def visit_If(self, node: ast.If) -> None:
        self._is_typing = ast.unparse(node.test) == "TYPE_CHECKING"
        self.generic_visit(node)
        self._is_typing = False

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            top = alias.name.partition(".")[0]
            if top == "sglang":
                self._paths[alias.asname or top] = alias.name if alias.asname else top

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            if (node.module or "").partition(".")[0] == "sglang":
                path = self._paths[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                if not self._is_typing:
                    self.found.add(path)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        outer = self._classes
        for each in ast.walk(node.args):
            if isinstance(each, ast.arg) and each.annotation is not None:
                # An annotation may be quoted.
                annotation = ast.unparse(each.annotation).strip("'")
                if annotation != "Any":
                    self._classes = {**self._classes, each.arg: self._path(ast.parse(annotation, mode="eval").body)}
        self.generic_visit(node)
        self._classes = outer

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self.visit_FunctionDef(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        owner = node.value
        called = owner.id if isinstance(owner, ast.Name) else owner.attr if isinstance(owner, ast.Attribute) else ""
        if (path := self._path(node)) is not None:
            self.found.add(path)
        elif owner_class := self._classes.get(called):
            self.found.add(f"{owner_class}.{node.attr}")
            self.generic_visit(node)
        else:
            self.generic_visit(node)

    def _path(self, node: ast.AST) -> str | None:
        """What a name or a chain of attributes stands for, where it begins at SGLang."""
        if isinstance(node, ast.Attribute):
            owner = self._path(node.value)
            return owner and f"{owner}.{node.attr}"
        return self._paths.get(node.id) if isinstance(node, ast.Name) else None


def describe(name: str) -> str:
    """The signature of `name`, or what else it is; raises ImportError or AttributeError where it is gone."""
    try:
        found = resolve(name)
    except AttributeError:
        owner, _, attribute = name.rpartition(".")
        if attribute not in _fields(resolve(owner)):
            raise
        return "attribute"
    if inspect.ismodule(found):
        return "module"
    if inspect.isclass(found) and (issubclass(found, enum.Enum) or name == _SERVER_ARGS):
        return "class"
    if hasattr(found, "__struct_fields__"):
        return f"({', '.join(found.__struct_fields__)})"
    is_called = inspect.isclass(found) or inspect.isroutine(found)
    is_upstreams = str(getattr(found, "__module__", "")).startswith("sglang.")
    return signature_of(name) if is_called and is_upstreams else "attribute"


@cache
def _fields(owner: Any) -> set[str]:
    """Attributes that objects of a class have beside those of the class."""
    if not inspect.isclass(owner):
        return set()
    fields = set(inspect.signature(owner).parameters)
    for base in owner.__mro__:
        if base.__module__.startswith("sglang."):
            fields.update(getattr(base, "__annotations__", ()))
            fields.update(re.findall(r"\bself\.(\w+)\s*(?::[^=\n]+)?=[^=]", inspect.getsource(base)))
    return fields


def signature_of(target: str) -> str:
    """Names, kinds and defaults of the parameters of the callable `target`, looking through our hooks.

    Without annotations, whose text differs between versions of Python.
    """
    signature = inspect.signature(resolve(target))
    bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))


def snapshot() -> dict[str, str]:
    """The description of each of `users` in the installed SGLang."""
    return {name: describe(name) for name in sorted(users())}


class Moved(NamedTuple):
    """A name that is not what it was."""

    name: str
    was: str
    found: str
    """Its description in the installed SGLang, or `gone`."""

    def __str__(self) -> str:
        return f"{self.name} is {self.found}, was {self.was}"


def moved(verified: Mapping[str, str]) -> Iterator[Moved]:
    """The names of a snapshot that are gone from the installed SGLang, or are something else there."""
    for name, was in verified.items():
        try:
            found = describe(name)
        except (ImportError, AttributeError):
            found = "gone"
        if found != was:
            yield Moved(name, was, found)


def by_file(found: Iterable[Moved], by: Mapping[str, set[str]]) -> Iterator[str]:
    """Lines of a drill: each of our files, and below it the names that it uses and that moved."""
    of_file: dict[str, list[Moved]] = {}
    for each in found:
        for file in sorted(by.get(each.name, {"(nothing of ours any more)"})):
            of_file.setdefault(file, []).append(each)
    for file, names in sorted(of_file.items()):
        yield file
        for name, was, now in names:
            yield f"    {name.removeprefix('sglang.')}"
            yield f"        was  {was}"
            yield f"        is   {now}"


def drill() -> int:
    """Print what moved since the verified SGLang; returns how many names did."""
    verified = json.loads(SNAPSHOT.read_text(encoding="utf-8"))
    found, by = list(moved(verified)), users()
    print("\n".join(by_file(found, by)))
    num_files = len({file for each in found for file in by.get(each.name, ())})
    print(f"SGLang {version('sglang')}: {len(found)} of {len(verified)} names moved, in {num_files} places of ours")
    return len(found)


def page() -> str:
    """`UPSTREAM.md`: what is changed."""
    head = (
        "# Every change of SGLang\n\n"
        f"Verified on SGLang {', '.join(VERIFIED_SGLANG)}. Written by `make ledger` from "
        "`marconi/engine/plugin/upstream.toml` and `marconi_cpu/upstream.toml`; the contract test fails when a target "
        "is missing, when its signature moved, or when this page is behind. Targets are below `sglang`.\n"
    )
    return head + "".join(map(_section, GROUPS))


def _section(group: Group) -> str:
    rows = [
        f"| `{touch.target.removeprefix('sglang.')}` | {touch.kind} | {touch.why} | {touch.until or group.until} |"
        for touch in group.touches
    ]
    header = ("| target | how | why | what would let it go |", "|---|---|---|---|")
    return "\n".join(["", f"## {group.title}", "", group.where, "", *header, *rows, ""])


if __name__ == "__main__":
    if sys.argv[1:] == ["drill"]:
        sys.exit(bool(drill()))
    PAGE.write_text(page(), encoding="utf-8")
    SNAPSHOT.write_text(json.dumps(snapshot(), indent=1) + "\n", encoding="utf-8")
