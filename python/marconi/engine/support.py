"""What of SGLang does not go with this cache on a hybrid model: refused when the cache is built, each in one line.

docs/status.md says the same (`test/engine/test_support.py` holds them together). A reason says what would break;
what cannot be tested without a device is refused rather than hoped for.
"""

from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

from marconi.engine.policies import CHUNK_END
from marconi.engine.version import Refusal


class Unsupported(NamedTuple):
    """A setting of `ServerArgs` that is refused."""

    field: str
    is_wanted: Callable[[Any], bool]
    """Whether the value asks for what is refused."""
    reason: str

    @property
    def option(self) -> str:
        """The setting on the command line."""
        return "--" + self.field.replace("_", "-")


def _more_than_one(value: Any) -> bool:
    return value is not None and value > 1


_HOST = "it keeps KV or states on the host, and this cache evicts whole victims on the device"
_RANKS = "ranks would choose their victims by clocks of their own"
_KV_EVENTS = "events of KV alone would call prefixes usable that have no state; --marconi-events tells of both"
_SPECULATION = "a speculative step takes the state further than the tokens that are kept"

UNSUPPORTED: Final = (
    Unsupported("enable_hierarchical_cache", bool, _HOST),
    Unsupported("enable_hisparse", bool, _HOST),
    Unsupported("speculative_algorithm", bool, _SPECULATION),
    Unsupported("dllm_algorithm", bool, _SPECULATION),
    Unsupported("tp_size", _more_than_one, _RANKS),
    Unsupported("pp_size", _more_than_one, _RANKS),
    Unsupported("attn_cp_size", _more_than_one, _RANKS),
    Unsupported("dcp_size", _more_than_one, _RANKS),
    Unsupported("enable_mixed_chunk", bool, "a prefill that is cut cannot carry decoding requests"),
    Unsupported("enable_two_batch_overlap", bool, "a prefill that is cut cannot be split in two once more"),
    Unsupported("enable_pdmux", bool, "a prefill that is cut cannot share the device with a decode"),
    Unsupported("enable_int8_mamba_checkpoint", bool, "kept states would not be those that the model left"),
    Unsupported("enable_linear_replayssm", bool, "a request's state then lags behind its tokens"),
    Unsupported("enable_linear_replayssm_spec", bool, "a request's state then lags behind its tokens"),
    Unsupported(
        "mamba_max_states_per_path", lambda cap: cap is not None and cap >= 0, "states go by worth, not by path"
    ),
    Unsupported("enable_session_radix_cache", bool, "it asks for references to nodes that are not counted here"),
    Unsupported("enable_streaming_session", bool, "a session's KV would join the tree without a state"),
    Unsupported("kv_events_config", bool, _KV_EVENTS),
    Unsupported(
        "disaggregation_mode",
        lambda mode: mode not in (None, "null"),
        "prefill and decode on two servers hand over KV without its states",
    ),
    Unsupported(
        "mamba_radix_cache_strategy",
        lambda strategy: strategy == "extra_buffer_lazy",
        "it gives back a state's lock before the KV's",
    ),
)


def refusals(server_args: Any) -> Iterator[str]:
    """A line for every setting that is refused."""
    for each in UNSUPPORTED:
        value = getattr(server_args, each.field, None)
        if each.is_wanted(value):
            shown = each.option if value is True else f"{each.option} {value}"
            yield f"{shown} does not go with --radix-cache-backend marconi on this model: {each.reason}"


def require_whole_locks(skips_decode_lock: bool) -> None:
    """Raise `Refusal` where SGLang gives a state's lock back before decoding (`SGLANG_OPT_MAMBA_SKIP_DECODE_LOCK`)."""
    if skips_decode_lock:
        raise Refusal(
            "SGLANG_OPT_MAMBA_SKIP_DECODE_LOCK=1 does not go with --radix-cache-backend marconi on this model: "
            "it counts on the slot of a state that a decoding request's KV still needs"
        )


def require_planned_states(admission: str) -> None:
    """Raise `Refusal` where SGLang keeps states itself in one pool: it has no slot set aside for them, and may end."""
    if admission == CHUNK_END:
        raise Refusal(
            "--enable-unified-memory goes with --marconi-admission judicious alone, and with models whose prefills can "
            "be cut: where SGLang keeps states itself, it takes slots that nothing has set aside for them"
        )


def require_supported(server_args: Any, *, has_sliding_window: bool) -> None:
    """Raise `Refusal` with the first thing that does not go with a hybrid model under this backend."""
    for line in refusals(server_args):
        raise Refusal(line)
    if has_sliding_window:
        raise Refusal(
            "a model with recurrent layers and sliding windows is not served by --radix-cache-backend marconi: "
            "leave the backend out"
        )
