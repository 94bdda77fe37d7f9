"""The touches of SGLang behind a cache's status: what is added to its answers over HTTP, and its metrics."""

from marconi.engine import endpoint, hints, idle
from marconi.engine.touch import Kind, Touch

_UNTIL_CLASS = "a public class to extend"

STATUS_TOUCHES = (
    Touch(
        "sglang.srt.managers.scheduler_components.internal_state.SchedulerInternalStateController.get_internal_state",
        Kind.AFTER,
        "(self, recv_req)",
        "the cache's status joins what SGLang's HTTP process is told; read there: its `scheduler.tree_cache`, and "
        "`internal_state` of the answer",
        "a way for a cache to add to it",
        endpoint.on_get_internal_state,
    ),
    Touch(
        "sglang.srt.entrypoints.http_server",
        Kind.READ,
        None,
        "its `app` gets the route `/marconi`; its `_global_state.tokenizer_manager` asks the schedulers",
        "a documented way to add a route",
    ),
    Touch(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager.get_internal_state",
        Kind.CALL,
        "(self)",
        "as above",
        "as above",
    ),
    Touch(
        "sglang.srt.observability.metrics_collector.radix_cache_metric_labels",
        Kind.CALL,
        "(cache_type, parallel, dp_attention_enabled)",
        "the labels that SGLang's own cache metrics have",
        _UNTIL_CLASS,
    ),
    Touch(
        "sglang.srt.runtime_context.get_parallel",
        Kind.CALL,
        "()",
        "as above; its `dp_rank` tells replicas apart, also by the ports of their events, and `attn_dp_rank`",
        "as above",
    ),
    Touch(
        "sglang.srt.runtime_context.get_observability",
        Kind.CALL,
        "()",
        "as above: the operator's `extra_metric_labels`",
        "as above",
    ),
    Touch(
        "sglang.srt.managers.scheduler_components.metrics_reporter.SchedulerMetricsReporter._maybe_log_idle_metrics",
        Kind.AFTER,
        "(self)",
        "an idle scheduler calls it again and again: our metrics are set, and what the tuner decided is adopted; read "
        "there: its `scheduler.tree_cache`",
        "a method of a cache that an idle scheduler calls",
        idle.after_idle_metrics,
    ),
    Touch(
        "sglang.srt.sampling.sampling_params.SamplingParams",
        Kind.READ,
        None,
        "its `custom_params` and `max_new_tokens`, and the request's `origin_input_ids` and `return_logprob`: where a "
        "request asks for checkpoints",
        "hints for the cache as a field of a request",
    ),
    Touch(
        "sglang.srt.managers.scheduler_components.output_streamer.SchedulerOutputStreamer.get_cached_tokens_details",
        Kind.AFTER,
        "(self, req)",
        "tells how many checkpoints that a request asked for could not be kept; the dictionary is taken apart again in "
        "the process that answers HTTP",
        "a way for a cache to add to a request's answer",
        hints.on_get_cached_tokens_details,
    ),
)
