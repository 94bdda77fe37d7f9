"""What `make cuda-check` starts, on a card that is not there (`fake_cuda.py`): its servers' layers, and its benchmark.

Run as a program, it reads a JSON object, and prints one with what each case found, by its name:

    launches    command lines by name: each starts up to its weights (`starting.py`); a prefill with planned states runs
                in layers of the heads, dtypes and pages that it started with, and steps after it that decode or, with
                drafts, verify (`fake_cuda_decodes.py`). Faults are planted in some of them once more.
    speed       arguments of `benchmark/kernels`: each of its rows is measured by a clock that only runs what it times
"""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any

from . import starting
from .fake_cuda import CARD, Card, HostWaits, Tensors
from .fake_cuda_cases import Finding, put_in, run, run_prefill
from .fake_cuda_decodes import Decoding, run_decodes
from .fake_cuda_models import (
    NUM_LAYERS,
    DeltaHeads,
    KimiHeads,
    MambaHeads,
    Model,
    Prefill,
    chunks_of,
    empty,
    gated_delta_net,
    instead,
    kimi_delta_attention,
    mamba2,
    stand_in,
)
from .fake_cuda_verify import run_verify_steps

Case = Callable[[Card, Finding], None]


@dataclass(frozen=True, slots=True)
class Started:
    """What a server has started with; or the words in which it refused."""

    heads: DeltaHeads | KimiHeads | MambaHeads | None = None
    kernel: str = ""
    """Of its prefills."""
    page_tokens: int = 1
    num_requests: int = 0
    decoding: Decoding | None = None
    refusal: str = ""

    @property
    def model(self) -> Model:
        """Its layers."""
        if isinstance(self.heads, MambaHeads):
            return mamba2(self.heads)
        if isinstance(self.heads, KimiHeads):
            return kimi_delta_attention(self.heads)
        assert self.heads is not None, self.refusal
        return gated_delta_net("FlashInferGDNKernel" if self.kernel == "flashinfer" else "TritonGDNKernel", self.heads)

    @property
    def batch(self) -> Prefill:
        """A prefill of it: states before a branch, before two ends, and after a prefix, where its pages end."""
        wanted = ((0, 400), (0, 412), (1, 192), (2, 7))
        pages = dict.fromkeys((row, depth // self.page_tokens * self.page_tokens) for row, depth in wanted)
        return Prefill((412, 70, 20), (0, 128, 0), tuple(each for each in pages if each[1]))


def main() -> None:
    """Print what every case found."""
    asked = json.load(sys.stdin)
    card = put_in()
    from sglang.srt.plugins import load_plugins

    from marconi.engine.plugin import touch, upstream

    load_plugins()
    touch.hook_into(upstream.TRACKING, upstream.PREFILLS, upstream.DRAFTS, upstream.KERNELS)
    with starting.stand_ins(is_on_card=True):
        started = {name: start(argv) for name, argv in asked["launches"].items()}
    with Tensors(allow_non_fake_inputs=True):
        stand_in()
        cases = {name: launch(each) for name, each in started.items()} | rows(asked["speed"])
        cases |= planted(started["gdn-flashinfer"], started["gdn-triton-drafts"])
        json.dump({name: asdict(run(card, case)) for name, case in cases.items()}, sys.stdout)


def start(argv: list[str]) -> Started:
    """Start a server up to its weights."""
    from sglang.srt.runtime_context import reset_context

    environ = dict(os.environ)
    try:
        return started_with(starting.start(argv))
    except (Exception, SystemExit) as error:
        return Started(refusal=f"{type(error).__name__}: {error}")
    finally:
        reset_context()
        os.environ.clear()
        os.environ.update(environ)


def started_with(context: Any) -> Started:
    """What a layer depends on, of a server that has started."""
    from sglang.kernels.ops.mamba.triton_ops.ssu_dispatch import initialize_mamba_selective_state_update_backend
    from sglang.srt.arg_groups.overrides import resolved_view
    from sglang.srt.configs.hybrid_arch import mambaish_config

    from marconi.engine.cache.speculation import EndStateSource

    states = mambaish_config(context.model_config)
    shape, dtype = states.mamba2_cache_params.shape, states.mamba2_cache_params.dtype
    state_dtype = str(dtype.temporal).removeprefix("torch.")
    num_heads, head_dim, state_dim = shape.temporal
    heads: DeltaHeads | KimiHeads | MambaHeads
    if hasattr(states, "linear_num_key_heads"):
        heads = DeltaHeads(num_heads, states.linear_num_key_heads, state_dtype)
        windows = (heads.num_channels, 3)
    elif hasattr(states, "linear_attn_config"):
        heads = KimiHeads(num_heads, state_dtype)
        windows = (3, heads.num_channels)
    else:
        heads = MambaHeads(
            num_heads, head_dim, state_dim, states.n_groups, states.hidden_size, states.mamba_chunk_size, state_dtype
        )
        windows = (num_heads * head_dim + 2 * states.n_groups * state_dim, 3)
    found = (str(dtype.conv), *map(tuple, shape.conv), str(context.model_config.dtype))
    if found != ("torch.bfloat16", windows, "torch.bfloat16"):
        raise ValueError(f"windows must be of bfloat16 and {windows}, got {found}")
    view = resolved_view(context.server_args)
    # As its scheduler does.
    initialize_mamba_selective_state_update_backend(view)
    num_tracking_slots = context.params.req_to_token_pool.mamba_initial_tracking_slots
    return Started(
        heads,
        str(getattr(context.tp_worker.model_runner.linear_attn_backends.prefill, "value", "")),
        view.page_size,
        view.max_running_requests,
        Decoding(
            EndStateSource.of(view, view.page_size, num_tracking_slots),
            num_tracking_slots,
            view.speculative_num_draft_tokens or 0,
        ),
    )


def launch(started: Started) -> Case:
    """A prefill and steps after it; with drafts, what commits those that were accepted."""

    def case(card: Card, finding: Finding) -> None:
        if started.decoding is None:
            raise ValueError(started.refusal)
        num_nodes = started.decoding.num_nodes
        finding.facts = {"kernel": started.kernel, "page_tokens": started.page_tokens, "num_nodes": num_nodes}
        with logical_chunks(started):
            prefilled = run_prefill(card, finding, started.model, started.batch)
        run_decodes(card, finding, started.model, prefilled, started.decoding)
        if num_nodes:
            assert isinstance(started.heads, DeltaHeads)
            finding.num_operations += run_verify_steps(card, started.num_requests, num_nodes, started.heads)

    return case


def logical_chunks(started: Started) -> Any:
    """Mamba2's logical chunks, which SGLang counts on the card: of the grid, and where sequences begin inside one."""
    from sglang.srt.layers.attention.mamba.mamba2_metadata import Mamba2Metadata

    lengths = started.batch.lengths
    num = len({*range(0, sum(lengths), started.model.chunk_size), *list(accumulate(lengths, initial=0))[:-1]})
    given = staticmethod(lambda *_: (empty(num, dtype="int32"), empty(num, dtype="int32")))
    return instead(Mamba2Metadata, "_query_start_loc_to_chunk_indices_offsets", given)


def planted(decodes: Started, verifies: Started) -> dict[str, Case]:
    """Faults that must be found, in a server that decodes, and in one that verifies drafts, by Triton."""
    import torch
    from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool

    from marconi.engine.cache import scheduler
    from marconi.engine.prefill import hooks, operands

    lends, ends = vars(scheduler)["lend_slots"], vars(scheduler)["working_state"]

    def on_the_host(pool: Any) -> Any:
        mapping = pool.req_index_to_mamba_ping_pong_track_buffer_mapping
        pool.req_index_to_mamba_ping_pong_track_buffer_mapping = torch.zeros(mapping.shape, dtype=mapping.dtype)
        return lends(pool)

    def looked_at(req: Any, up_to: int) -> Any:
        state = ends(req, up_to)
        int(state.slot[0])
        return state

    def begins_anew(linear: Any, _forward_batch: Any) -> Any:
        prepared = getattr(linear, hooks._WAY, None)
        if prepared is None:
            return None
        if not prepared.way.ends.missing:
            prepared.way.ends.missing.update(range(NUM_LAYERS))
        return prepared.way

    unhooked: Any = vars(HybridReqToTokenPool)["_alloc_ping_pong_buffer"].__wrapped__
    faults: dict[str, tuple[Started, Any, str, Any]] = {
        "a kernel that is not met": (verifies, operands, "keep_gated_delta_rule", lambda *_: None),
        "a plan that decodes": (decodes, hooks, "_way_of", begins_anew),
        "a plan that verifies": (verifies, hooks, "_way_of", begins_anew),
        "a wait at an end": (decodes, scheduler, "working_state", looked_at),
        "slots on the host": (decodes, scheduler, "lend_slots", on_the_host),
        "slots without padding": (decodes, HybridReqToTokenPool, "_alloc_ping_pong_buffer", unhooked),
    }

    def case_of(started: Started, owner: Any, name: str, fault: Any) -> Case:
        def case(card: Card, finding: Finding) -> None:
            with instead(owner, name, fault):
                launch(started)(card, finding)

        return case

    return {f"planted: {name}": case_of(*fault) for name, fault in faults.items()}


def rows(arguments: list[str]) -> dict[str, Case]:
    """The rows of the kernels' benchmark, by model and lengths."""
    from benchmark.kernel_rows import part, timing

    command, cuda, upstream, batch = (part(name) for name in ("command", "cuda", "upstream", "batch"))
    asked = command.parser().parse_args(arguments)

    class Clock:
        def read(self, timed: Callable[[], object]) -> Any:
            timed()
            return timing.Reading(1.0, 1.0)

    def row_of(name: str, lengths: tuple[int, int]) -> Case:
        shape = command.LAYERS[name]

        def case(card: Card, finding: Finding) -> None:
            layer_of = upstream.why_absent(shape.family) or upstream.layer_of
            of_row = batch.batch_of(*lengths, asked.checkpoints, shape.chunk_size)
            with chunks_of(of_row.lengths), HostWaits(card):
                row = cuda.measure(shape, lengths, asked.checkpoints, Clock(), asked.repetitions, CARD, layer_of)
            finding.facts = {"missing": row.missing}

        return case

    return {f"{name} {each}": row_of(name, each) for name in asked.models for each in cuda.cases(asked.tokens)}


if __name__ == "__main__":
    main()
