"""The touches of SGLang behind a server's events: who of its schedulers tells them, where, and until when."""

from marconi.engine.touch import Kind, Touch

_UNTIL_CLASS = "a public class to extend"
_UNTIL_RANKS = "a cache being told whether it publishes, and as which rank"

EVENT_TOUCHES = (
    Touch(
        "sglang.srt.disaggregation.kv_events.is_kv_publisher_rank",
        Kind.CALL,
        "(kv_events_config)",
        "of schedulers that share a cache one tells; asked with our endpoint in place of the configuration",
        _UNTIL_RANKS,
    ),
    Touch(
        "sglang.srt.disaggregation.kv_events.select_kv_publisher_dp_rank",
        Kind.CALL,
        "(attn_dp_size, attn_dp_rank, dp_rank)",
        "which of the ports is a scheduler's, as SGLang's own events count them",
        _UNTIL_RANKS,
    ),
    Touch(
        "sglang.srt.runtime_context.num_dp_ranks_of",
        Kind.CALL,
        "(cfg)",
        "how many ports there are",
        _UNTIL_RANKS,
    ),
    Touch(
        "sglang.srt.configs.model_config.ModelConfig",
        Kind.READ,
        None,
        "`context_len`, which a router is told",
        "nothing: it is given to a cache's factory",
    ),
    Touch(
        "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.release_host_resources",
        Kind.OVERRIDE,
        "(self)",
        "a scheduler that ends tells what waits",
        _UNTIL_CLASS,
    ),
)
