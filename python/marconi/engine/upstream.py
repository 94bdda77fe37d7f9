"""Every change that the cache makes to SGLang's behaviour: hooks, replacements, overrides, assignments, subclasses.

A group is what a process takes on at one place: `touch.hook_into(GROUP)` puts its hooks in and holds that they took
effect; the other kinds stand in the code that they name. `UPSTREAM.md` (`make ledger`) shows this list, that of the CPU
platform and that of the demo. What is merely called or read is found in the source, and its signatures stand in
`test/engine/upstream_signatures.json`; the contract test holds both against the installed SGLang.
"""

from typing import Final

from marconi.engine import cpu_platform
from marconi.engine.touch import Group, Kind, Touch, resolve

_SEAM: Final = "nothing: this is the seam for it"
_CLASS: Final = "a public class to extend"
_HINTS: Final = "hints for the cache as a field of a request"
_SETTLED: Final = "the pool counting what is lent, not which forward passes have ended"
_HOST: Final = "a tree core that says what is copied and what is loaded"

_ENVS: Final = "sglang.srt.environ.envs."
_MANAGERS: Final = "sglang.srt.managers."
_COMPONENTS: Final = "sglang.srt.managers.scheduler_components."
_UPDATER: Final = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_CACHE: Final = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache"
_SUB_POOL: Final = "sglang.srt.mem_cache.allocator.unified_sub_pool.MultiEndedAllocator"
_TREE_CORE: Final = "sglang.srt.mem_cache.unified_cache.unified_tree_core_interface.UnifiedTreeCoreInterface"
_CONFIGURATOR: Final = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator."
_BUDGET: Final = "sglang.srt.mem_cache.prefill_budget.PrefillBudget"
_LINEAR: Final = "sglang.srt.layers.attention.hybrid_linear_attn_backend."
_OPS: Final = "sglang.kernels.ops."

PLUGIN = Group(
    "The plugin",
    "In every process.",
    "a documented way for a plugin to add flags and to check arguments, those of an `Engine` included",
    (
        Touch(
            Kind.AFTER,
            "sglang.srt.server_args.ServerArgs.add_cli_args",
            "the `--marconi-...` flags join SGLang's command line",
            "startup.on_add_cli_args",
        ),
        Touch(
            Kind.AFTER,
            "sglang.srt.server_args.ServerArgs.from_cli_args",
            "flags become environment variables, and what cannot be served is refused in one line",
            "startup.on_from_cli_args",
        ),
        Touch(
            Kind.BEFORE,
            "sglang.srt.server_args.ServerArgs.resolve_once",
            "the arguments of an offline `Engine` are checked as well",
            "startup.before_resolve_once",
        ),
        Touch(
            Kind.AROUND,
            "sglang.srt.arg_groups.mamba_hook.handle_int8_mamba_checkpoint",
            "our backend serves int8 checkpoints, which SGLang refuses under any cache but its own",
            "startup.around_int8_checkpoint",
            "SGLang asking the cache",
        ),
        Touch(
            Kind.ASSIGN,
            "sglang.srt.server_args.ServerArgs.enable_unified_memory",
            "one pool for KV and states where no flag divides memory and one pool is supported, under our backend "
            "(`split.py`)",
            until="a way for a cache to divide memory",
        ),
    ),
)

REQUESTS = Group(
    "Requests",
    "In the process that resolves the arguments of a server or an `Engine`, under our backend.",
    "SGLang validating what it is sent",
    (
        Touch(
            Kind.AFTER,
            _MANAGERS + "tokenizer_manager.TokenizerManager._validate_one_request",
            "a token id outside the vocabulary, an empty prompt and other fields that no scheduler survives get HTTP "
            "400; writes the request's `sampling_params`",
            "request_guard.refuse_unanswerable",
        ),
        Touch(
            Kind.AROUND,
            _MANAGERS + "io_struct.GenerateReqInput.normalize_batch_and_arguments",
            "more answers than the HTTP process can write out while others wait get HTTP 400",
            "request_guard.around_normalize",
        ),
        Touch(
            Kind.AROUND,
            _MANAGERS + "tokenizer_manager.TokenizerManager._wait_one_response",
            "an answer's `meta_info` says what became of the checkpoints and the `kv_hints` of its request and, if it "
            "asks, why it missed",
            "hints.around_wait_one_response",
            _HINTS,
            fails_open=True,
        ),
        *(
            Touch(
                Kind.REPLACE,
                _MANAGERS + f"tokenizer_control_mixin.TokenizerControlMixin.{name}",
                "what the scheduler refuses gets HTTP 400: SGLang drops its answer",
                f"memory_guard.{name}",
            )
            for name in ("release_memory_occupation", "resume_memory_occupation")
        ),
    ),
)

TEXT = Group(
    "Texts",
    "In the same process, with `--marconi-explain text`.",
    _HINTS,
    (
        Touch(
            Kind.BEFORE,
            _MANAGERS + "tokenizer_manager.TokenizerManager._handle_batch_output",
            "tokens on both sides of a divergence reach their client, and nothing that SGLang logs, dumps or exports",
            "diverged.before_handle_batch_output",
        ),
    ),
)

HTTP = Group(
    "HTTP",
    "In the process that answers HTTP, under our backend; an `Engine` has none.",
    _HINTS,
    (
        Touch(
            Kind.AROUND,
            "sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat._convert_to_internal_request",
            "messages with a `cache_control` become positions in the prompt, read from the body as it came: the models "
            "of requests drop the field",
            "chat_template.around_convert",
        ),
        Touch(
            Kind.AFTER,
            "sglang.srt.utils.weight_versions.build_endpoint_weight_version_metadata",
            "`metadata` of an OpenAI answer says the same as its `meta_info`",
            "hints.on_build_metadata",
            fails_open=True,
        ),
        *(
            Touch(
                Kind.AROUND,
                f"sglang.srt.entrypoints.openai.{path}",
                "a stream whose request asks for its explanation has `metadata`, too, in a chunk of its own",
                "streams.around_stream",
                until="`metadata` in chunks",
                fails_open=True,
            )
            for path in (
                "serving_chat.OpenAIServingChat._generate_chat_stream",
                "serving_completions.OpenAIServingCompletion._generate_completion_stream",
            )
        ),
        Touch(
            Kind.ASSIGN,
            "sglang.srt.entrypoints.http_server.app",
            "the routes `/marconi`, `/marconi/requests`, `/marconi/ui` and `/marconi/save` are added (`endpoint.py`)",
            until="a documented way to add a route",
        ),
    ),
)

SCHEDULER = Group(
    "Requests in the scheduler",
    "In a scheduler's process, under our backend.",
    "SGLang surviving them by itself",
    (
        Touch(
            Kind.AROUND,
            "sglang.srt.session.session_controller.Session.create_req",
            "a turn that replaces others ends and forgets them before SGLang clears them, which ends the scheduler",
            "session_guard.around_create_req",
        ),
        Touch(
            Kind.AROUND,
            _UPDATER + ".release_memory_occupation",
            "memory is released by an idle scheduler alone: a busy one would end",
            "memory_guard.around_release",
        ),
        Touch(
            Kind.AROUND,
            _UPDATER + ".resume_memory_occupation",
            "what was not released is not resumed: the scheduler would end; writes the request's `tags`",
            "memory_guard.around_resume",
        ),
        Touch(
            Kind.AFTER,
            "sglang.srt.layers.sampler.Sampler._preprocess_logits",
            "logits that a request's parameters may have made infinite or NaN are numbers again before a token is "
            "sampled; SGLang can do that for every step of every server",
            "backend.clean_logits",
        ),
    ),
    fails_open=True,
)

CACHE = Group(
    "The cache",
    "In a scheduler's process, under our backend and with a hybrid model.",
    _CLASS,
    (
        Touch(
            Kind.SUBCLASS,
            _TREE_CORE,
            "`MarconiTreeCore` implements it; a method that upstream adds makes the class abstract, and its tests fail",
            until=_SEAM,
        ),
        Touch(Kind.SUBCLASS, _CACHE, "`MarconiRadixCache` extends it"),
        Touch(
            Kind.SUBCLASS,
            "sglang.srt.mem_cache.events.KVCacheEventRecorder",
            "`KvEventRecorder` takes the events of KV from the tree's log (`events/sglang_events.py`)",
            until=_SEAM,
        ),
        Touch(Kind.OVERRIDE, "sglang.srt.mem_cache.events.KVCacheEventRecorder.take", "as above", until=_SEAM),
        Touch(
            Kind.ASSIGN,
            _CACHE + ".session_refs",
            "with `--enable-session-radix-cache`, closing a session demotes its states (`sessions.py`)",
            until="a tree core that receives sessions",
        ),
        Touch(Kind.OVERRIDE, _CACHE + ".reset", "the requests that wait start anew as well"),
        Touch(Kind.OVERRIDE, _CACHE + "._match_tree", "what the tree knew of a request is kept for its plan"),
        Touch(Kind.OVERRIDE, _CACHE + ".touch_prefix", "a request that waits is no use of its prefix"),
        Touch(
            Kind.OVERRIDE,
            _CACHE + ".checkpoint_into_tree",
            "after a prefill the planned states join the tree, after the last token the working state does; a finished "
            "request's prompt and cached tokens are counted",
        ),
        Touch(Kind.OVERRIDE, _CACHE + ".on_release", "slots of planned states that a request will not leave are freed"),
        Touch(
            Kind.OVERRIDE,
            _CACHE + ".release_aborted_request",
            "a request that is aborted while it waits is held no longer",
        ),
        Touch(Kind.OVERRIDE, _CACHE + ".sanity_check", "whoever waits is checked as well"),
        Touch(
            Kind.OVERRIDE,
            _CACHE + ".release_host_resources",
            "a scheduler that ends saves its states, and sends the events that wait",
        ),
        Touch(
            Kind.OVERRIDE,
            _CACHE + "._evict",
            "victims without a walk's bookkeeping, their memory freed at once; upstream's own for a joint reclaim",
            until="a walk in the tree core's own hands",
        ),
        Touch(
            Kind.OVERRIDE,
            _CACHE + ".init_hicache",
            "SGLang's host pools are what `TieredRadixCache` keeps copies in (`host/cache.py`)",
            until=_HOST,
        ),
        Touch(
            Kind.OVERRIDE,
            _CACHE + ".attach_storage_backend",
            "a store that is attached while serving is refused, as it is at the start (`host/cache.py`)",
            until=_HOST,
        ),
        Touch(
            Kind.BEFORE,
            _MANAGERS + "scheduler.Scheduler.flush_cache",
            "copies to the host arrive first: a scheduler that is paused never looks, and flushes nothing",
            "memory_guard.before_flush_cache",
            "a flush that waits for copies",
        ),
        Touch(
            Kind.OVERRIDE,
            _CACHE + ".check_hicache_events",
            "between two steps, what is evicted next is copied to the host",
            until=_HOST,
        ),
        Touch(
            Kind.OVERRIDE,
            _CACHE + ".init_load_back",
            "a request that is admitted loads what its match promised, by SGLang's own controller",
            until=_HOST,
        ),
        Touch(
            Kind.OVERRIDE,
            _CACHE + ".ready_to_load_host_cache",
            "a forward pass waits for what a `prefetch` of `kv_hints` has asked for, too",
            until="a load that no batch has asked for",
        ),
        Touch(
            Kind.ASSIGN,
            "sglang.srt.managers.schedule_batch.Req.skip_radix_cache_insert",
            "a health check and a refused request leave nothing (`scheduler.py`)",
            until="both asking for that themselves",
        ),
        Touch(
            Kind.ASSIGN,
            _ENVS + "SGLANG_ENABLE_TREE_CACHE_SANITY_CHECK",
            "`MARCONI_CHECK_INVARIANTS=idle` turns on the tree's own check (`cache.py`)",
            until="a flag for it",
        ),
        Touch(
            Kind.AFTER,
            _COMPONENTS + "internal_state.SchedulerInternalStateController.get_internal_state",
            "the cache's status, or its latest requests, join the internal state that the HTTP process asks for",
            "endpoint.on_get_internal_state",
            "a way for a cache to add to it",
        ),
        Touch(
            Kind.AFTER,
            _COMPONENTS + "metrics_reporter.SchedulerMetricsReporter._maybe_log_idle_metrics",
            "an idle scheduler calls it again and again: our metrics are set",
            "idle.after_idle_metrics",
            "a method of a cache that an idle scheduler calls",
        ),
        Touch(
            Kind.AFTER,
            _COMPONENTS + "output_streamer.SchedulerOutputStreamer.get_cached_tokens_details",
            "carries how many checkpoints that a request asked for could not be kept, what became of its `kv_hints`, "
            "and why it missed; the process that answers HTTP takes it out again",
            "details.on_get_cached_tokens_details",
            "a way for a cache to add to a request's answer",
        ),
    ),
    fails_open=True,
)

TRACKING = Group(
    "Tracking",
    "In a scheduler's process, as above, where no answer's end is taken from what SGLang tracks.",
    "a way to say that nothing is to be tracked",
    (
        Touch(
            Kind.ASSIGN,
            "sglang.srt.mem_cache.memory_pool.HybridReqToTokenPool.mamba_initial_tracking_slots",
            "0 on the server's own pool: a request takes, reserves and frees no tracking slot (`scheduler.py`)",
        ),
        Touch(
            Kind.AFTER,
            "sglang.srt.mem_cache.memory_pool.HybridReqToTokenPool._alloc_ping_pong_buffer",
            "what SGLang tracks of such a request is written to the padding",
            "scheduler.after_alloc_buffer",
        ),
    ),
)

RANKS = Group(
    "Ranks",
    "In a scheduler's process, as above.",
    "a way for a cache to add to what the first rank broadcasts",
    (
        Touch(
            Kind.AFTER,
            _MANAGERS + "scheduler.Scheduler.init_request_receiver",
            "the broadcast of requests carries the cache's ticks; its receiver takes them out again",
            "tick.after_init_request_receiver",
        ),
        Touch(
            Kind.AROUND,
            "sglang.srt.session.session_controller.SessionController.maybe_reap",
            "sessions end on all ranks at once, by the tick's time",
            "tick.around_maybe_reap",
            "sessions that end on all ranks at once",
        ),
        Touch(
            Kind.ASSIGN,
            "sglang.srt.session.session_controller.time",
            "as above: `monotonic` is the tick's (`tick.py`)",
            until="as above",
        ),
    ),
)

QUEUE = Group(
    "The queue",
    "In a scheduler's process, as above.",
    "SGLang asking the cache for the queue's order, and whether a request waits",
    (
        Touch(
            Kind.AFTER,
            _MANAGERS + "schedule_policy.SchedulePolicy.calc_priority",
            "the prompts that wait are known to the cache before one of them is computed",
            "scheduler.on_calc_priority",
        ),
        Touch(
            Kind.AROUND,
            _MANAGERS + "schedule_policy.PrefillAdder.add_one_req",
            "a request whose prefix is being computed waits for its state: it is passed over, and the slot that its "
            "match took is freed",
            "scheduler.around_add_one_req",
        ),
    ),
    fails_open=True,
)

PREFILLS = Group(
    "Prefills",
    "In a scheduler's process, as above.",
    "a way to ask a prefill for states at given positions",
    (
        Touch(
            Kind.AROUND,
            _MANAGERS + "schedule_batch.ScheduleBatch.prepare_for_extend",
            "the states that a prefill is to leave are planned, and their slots taken, before it takes memory",
            "scheduler.around_prepare_for_extend",
        ),
        Touch(
            Kind.BEFORE,
            _MANAGERS + "schedule_batch.ScheduleBatch.prepare_for_decode",
            "a replay that is held against the server takes memory for an answer when the server did",
            "scheduler.before_prepare_for_decode",
        ),
        Touch(
            Kind.AROUND,
            _MANAGERS + "schedule_batch.ScheduleBatch._mamba_radix_cache_v2_req_prepare_for_extend",
            "a prefill tracks no state on SGLang's own grid",
            "scheduler.around_track",
        ),
        Touch(
            Kind.AFTER,
            "sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new",
            "the plan is left with the linear backend for this batch, which is known by its `extend_seq_lens_cpu`",
            "prefill.hooks.on_init_new",
        ),
        Touch(
            Kind.AFTER,
            _LINEAR + "HybridLinearAttnBackend.init_forward_metadata",
            "how a batch keeps its states is chosen with its metadata; the passes of a prefill that is cut get their "
            "own: copies of the `ForwardBatch` with other lengths are given to this method of the linear backend",
            "prefill.hooks.on_init_forward_metadata",
        ),
        Touch(
            Kind.AROUND,
            _LINEAR + "HybridLinearAttnBackend.forward",
            "a recurrent layer runs in passes, or keeps states of what its kernels leave",
            "prefill.hooks.around_hybrid_forward",
        ),
        Touch(
            Kind.AROUND,
            _LINEAR + "Mamba2AttnBackend.forward",
            "as above; models call it by itself",
            "prefill.hooks.around_mamba2_forward",
        ),
    ),
    fails_open=True,
)

DRAFTS = Group(
    "Drafts",
    "In a scheduler's process, as above; without speculative decoding they do nothing.",
    "a way for a cache to ask for the state at a request's end",
    (
        Touch(
            Kind.AFTER,
            "sglang.srt.speculative.eagle_utils.eagle_sample",
            "what the model says after each accepted draft is kept for the next touch",
            "speculation.after_sample",
        ),
        Touch(
            Kind.AROUND,
            "sglang.srt.speculative.spec_utils.commit_mamba_states_after_verify",
            "which drafts a step accepted is kept; with overlapped scheduling it leaves the states of requests that "
            "end in it in their tracking slots, in place of SGLang's: clears the batch's `mamba_track_indices` and the "
            "nodes that were prepared for them, and writes its `mamba_track_buffer_indices`",
            "speculation.around_commit",
        ),
        Touch(
            Kind.BEFORE,
            _MANAGERS + "utils.GenerationBatchResult.copy_to_cpu",
            "where those states stand comes with the tokens",
            "speculation.before_copy_to_cpu",
        ),
        Touch(
            Kind.AROUND,
            _COMPONENTS + "batch_result_processor.SchedulerBatchResultProcessor._mamba_can_cache_finished_req",
            "a request whose last accepted run passes its end is kept as well, and its step is known to the cache",
            "speculation.around_can_cache",
        ),
    ),
    fails_open=True,
)

KERNELS = Group(
    "Kernels",
    "In a scheduler's process, as above, off the CPU platform.",
    "kernels that write states at given tokens themselves",
    (
        Touch(
            Kind.BEFORE,
            "sglang.srt.layers.attention.mamba.causal_conv1d.causal_conv1d_fn",
            "windows of the short convolution inside a prefill, from its inputs; its states come by keyword",
            "prefill.operands.before_convolution",
        ),
        Touch(
            Kind.BEFORE,
            _OPS + "mamba.causal_conv1d_triton.causal_conv1d_fn",
            "as above",
            "prefill.operands.before_convolution",
        ),
        Touch(
            Kind.AROUND,
            _OPS + "attention.fla.chunk_delta_h.chunk_gated_delta_rule_fwd_h",
            "states inside a prefill of the gated delta rule or KDA, from the chunk states and corrected values that "
            "it returns; KDA's is asked for one chunk state a sequence in float32, as where SGLang tracks it",
            "prefill.operands.around_chunk_states",
        ),
        Touch(
            Kind.AFTER,
            _OPS + "attention.fla.chunk_intra.chunk_kda_fwd_intra",
            "KDA's keys, which the former is given scaled to the end of their chunk",
            "prefill.operands.on_kda_intra",
        ),
        Touch(
            Kind.AROUND,
            "sglang.srt.layers.attention.linear.kernels.gdn_flashinfer.FlashInferGDNKernel.extend",
            "FlashInfer is asked for the few states that those inside a prefill are computed from",
            "prefill.operands.around_flashinfer",
        ),
        Touch(
            Kind.AFTER,
            _OPS + "attention.fla.l2norm.gdn_prefill_qkv_prepare_fwd",
            "the keys of unit length that FlashInfer is given",
            "prefill.operands.on_flashinfer_inputs",
        ),
        Touch(
            Kind.AFTER,
            _OPS + "mamba.triton_ops.ssd_chunk_state.chunk_state_varlen",
            "states inside a prefill of Mamba2, from its operands",
            "prefill.operands.on_varlen_states",
        ),
    ),
    fails_open=True,
)

ONE_POOL = Group(
    "One pool",
    "In a scheduler's process, as above and with `--enable-unified-memory`.",
    "its admission counting tracking slots, and evictable states as bytes for KV",
    (
        Touch(
            Kind.OVERRIDE,
            _CACHE + ".evict_for_alloc",
            "victims free bytes, whichever side is short; SGLang asks for KV first",
            until=_CLASS,
        ),
        Touch(Kind.SUBCLASS, _BUDGET, "`JointPrefillBudget` extends it"),
        Touch(Kind.OVERRIDE, _BUDGET + "._available_and_evictable", "all bytes that may be had count"),
        Touch(
            Kind.AROUND,
            "sglang.srt.mem_cache.allocator.base.BaseTokenToKVPoolAllocator.create_prefill_budget",
            "admission uses that budget",
            "joint.admission.around_create_prefill_budget",
        ),
        Touch(
            Kind.AFTER,
            _MANAGERS + "schedule_policy.PrefillAdder.__init__",
            "as above: `rem_mamba_slots`",
            "joint.admission.on_init_adder",
        ),
        Touch(
            Kind.AROUND,
            _MANAGERS + "schedule_policy.PrefillAdder._mamba_gap_budget_for_req",
            "a request's tracking slots count, each as the KV tokens of its bytes",
            "joint.admission.around_gap_budget",
        ),
        Touch(
            Kind.AROUND,
            _SUB_POOL + ".schedulable_available_size",
            "places that a forward pass may still read count as free, so all ranks count alike",
            "joint.admission.around_schedulable_available_size",
            until=_SETTLED,
        ),
        Touch(
            Kind.AROUND,
            _SUB_POOL + ".flush_for_allocation",
            "an allocation that needs such places makes the stream wait for the pass",
            "joint.admission.around_flush_for_allocation",
            until=_SETTLED,
        ),
    ),
)

RUNNING = Group(
    "Requests at once",
    "In every child process of a server under our backend, once it has its arguments.",
    "a way for a cache to say how many slots a request holds",
    (
        Touch(
            Kind.AFTER,
            _CONFIGURATOR + "_calculate_mamba_ratio",
            "slots that no request will hold do not limit how many run: those that track, and with checkpoints in int8 "
            "those that the checkpoints have",
            "sizing.after_calculate_mamba_ratio",
        ),
    ),
    fails_open=True,
)

INT8 = Group(
    "Checkpoints in int8",
    "As above; nothing changes without `--enable-int8-mamba-checkpoint`.",
    "SGLang counting the pool of checkpoints in the memory that it divides",
    (
        Touch(
            Kind.AFTER,
            _CONFIGURATOR + "_handle_max_mamba_cache",
            "the memory for states is divided between live slots and checkpoints: overrides `max_mamba_cache_size` "
            "and `int8_mamba_ckpt_size`, unless the latter is given",
            "int8.division.after_handle_max_mamba_cache",
        ),
    ),
)

LOAD = Group(
    "The load",
    "In a scheduler's process, as above and with `--marconi-events`.",
    "a way for a cache to know what its scheduler runs and what waits",
    (
        Touch(
            Kind.BEFORE,
            _MANAGERS + "scheduler.Scheduler.run_batch",
            "routers know the worker's load as a step begins, a long prefill's from its first moment",
            "events.load.before_run_batch",
        ),
    ),
    fails_open=True,
)

_IN_CACHE: Final = (CACHE, TRACKING, RANKS, QUEUE, PREFILLS, DRAFTS)
GROUPS: Final = (PLUGIN, REQUESTS, TEXT, HTTP, SCHEDULER, *_IN_CACHE, KERNELS, ONE_POOL, RUNNING, INT8, LOAD)


def of_every_process(on_cpu_platform: bool) -> tuple[Group, ...]:
    """The groups in place from the start of a process: the plugin's, and the CPU platform's where it was chosen."""
    return (PLUGIN, *resolve(cpu_platform.GROUPS)) if on_cpu_platform else (PLUGIN,)


def of_a_cache(on_cpu_platform: bool) -> tuple[Group, ...]:
    """The groups that the cache of a hybrid model needs; the CPU platform replaces the launchers above the kernels."""
    return _IN_CACHE if on_cpu_platform else (*_IN_CACHE, KERNELS)
