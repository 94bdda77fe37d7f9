"""The answer: every reason against a command line, and what its pools would be."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import sglang.version
from sglang.srt.arg_groups.cuda_graph_hook import handle_cuda_graph_config
from sglang.srt.arg_groups.model_hook import handle_mamba_radix_cache
from sglang.srt.arg_groups.overrides import mamba_extra_buffer_lazy_of, mamba_extra_buffer_of, resolved_view
from sglang.srt.environ import envs
from sglang.srt.mem_cache.allocation_sizing import get_mamba_tracking_slots
from sglang.srt.model_executor.cuda_graph_config import Backend, Phase

from marconi.engine import flags, service, support
from marconi.engine.check.line import CommandLine
from marconi.engine.check.model import Model
from marconi.engine.check.pools import Card, Pools, Request, pools_of
from marconi.engine.flags import Flags
from marconi.engine.service import Facts
from marconi.engine.version import Refusal, one_line, require_verified
from marconi.model import ModelProfile, Precision
from marconi.replay.memory import MemorySize, MemoryUnit

_KV_DTYPES: Final = {"fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2", "bf16": "bfloat16", "bfloat16": "bfloat16"}
_ORIGIN: Final = "sglang"


@dataclass(frozen=True, slots=True)
class CardOptions:
    """The answer for one card; None where nothing is."""

    memory: MemorySize | None = None
    weights: MemorySize | None = None
    """On one card; None for what the configuration says, in 16 bits, shared by the ranks."""

    def __post_init__(self) -> None:
        """`ValueError` for an amount that is none of bytes."""
        for option, size in (("--gpu-memory", self.memory), ("--weights", self.weights)):
            if size is not None and size.unit is not MemoryUnit.BYTES:
                raise ValueError(f"{option} must be a size such as 80GB, got one that is relative")
        if self.weights is not None and self.memory is None:
            raise ValueError("--weights needs --gpu-memory beside it")


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a command line: would it be served, and with what."""

    model_path: str
    given: Mapping[str, Any]
    reasons: tuple[str, ...]
    """Each reason against it; empty where it would be served."""
    notes: tuple[str, ...]
    cache: str
    """Whose cache it would have."""
    admission: str | None
    """Where states would be kept; None where this project keeps none."""
    profile: ModelProfile | None
    """Of one rank; None where its bytes are not known."""
    pools: Pools | None

    @property
    def is_served(self) -> bool:
        """True if nothing stands against it."""
        return not self.reasons

    def reason_against(self, option: str) -> str | None:
        """The first reason that is about `option`; None if none is."""
        return next((line for line in self.reasons if line.split()[0].rstrip(":") == option), None)


def answer(line: CommandLine, model: Model, card: CardOptions) -> Answer:
    """Decide what a server would, from its command line and its model's configuration."""
    reasons, notes = list(_against_installation()), []
    given = Flags()
    try:
        given = flags.take_from(line.args, dict(os.environ))
    except Refusal as refusal:
        reasons.append(str(refusal))
    reasons += service.against_arguments(line.server_args, given)
    view, refused = _resolve(line.server_args, model)
    facts = _facts(line.server_args, view, model)
    reasons += service.against_cache(line.server_args, given, facts)
    reasons += [f"{_ORIGIN} {sglang.version.__version__}: {each}" for each in refused]
    if facts.falls_back(given):
        notes.append(f"planned states cannot be kept ({facts.why_not_planned}): --marconi-admission chunk-end")
    profile = pools = None
    if facts.has_own_cache:
        notes += support.notes(line.server_args)
        try:
            profile = model.profile(_precision(view), facts.num_ranks)
            request = _request(view, facts)
            pools = pools_of(request, profile.kv_bytes_per_token, profile.state_bytes, _card(card, view, profile))
        except ValueError as error:
            notes.append(f"the pools are not known: {error}")
        else:
            if card.memory is not None and view.mem_fraction_static is None:
                notes.append("the pools' sizes need --mem-fraction-static, which SGLang sets by the device")
            reasons += _against_room(pools, request)
    return Answer(
        model_path=line.model_path,
        given=line.given,
        reasons=tuple(dict.fromkeys(reasons)),
        notes=tuple(notes),
        cache="marconi" if facts.has_own_cache else "SGLang's own" if facts.is_hybrid is False else "none",
        admission=facts.admission(given) if facts.has_own_cache else None,
        profile=profile,
        pools=pools,
    )


def _against_room(pools: Pools, request: Request) -> Iterator[str]:
    """As far as sizes are known: those that SGLang would choose by itself have room."""
    slots = pools.num_working_slots + 1 if pools.num_slots is None else pools.num_slots
    tokens = 2 * request.page_tokens if pools.num_tokens is None else pools.num_tokens
    return service.against_room(slots, request.num_tracking_slots, tokens, request.page_tokens)


def _against_installation() -> Iterator[str]:
    try:
        require_verified(sglang.version.__version__, os.environ)
    except Refusal as refusal:
        yield str(refusal)


def _facts(server_args: Any, view: Any, model: Model) -> Facts:
    is_hybrid = model.is_hybrid
    layers = model.recurrent_layers(captures_prefills=_captures_prefills(server_args, view, model))
    return Facts(
        is_hybrid=is_hybrid,
        has_sliding_window=model.has_sliding_window and not server_args.disable_hybrid_swa_memory,
        why_not_planned=layers.why_not_planned if is_hybrid else None,
        is_cache_disabled=view.disable_radix_cache,
        has_one_pool=is_hybrid and server_args.enable_unified_memory,
        has_host_tier=server_args.enable_hierarchical_cache,
        skips_decode_lock=envs.SGLANG_OPT_MAMBA_SKIP_DECODE_LOCK.get(),
        num_ranks=service.num_attention_ranks(server_args),
    )


def _captures_prefills(server_args: Any, view: Any, model: Model) -> bool:
    """True if a prefill graph runs the recurrent layers on static tables, on a CUDA device."""
    if envs.SGLANG_DISABLE_KDA_PREFILL_GRAPH_EXTEND.get():
        return False
    if (Phase.PREFILL, "backend") in getattr(server_args, "_cuda_graph_config_locked", ()):
        return bool(view.cuda_graph_config.prefill.backend == Backend.BREAKABLE)
    # Of all models on the backend that could, SGLang lets one do so unless told otherwise.
    return "Glm5NextForConditionalGeneration" in (model.hf_config.architectures or [])


def _resolve(record: Any, model: Model) -> tuple[Any, list[str]]:
    """Have SGLang resolve what of its arguments needs no device; returns its view of them, and what it refuses."""
    refused = []
    try:
        record.resolve_once()
        # What SGLang's own tests put there: the model of this record.
        record._model_config = model.as_model_config
        handle_cuda_graph_config(record)
        handle_mamba_radix_cache(record, model.hf_config)
    except (ValueError, AssertionError, NotImplementedError, RuntimeError, ImportError) as error:
        refused.append(one_line(error).removeprefix("AssertionError: ").removeprefix("ValueError: "))
    view = resolved_view(record)
    num_groups = view.attn_dp_size * view.attn_cp_size
    if view.tp_size % num_groups:
        refused.append(f"--tp-size must be a multiple of {num_groups} attention groups, got {view.tp_size}")
    return view, refused


def _precision(view: Any) -> Precision:
    kv = view.kv_cache_dtype
    if kv != "auto" and kv not in _KV_DTYPES:
        raise ValueError(f"--kv-cache-dtype {kv} is not one of auto, {', '.join(_KV_DTYPES)}")
    conv = envs.SGLANG_MAMBA_CONV_DTYPE.get()
    state = view.mamba_ssm_dtype or envs.SGLANG_MAMBA_SSM_DTYPE.get()
    return Precision(kv_dtype=_KV_DTYPES.get(kv), state_dtype=state or None, conv_dtype=conv or None)


def _request(view: Any, facts: Facts) -> Request:
    ratio, num_slots = view.mamba_full_memory_ratio, view.max_mamba_cache_size
    defaults = {} if ratio is None else {"ratio": ratio}
    return Request(
        page_tokens=view.page_size or 1,
        num_tracking_slots=get_mamba_tracking_slots(
            extra_buffer=mamba_extra_buffer_of(view),
            overlap=not view.disable_overlap_schedule,
            lazy=mamba_extra_buffer_lazy_of(view),
        ),
        num_slots=None if num_slots is None else num_slots // view.attn_dp_size,
        max_tokens=view.max_total_tokens,
        is_one_pool=facts.has_one_pool,
        **defaults,
    )


def _card(options: CardOptions, view: Any, profile: ModelProfile) -> Card | None:
    if options.memory is None or view.mem_fraction_static is None:
        return None
    weights = profile.num_parameters * profile.storage.weight_itemsize // view.tp_size
    if options.weights is not None:
        weights = int(options.weights.amount)
    return Card(int(options.memory.amount), weights, view.mem_fraction_static)
