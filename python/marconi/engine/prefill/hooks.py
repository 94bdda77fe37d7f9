"""Hooks in SGLang's runner and backends, so that a prefill keeps the states that were planned.

A runner copies the `ForwardBatch` between the scheduler and the layers, and with data-parallel attention pads it and
makes its lists anew, so plan and way wait on the linear backend, known by what every copy shares: the object that says
how its requests are sampled. A plan stays until the next batch, for the metadata of one may be made twice. Source:
`srt/layers/attention/hybrid_linear_attn_backend.py`.

Owner: the process that runs the model.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from sglang.srt.model_executor.forward_context import get_attn_backend, get_req_to_token_pool

from marconi.engine.cache.scheduler import PLAN
from marconi.engine.prefill import passes, spans
from marconi.engine.prefill.checkpoint import Checkpoint, CheckpointWriter, LayerCall
from marconi.engine.prefill.side_states import SideStates
from marconi.engine.prefill.verified import RecurrentLayers

_WAY = "marconi_way"
"""On a linear backend: `_Prepared`, or nothing."""
_HYBRID = ("q", "k", "v", "layer", "forward_batch", "save_kv_cache")
"""Positional parameters of `HybridLinearAttnBackend.forward`."""
_MAMBA2 = ("mixer", "hidden_states", "output", "layer_id", "forward_batch", "mup_vector", "use_triton_causal_conv")
"""Positional parameters of `Mamba2AttnBackend.forward`."""


class _Plan(NamedTuple):
    """The checkpoints of one batch."""

    sampling: Any
    """`sampling_info`, the same object in every copy of the batch's `ForwardBatch`."""
    lengths: list[int]
    checkpoints: Sequence[Checkpoint]

    def is_of(self, forward_batch: Any) -> bool:
        """True if this is a prefill of that batch."""
        return forward_batch.sampling_info is self.sampling and forward_batch.extend_seq_lens_cpu == self.lengths


class _Prepared(NamedTuple):
    """How the batch of a plan keeps its states."""

    plan: _Plan
    way: CheckpointWriter
    beside: SideStates | None


def on_init_new(forward_batch: Any, _cls: type, batch: Any, model_runner: Any, *_: Any, **__: Any) -> None:
    """After `ForwardBatch.init_new`: what the scheduler planned is left with the backend for this batch."""
    linear = getattr(model_runner.attn_backend, "linear_attn_backend", None)
    if linear is None:
        return
    setattr(linear, PLAN, None)
    checkpoints = getattr(batch, PLAN, None)
    # The batch then decodes with its plan still on it, and a draft model runs it as well.
    if checkpoints and batch.forward_mode.is_extend_without_speculative() and not model_runner.is_draft_worker:
        setattr(linear, PLAN, _Plan(forward_batch.sampling_info, forward_batch.extend_seq_lens_cpu, checkpoints))


def on_init_forward_metadata(_result: None, backend: Any, forward_batch: Any) -> None:
    """After `HybridLinearAttnBackend.init_forward_metadata`: choose the way, once for all layers."""
    linear = backend.linear_attn_backend
    plan: _Plan | None = getattr(linear, PLAN, None)
    setattr(linear, _WAY, None)
    if plan is not None and plan.is_of(forward_batch):
        family = spans.family_of(linear)
        way: CheckpointWriter = (
            passes.prepare(linear, forward_batch, plan.checkpoints)
            if family is None
            else spans.prepare(family, linear, forward_batch, plan.checkpoints)
        )
        setattr(linear, _WAY, _Prepared(plan, way, SideStates.of(linear, forward_batch, plan.checkpoints)))


def around_hybrid_forward(forward: Callable[..., Any], backend: Any, *args: Any, **kwargs: Any) -> Any:
    """Around `HybridLinearAttnBackend.forward`: a recurrent layer keeps its states, where its batch has any."""
    linear = backend.linear_attn_backend
    if getattr(linear, _WAY, None) is None:
        return forward(backend, *args, **kwargs)
    names = {**dict(zip(_HYBRID, args, strict=False)), **kwargs} if args else kwargs
    way = _way_of(linear, names["forward_batch"])
    if way is None or backend._is_full_attn(names["layer"], names.get("layer_id")):
        return forward(backend, *args, **kwargs)
    return way.run(LayerCall(forward, backend, linear, names["layer"].layer_id, names))


def around_mamba2_forward(forward: Callable[..., Any], backend: Any, *args: Any, **kwargs: Any) -> Any:
    """Around `Mamba2AttnBackend.forward`, which models call by itself."""
    if getattr(backend, _WAY, None) is None:
        return forward(backend, *args, **kwargs)
    names = {**dict(zip(_MAMBA2, args, strict=False)), **kwargs} if args else kwargs
    way = _way_of(backend, names["forward_batch"])
    if way is None:
        return forward(backend, *args, **kwargs)
    return way.run(LayerCall(forward, backend, backend, names["layer_id"], names))


def on_conv_state_metadata(_handle: Any, backend: Any, layer_id: int, forward_batch: Any) -> None:
    """After `ShortConvHybridAttnBackend.conv_state_metadata`: a model is about to run a short convolution by itself."""
    spans.begin(_way_of(backend.linear_attn_backend, forward_batch), layer_id)


def before_side_windows(layer: Any, x: Any, forward_batch: Any, batch: Any) -> None:
    """Before `Qwen4ExpPLELayer._short_conv`: the windows beside a recurrent state, of one layer."""
    beside, layout = _beside(forward_batch), batch
    if beside is not None and len(x):
        pool = get_req_to_token_pool().short_conv_layer_cache(layer.layer_id)
        beside.keep_windows(x, pool, layout.state_indices)


def on_commit_history(_result: None, batch: Any, forward_batch: Any) -> None:
    """After `_commit_ple_batch` of the same models: the last tokens."""
    beside, layout = _beside(forward_batch), batch
    if beside is not None and layout is not None and layout.ngram_context is not None:
        num_kept = layout.ngram_context.shape[1] - layout.row_width
        beside.keep_history(layout.ngram_context, num_kept, get_req_to_token_pool().ngram_pool)


def why_not(model_runner: Any) -> str | None:
    """Why the prefills of this model can keep no planned states; None if they can."""
    hybrid = model_runner.attn_backend
    linear = getattr(hybrid, "linear_attn_backend", None)
    return RecurrentLayers(
        hybrid_backend=type(hybrid).__name__,
        linear_backend=None if linear is None else type(linear).__name__,
        are_captured=getattr(hybrid, "use_captured_forward_metadata_for_breakable_cuda_graph", False),
    ).why_not_planned


def _way_of(linear: Any, forward_batch: Any) -> CheckpointWriter | None:
    prepared = _prepared(linear, forward_batch)
    return None if prepared is None else prepared.way


def _beside(forward_batch: Any) -> SideStates | None:
    """The states to keep beside the recurrent ones of `forward_batch`; a draft model has a backend of its own."""
    prepared = _prepared(getattr(get_attn_backend(), "linear_attn_backend", None), forward_batch)
    return None if prepared is None else prepared.beside


def _prepared(linear: Any, forward_batch: Any) -> _Prepared | None:
    prepared: _Prepared | None = getattr(linear, _WAY, None)
    return prepared if prepared is not None and prepared.plan.is_of(forward_batch) else None
