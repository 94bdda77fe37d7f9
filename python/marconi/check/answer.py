"""The answer: every reason against a command line, and what its pools would be."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import sglang.version
from sglang.srt.arg_groups.model_override_base import model_config_of
from sglang.srt.arg_groups.overrides import resolved_view
from sglang.srt.environ import envs
from sglang.srt.model_executor.model_runner_components.moe_ep_setup import check_quantized_moe_compatibility
from sglang.srt.runtime_context import SpawnRanks, create_context

from marconi.check.line import CommandLine
from marconi.check.machine import Machine
from marconi.check.pools import Card, Pools, RequestSlots, pools_of
from marconi.check.stand_in import as_sglang_finds
from marconi.engine.cpu_platform import NUM_KV_TOKENS, NUM_STATE_SLOTS
from marconi.engine.launch import flags, split, support
from marconi.engine.launch.flags import BACKEND, Flags
from marconi.engine.launch.model import Model, draft_folder, is_draft_known
from marconi.engine.launch.policies import JUDICIOUS
from marconi.engine.launch.running import tracking_of
from marconi.engine.launch.support import Facts
from marconi.engine.launch.weights import bits_of, weight_bytes
from marconi.engine.version import Refusal, require_verified
from marconi.model import ModelProfile, Precision
from marconi.replay.memory import MemorySize, MemoryUnit, format_bytes

_KV_DTYPES: Final = {"fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2", "bf16": "bfloat16", "bfloat16": "bfloat16"}
_SGLANG: Final = f"sglang {sglang.version.__version__}"
_CARDS_GB: Final = (24, 32, 40, 48, 80, 96, 141, 180, 192, 288)
"""Memory sizes of existing cards."""


@dataclass(frozen=True, slots=True)
class CheckResult:
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
    """The pools of one rank; None if their sizes are unknown."""
    pools: Pools | None
    is_short: bool
    """True if a card has too little memory, which is not among the reasons of one alternative."""
    split: str | None = None
    """How the server divides memory itself, and why; None where a flag does, or nothing is to be divided."""

    @property
    def is_served(self) -> bool:
        """True if nothing stands against it."""
        return not self.reasons

    def reason_against(self, option: str) -> str | None:
        """The first reason that is about `option`; None if none is."""
        return next((line for line in self.reasons if line.split()[0].rstrip(":") == option), None)


def answer(line: CommandLine, model: Model, machine: Machine) -> CheckResult:
    """Decide what a server would on `machine`, from its command line and its model's configuration."""
    found = _answer(line, model, machine)
    if not found.is_short:
        return found
    fitting = " or ".join(_fitting(line, model, machine, found)) or "no number of ranks or card that is known here"
    assert machine.memory is not None
    assert found.pools is not None
    assert found.pools.weight_bytes is not None
    hint = " (give --weights if they take less)" if machine.weights is None else ""
    reason = (
        f"--gpu-memory {format_bytes(int(machine.memory.amount))}: {format_bytes(found.pools.weight_bytes)} of weights "
        f"on a card{hint} leave no room for the KV and the states of a request; what would fit: {fitting}"
    )
    return replace(found, reasons=(*found.reasons, reason))


def _fitting(line: CommandLine, model: Model, machine: Machine, found: CheckResult) -> Iterator[str]:
    """The fewest ranks and the smallest card with room that raise no new objection."""

    def has_room(other: CheckResult) -> bool:
        return not other.is_short and other.pools is not None and set(other.reasons) <= set(found.reasons)

    for times in (2, 4, 8, 16, 32, 64):
        num_ranks = times * line.args.tp_size
        if has_room(_answer(line.over(num_ranks), model, machine.over(times))):
            yield f"--tp-size {num_ranks}"
            break
    for size in _CARDS_GB:
        card = replace(machine, memory=MemorySize(size * 1e9, MemoryUnit.BYTES))
        if has_room(_answer(line, model, card)):
            yield f"a card of {size} GB"
            break


def _answer(line: CommandLine, model: Model, machine: Machine) -> CheckResult:
    record = line.make_record()
    is_open = split.is_open(record)
    found = _answer_to(record, line, model, machine)
    if not (is_open and found.is_served and found.cache == BACKEND):
        return found
    joint = _answer_to(split.in_one_pool(line.make_record()), line, model, machine)
    divided = split.two_pools(
        line.make_record(), _refusal(joint), lambda record: _refusal(_answer_to(record, line, model, machine))
    )
    return replace(joint, split=split.ONE_POOL) if divided is None else replace(found, split=divided)


def _refusal(found: CheckResult) -> str | None:
    """The first reason for which a launch is not served; None if it is."""
    return next((reason.removeprefix(f"{_SGLANG}: ") for reason in found.reasons), None)


def _answer_to(server_args: Any, line: CommandLine, model: Model, machine: Machine) -> CheckResult:
    """The answer to `server_args`, the record of `line` before it is resolved."""
    reasons, notes, given = list[str](), list[str](), Flags()
    try:
        require_verified(sglang.version.__version__, os.environ)
    except Refusal as refusal:
        reasons.append(str(refusal))
    try:
        given = flags.take_from(line.args, dict(os.environ))
    except Refusal as refusal:
        reasons.append(str(refusal))
    reasons += support.against_arguments(server_args, given)
    view, refused = _resolve(server_args, model, machine, notes)
    facts = model.facts(server_args, view, is_on_cpu=machine.is_cpu)
    reasons += [f"{_SGLANG}: {each}" for each in refused]
    reasons += support.against_cache(server_args, given, facts)
    if facts.falls_back(given):
        notes.append(f"planned states cannot be kept ({facts.why_not_planned}): --marconi-admission chunk-end")
    profile = pools = None
    is_short = False
    if machine.memory is not None and not facts.has_own_cache:
        notes.append("--gpu-memory: the pools of a cache that is SGLang's own are not counted")
    if facts.has_own_cache:
        notes += support.notes(server_args)
        reasons += [f"--tp-size {view.tp_size}: {each}" for each in model.against_ranks(facts.num_ranks)]
        try:
            profile = model.profile(_precision(view), facts.num_ranks)
            if view.dcp_size > 1:
                # Its ranks have the same heads, and deal out the tokens.
                whole = model.profile(_precision(view), facts.num_ranks // view.dcp_size)
                profile = replace(profile, kv_bytes_per_token=-(-whole.kv_bytes_per_token // view.dcp_size))
            request = _request(view, facts, given)
            card = _card(machine, view, profile, model)
            bytes_of_each = profile.kv_bytes_per_token, profile.state_bytes
            pools = pools_of(request, *bytes_of_each, card, profile.int8_state_bytes)
        except ValueError as error:
            notes.append(f"the pools are not known: {error}")
        else:
            if machine.memory is not None and card is None:
                notes.append("the pools' sizes need --mem-fraction-static, which SGLang sets by the device")
            asked_for = pools_of(request, *bytes_of_each, None, profile.int8_state_bytes)
            against = list(_against_room(asked_for, request))
            reasons += against
            is_short = not against and any(_against_room(pools, request))
            if pools.warning is not None:
                notes.append(pools.warning)
    return CheckResult(
        model_path=line.model_path,
        given=line.given,
        reasons=tuple(dict.fromkeys(reasons)),
        notes=tuple(notes),
        cache=BACKEND if facts.has_own_cache else "SGLang's own" if facts.is_hybrid is False else "none",
        admission=facts.admission(given) if facts.has_own_cache else None,
        profile=profile,
        pools=pools,
        is_short=is_short,
    )


def _against_room(pools: Pools, request: RequestSlots) -> Iterator[str]:
    """Check the known sizes of the pools; SGLang chooses the others large enough."""
    if pools.max_running == 0:
        yield (
            f"{_SGLANG}: --max-mamba-cache-size must give at least {pools.num_slots_per_running} state slots, which "
            f"it counts for a running request, got {pools.num_slots}"
        )
    slots = request.num_tracking_slots + 2 if pools.num_slots is None else pools.num_slots
    tokens = 2 * request.page_tokens if pools.num_tokens is None else pools.num_tokens
    yield from support.against_room(slots, request.num_tracking_slots, tokens, request.page_tokens)


def _resolve(record: Any, model: Model, machine: Machine, notes: list[str]) -> tuple[Any, list[str]]:
    """Have SGLang resolve and check its arguments; returns its view of them, and what it refuses."""
    refused = []
    if not machine.is_cpu and record.device is None:
        record.device = "cuda"
    draft = record.speculative_draft_model_path
    # A checkpoint may have a draft for this rule in it, which no name says.
    may_hold_draft = str(record.speculative_algorithm).upper() == "DSPARK" and not model.is_whole
    with as_sglang_finds(machine), model.folder() as folder, draft_folder(draft) as draft_path:
        # A checkpoint may bring code, which only a server runs.
        record.model_path, record.trust_remote_code = folder, False
        if not model.is_whole:
            os.environ["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"
        if draft is not None or may_hold_draft:
            record.speculative_draft_model_path = draft_path
            if not is_draft_known(draft):
                notes.append(
                    "no configuration of the draft model is known here: SGLang's demands on it are not checked"
                )
        try:
            record.resolve_once()
            record.check_server_args()
            # A scheduler's first act, which is where the widths of all groups are held against each other.
            create_context(record, role="scheduler", ranks=SpawnRanks(world_rank=0, dp_rank=0, gpu_id=0))
            model_config, view = model_config_of(record), resolved_view(record)
            model.require_class(model_config)
            check_quantized_moe_compatibility(
                model_config=model_config,
                tp_size=view.tp_size,
                moe_ep_size=view.ep_size,
                moe_dp_size=view.moe_dp_size,
            )
        except Exception as error:  # What ends the resolution here ends it in a server.
            refused.append(split.words_of(error).replace(folder, model.spelt))
        view = resolved_view(record)
    return view, refused


def _precision(view: Any) -> Precision:
    kv = view.kv_cache_dtype
    if kv != "auto" and kv not in _KV_DTYPES:
        raise ValueError(f"--kv-cache-dtype must be one of auto, {', '.join(_KV_DTYPES)}, got {kv}")
    conv = envs.SGLANG_MAMBA_CONV_DTYPE.get()
    state = view.mamba_ssm_dtype or envs.SGLANG_MAMBA_SSM_DTYPE.get()
    return Precision(kv_dtype=_KV_DTYPES.get(kv), state_dtype=state or None, conv_dtype=conv or None)


def _request(view: Any, facts: Facts, given: Flags) -> RequestSlots:
    ratio, num_slots, max_tokens = view.mamba_full_memory_ratio, view.max_mamba_cache_size, view.max_total_tokens
    if facts.is_on_cpu:
        num_slots, max_tokens = num_slots or NUM_STATE_SLOTS, max_tokens or NUM_KV_TOKENS
    defaults = {} if ratio is None else {"ratio": ratio}
    page_tokens = view.page_size or 1
    tracking = tracking_of(view, page_tokens)
    return RequestSlots(
        page_tokens=page_tokens * view.dcp_size,
        num_tracking_slots=tracking.num_slots,
        lends_tracking_slots=facts.admission(given) == JUDICIOUS and tracking.are_lent,
        num_slots=None if num_slots is None else num_slots // view.attn_dp_size,
        max_tokens=None if max_tokens is None else max_tokens * view.dcp_size,
        is_one_pool=facts.has_one_pool,
        has_checkpoints=facts.has_int8_checkpoints,
        num_checkpoints=view.int8_mamba_ckpt_size if facts.has_int8_checkpoints else None,
        max_running=None if view.max_running_requests is None else view.max_running_requests // view.attn_dp_size,
        **defaults,
    )


def _card(machine: Machine, view: Any, profile: ModelProfile, model: Model) -> Card | None:
    if machine.memory is None or view.mem_fraction_static is None:
        return None
    if machine.weights is not None:
        weights = int(machine.weights.amount)
    else:
        weights = weight_bytes(profile, bits_of(model.quantization, view.quantization)) // view.tp_size
    return Card(int(machine.memory.amount), weights, view.mem_fraction_static)
