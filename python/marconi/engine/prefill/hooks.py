"""What is put into SGLang's runner and backends, so that a prefill keeps the states that were planned.

A runner copies the `ForwardBatch` between the scheduler and the layers, so plan and way wait on the linear backend,
known by the one list of lengths that every copy shares. Source: `srt/layers/attention/hybrid_linear_attn_backend.py`.

Owner: the process that runs the model.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from marconi.engine.prefill import passes, spans
from marconi.engine.prefill.checkpoint import Checkpoint, LayerCall, Way
from marconi.engine.prefill.planning import PLAN

_WAY = "marconi_way"
"""On a linear backend: `_Prepared`, or nothing."""
_HYBRID = ("q", "k", "v", "layer", "forward_batch", "save_kv_cache")
"""What `HybridLinearAttnBackend.forward` takes by position."""
_MAMBA2 = ("mixer", "hidden_states", "output", "layer_id", "forward_batch", "mup_vector", "use_triton_causal_conv")
"""What `Mamba2AttnBackend.forward` takes by position."""
VERIFIED_BACKENDS = frozenset({"GDNAttnBackend", "KDAAttnBackend", "LightningAttentionBackend", "Mamba2AttnBackend"})
"""Linear backends whose layers all run through the two forwards that are hooked, with all they know in metadata."""


class _Plan(NamedTuple):
    """The checkpoints of the batch with these lengths, which is the same list in every copy of a `ForwardBatch`."""

    lengths: list[int]
    checkpoints: Sequence[Checkpoint]


class _Prepared(NamedTuple):
    """How the batch with these lengths keeps its states."""

    lengths: list[int]
    way: Way


def on_init_new(forward_batch: Any, _cls: type, batch: Any, model_runner: Any, *_: Any, **__: Any) -> None:
    """After `ForwardBatch.init_new`: what the scheduler planned is left with the backend for this batch."""
    checkpoints = getattr(batch, PLAN, None)
    # The batch goes on to decode with its plan still on it.
    if checkpoints and batch.forward_mode.is_extend():
        plan = _Plan(forward_batch.extend_seq_lens_cpu, checkpoints)
        setattr(model_runner.attn_backend.linear_attn_backend, PLAN, plan)


def on_init_forward_metadata(_result: None, backend: Any, forward_batch: Any) -> None:
    """After `HybridLinearAttnBackend.init_forward_metadata`: choose the way, once for all layers."""
    linear = backend.linear_attn_backend
    plan: _Plan | None = getattr(linear, PLAN, None)
    prepared = None
    if plan is not None and plan.lengths is forward_batch.extend_seq_lens_cpu:
        setattr(linear, PLAN, None)
        family = spans.family_of(linear)
        way: Way = (
            passes.prepare(linear, forward_batch, plan.checkpoints)
            if family is None
            else spans.prepare(family, linear, forward_batch, plan.checkpoints)
        )
        prepared = _Prepared(plan.lengths, way)
    setattr(linear, _WAY, prepared)


def around_hybrid_forward(forward: Callable[..., Any], backend: Any, *args: Any, **kwargs: Any) -> Any:
    """Around `HybridLinearAttnBackend.forward`: a recurrent layer keeps its states, where its batch has any."""
    names = {**dict(zip(_HYBRID, args, strict=False)), **kwargs}
    linear = backend.linear_attn_backend
    way = _way_of(linear, names["forward_batch"])
    if way is None or backend._is_full_attn(names["layer"], names.get("layer_id")):
        return forward(backend, *args, **kwargs)
    return way.run(LayerCall(forward, backend, linear, names["layer"].layer_id, names))


def around_mamba2_forward(forward: Callable[..., Any], backend: Any, *args: Any, **kwargs: Any) -> Any:
    """Around `Mamba2AttnBackend.forward`, which models call by itself."""
    names = {**dict(zip(_MAMBA2, args, strict=False)), **kwargs}
    way = _way_of(backend, names["forward_batch"])
    if way is None:
        return forward(backend, *args, **kwargs)
    return way.run(LayerCall(forward, backend, backend, names["layer_id"], names))


def why_not(model_runner: Any) -> str | None:
    """Why the prefills of this model can keep no planned states; None if they can."""
    hybrid = model_runner.attn_backend
    linear = getattr(hybrid, "linear_attn_backend", None)
    if type(hybrid).__name__ != "HybridLinearAttnBackend" or type(linear).__name__ not in VERIFIED_BACKENDS:
        return f"recurrent layers on {type(linear or hybrid).__name__}"
    if getattr(hybrid, "use_captured_forward_metadata_for_breakable_cuda_graph", False):
        return "a prefill graph that captures the recurrent layers"
    pool = model_runner.req_to_token_pool
    if pool.short_conv_pool.enabled or pool.ngram_pool.enabled:
        return "states beside those of the recurrent layers"
    return None


def _way_of(linear: Any, forward_batch: Any) -> Way | None:
    prepared: _Prepared | None = getattr(linear, _WAY, None)
    if prepared is None or getattr(forward_batch, "extend_seq_lens_cpu", None) is not prepared.lengths:
        return None
    return prepared.way
