"""SGLang's own backends and launchers under the prefill hooks, on a card that is not there (`fake_cuda.py`).

Run as a program, it prints a JSON object: what each case found, by its name. Two recurrent layers run in each, so that
one that writes nothing shows. A planted fault is a case like any other.
"""

import contextlib
import json
import logging
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import sgl_kernel_ext

from .fake_cuda import CARD, Card, HostWaits, Launch, Operations, Owners, Tensors, Wait

NUM_LAYERS: Final = 2
NUM_SLOTS: Final = 40
NUM_HEADS: Final = 32
NUM_KEY_HEADS: Final = 16
HEAD_DIM: Final = 128
NUM_CHANNELS: Final = (2 * NUM_KEY_HEADS + NUM_HEADS) * HEAD_DIM


@dataclass(frozen=True, slots=True)
class Prefill:
    """A batch, and the states that were planned for it: (row, depth) each."""

    lengths: tuple[int, ...] = (300, 70, 20)
    prefixes: tuple[int, ...] = (0, 128, 0)
    planned: tuple[tuple[int, int], ...] = ((0, 100), (0, 256), (0, 300), (1, 192), (2, 7))
    num_padding: int = 0
    """Tokens behind the last, as in a captured graph's bucket."""


@dataclass(slots=True)
class Finding:
    """What one case found."""

    way: str = ""
    num_written: list[int] = field(default_factory=list)
    """For each planned state, the layers that wrote it,"""
    num_layers: int = NUM_LAYERS
    """of so many."""
    launches: list[Launch] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)
    num_operations: list[int] = field(default_factory=list)
    """For each verify step, the operations on the card that are ours."""
    facts: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    """The exception that ended it."""


Layer = Callable[[Any, Any, Any, int, int], Any]
"""(hybrid backend, linear backend, forward batch, layer, tokens) of one recurrent layer: runs it."""


@dataclass(frozen=True, slots=True)
class Model:
    """A family's backend, as SGLang builds it, with pools of its shapes."""

    linear: Callable[[], Any]
    layer: Layer
    chunk_size: int = 64


def main() -> None:
    """Print what every case found."""
    import sglang

    import marconi

    folders = {
        "ours": (Path(marconi.__file__).parent, Path(sgl_kernel_ext.__file__).parent),
        "SGLang's": (Path(sglang.__file__).parent,),
    }
    card = Card(Owners(folders))
    card.put_in()
    logging.disable(logging.WARNING)
    from marconi.engine import touch, upstream

    touch.hook_into(upstream.PREFILLS, upstream.DRAFTS, upstream.KERNELS)
    with Tensors(allow_non_fake_inputs=True):
        stand_in()
        found = {name: asdict(run(card, case)) for name, case in cases().items()}
    json.dump(found, sys.stdout)


def run(card: Card, case: Callable[[Card, Finding], None]) -> Finding:
    """What a case finds; its exception is a finding."""
    card.clear()
    finding = Finding()
    try:
        case(card, finding)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        finding.error = f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"
    finding.launches, finding.waits = [*card.launches], [*card.waits]
    return finding


def cases() -> dict[str, Callable[[Card, Finding], None]]:
    """Every case by its name."""
    gdn, flashinfer = gated_delta_net("TritonGDNKernel"), gated_delta_net("FlashInferGDNKernel")
    short = Prefill((20, 30), (0, 64), ((0, 7), (1, 94)))
    return {
        "GDN by Triton": prefill(gdn),
        "GDN by FlashInfer": prefill(flashinfer),
        "GDN by FlashInfer, shorter than a chunk": prefill(flashinfer, short),
        "GDN that is cut": prefill(gated_delta_net("AnotherGDNKernel")),
        "KDA by Triton": prefill(kimi_delta_attention()),
        "Mamba2": prefill(mamba2(), Prefill()),
        "a ragged batch": prefill(gdn, Prefill((4000, *[8] * 12), (0,) * 13, ((0, 1000), (0, 4000), (3, 4)))),
        "a padded replay": padded_replay(gdn),
        "verify steps": verify_steps,
        "Falcon-H1": layers_of_falcon_h1,
        "what waits": watched,
        "planted: a tensor on the host": on_the_host(gdn),
        "planted: a wait": waiting(gdn),
        "planted: pageable memory": pageable(gdn),
        "planted: a kernel that is not met": unmet(gdn),
    }


def prefill(model: Model, batch: Prefill | None = None) -> Callable[[Card, Finding], None]:
    """A prefill of `batch` by every layer of `model`."""

    def case(card: Card, finding: Finding) -> None:
        run_prefill(card, finding, model, batch or Prefill())

    return case


def run_prefill(card: Card, finding: Finding, model: Model, batch: Prefill) -> None:
    from marconi.engine.prefill import hooks
    from marconi.engine.prefill.checkpoint import Checkpoint
    from marconi.engine.prefill.planning import PLAN

    hybrid, linear = hybrid_backend(model)
    forward_batch = forward_batch_of(batch)
    planned = [Checkpoint(row, depth, empty(1, dtype="int64")) for row, depth in batch.planned]
    scheduled = SimpleNamespace(forward_mode=SimpleNamespace(is_extend_without_speculative=lambda: True))
    setattr(scheduled, PLAN, planned)
    with chunks_of(batch.lengths):
        hooks.on_init_new(
            forward_batch, SimpleNamespace, scheduled, SimpleNamespace(attn_backend=hybrid, is_draft_worker=False)
        )
        with HostWaits(card):
            hybrid.init_forward_metadata(forward_batch)
            finding.way = type(linear.marconi_way.way).__name__
            for layer in range(NUM_LAYERS):
                model.layer(hybrid, linear, forward_batch, layer, sum(batch.lengths))
    finding.num_written = [each.num_layers for each in planned]


def padded_replay(model: Model) -> Callable[[Card, Finding], None]:
    """A replay of a breakable prefill graph: each recurrent layer breaks out of it, and is given a bucket of tokens.

    Its metadata is of the batch that came, its `ForwardBatch` the graph's own, which has other `out_cache_loc`.
    """
    from sglang.srt.layers import radix_linear_attention

    def layer(hybrid: Any, _linear: Any, forward_batch: Any, number: int, num_tokens: int) -> None:
        static = SimpleNamespace(**vars(forward_batch))
        num_padded = num_tokens + batch.num_padding
        with instead(radix_linear_attention, "get_attn_backend", lambda: hybrid):
            radix_linear_attention._linear_attention_with_output_impl(
                empty(num_padded, NUM_CHANNELS),
                empty(num_padded, NUM_HEADS),
                empty(num_padded, NUM_HEADS),
                empty(1, num_padded, NUM_HEADS, HEAD_DIM),
                linear_layer(NUM_KEY_HEADS, number),
                static,
            )

    batch = Prefill(num_padding=122)
    return prefill(Model(model.linear, layer), batch)


def verify_steps(card: Card, finding: Finding) -> None:
    """Two verify steps of the same requests, whose states at ends are left in tracking slots."""
    from marconi.engine import speculation

    num_layers, num_requests, num_nodes = 4, 4, 4
    every_layer = SimpleNamespace(
        temporal=empty(num_layers, NUM_SLOTS, NUM_HEADS, HEAD_DIM, HEAD_DIM, dtype="float32"),
        intermediate_ssm=empty(num_layers, 9, num_nodes, NUM_HEADS, HEAD_DIM, HEAD_DIM, dtype="float32"),
        conv=[empty(num_layers, NUM_SLOTS, NUM_CHANNELS, 3)],
        intermediate_conv_window=[empty(num_layers, 9, num_nodes, NUM_CHANNELS, 3)],
    )
    pool = SimpleNamespace(
        get_speculative_mamba2_params_all_layers=lambda: every_layer,
        translate_mamba_indices=lambda slots: slots,
        req_index_to_mamba_ping_pong_track_buffer_mapping=empty(16, 2, dtype="int64"),
    )
    batch = SimpleNamespace(
        tree_cache=SimpleNamespace(cuts_prefills=True, ends=speculation.Ends.LEFT, stops=speculation.LastStops()),
        reqs=[speculating_request() for _ in range(num_requests)],
        req_pool_indices=empty(num_requests, dtype="int64"),
        seq_lens=empty(num_requests, dtype="int64"),
        req_to_token_pool=pool,
        forward_mode=SimpleNamespace(is_idle=lambda: False),
        grammar_needs_sync=lambda: False,
        mamba_track_indices=empty(num_requests, dtype="int64"),
    )
    for _ in range(2):
        speculation.after_sample((empty(num_requests * num_nodes, dtype="int32"),), None, batch)
        lengths = empty(num_requests, dtype="int32")
        accepted = empty(num_requests, num_nodes, dtype="int32")
        with Operations() as operations, HostWaits(card):
            # Without SGLang's own commit, which is not ours to count.
            speculation.around_commit(lambda *_: None, None, batch, lengths, accepted, num_nodes)
        finding.num_operations.append(len(operations.names))


def speculating_request() -> Any:
    """A request that ends by a token or by its length."""
    return SimpleNamespace(
        kv=SimpleNamespace(mamba_next_track_idx=0),
        sampling_params=SimpleNamespace(
            ignore_eos=False, stop_token_ids=None, max_new_tokens=10, stop_strs=[], stop_regex_strs=[]
        ),
        eos_token_ids={5},
        tokenizer=None,
        vocab_size=1000,
        origin_input_ids=[1] * 5,
        grammar=None,
    )


def layers_of_falcon_h1(_card: Card, finding: Finding) -> None:
    """What SGLang's breakable prefill graph makes of Falcon-H1's layers, each of attention and of Mamba2 at once."""
    import inspect

    import torch
    from sglang.srt.layers.attention import hybrid_linear_attn_backend
    from sglang.srt.layers.attention.mamba import mamba
    from sglang.srt.model_executor.model_runner_components import cuda_graph_setup, layer_setup
    from sglang.srt.models import falcon_h1, nemotron_h

    def layer(number: int) -> Any:
        made = falcon_h1.FalconH1HybridAttentionDecoderLayer.__new__(falcon_h1.FalconH1HybridAttentionDecoderLayer)
        torch.nn.Module.__init__(made)
        made.attn, made.mamba = SimpleNamespace(layer_id=number), SimpleNamespace()
        return made

    num_layers = 4
    attention, *_ = layer_setup.compute_attention_and_moe_layers(
        SimpleNamespace(layers=[*map(layer, range(num_layers))])
    )
    num_attention = sum(each is not None for each in attention)
    finding.facts = {
        "keeps_graph": cuda_graph_setup.has_standard_gqa_for_all_local_layers(
            attention_layer_count=num_attention, start_layer=0, end_layer=num_layers
        ),
        "breaks": [
            each.__name__.rpartition(".")[-1]
            for each in (falcon_h1, nemotron_h, mamba, hybrid_linear_attn_backend)
            if "eager_on_graph(" in inspect.getsource(each)
        ],
    }


# What SGLang makes of a server's arguments and of a model's weights.


def empty(*shape: int, dtype: str = "bfloat16") -> Any:
    """A tensor on the card."""
    import torch

    return torch.empty(shape, dtype=getattr(torch, dtype), device=CARD)


def stand_in() -> None:
    """Stand in for what SGLang compiles for CUDA by other means than Triton, and for what it reads of its arguments."""
    import sglang.srt.layers.attention.hybrid_linear_attn_backend as hybrid
    import sglang.srt.layers.attention.linear.gdn_backend as gdn
    from sglang.srt.layers.attention.mamba.mamba2_metadata import Mamba2Metadata
    from sglang.srt.platforms import current_platform

    def split(mixed: Any, *sizes: int) -> tuple[Any, ...]:
        num_q, num_k, num_v, *_ = sizes
        parts = mixed.split([num_q * HEAD_DIM, num_k * HEAD_DIM, num_v * HEAD_DIM], -1)
        return tuple(each.unflatten(-1, (-1, HEAD_DIM))[None] for each in parts)

    gdn.fused_qkv_split_gdn_prefill = split
    gdn.fused_gdn_gating = lambda _A, a, _b, _bias: (empty(1, *a.shape, dtype="float32"), empty(1, *a.shape))
    current_platform.is_pin_memory_available = lambda *_: True
    hybrid.get_memory = lambda: SimpleNamespace(enable_page_major_kv_layout=False)
    # As many logical chunks as the batch of `Prefill` has: 4 of the grid, and 2 that begin inside one.
    rows: Any = staticmethod(lambda *_: (empty(6, dtype="int32"), empty(6, dtype="int32")))
    Mamba2Metadata._query_start_loc_to_chunk_indices_offsets = rows


@contextlib.contextmanager
def chunks_of(lengths: tuple[int, ...]) -> Iterator[None]:
    """SGLang reads from the card how many chunks a batch has, once a batch: here they are those of these lengths."""

    def indices(_offsets: Any, chunk_size: int, *_: Any, **__: Any) -> Any:
        return empty(sum(-(-length // chunk_size) for length in lengths), 2, dtype="int64")

    with replaced("prepare_chunk_indices", indices):
        yield


@contextlib.contextmanager
def replaced(name: str, stand_in: Any) -> Iterator[None]:
    """`name` of SGLang's operators is `stand_in`, wherever it was imported to."""
    modules = [
        each for key, each in [*sys.modules.items()] if key.startswith("sglang.kernels.ops.") and name in vars(each)
    ]
    before = [getattr(each, name) for each in modules]
    for each in modules:
        setattr(each, name, stand_in)
    try:
        yield
    finally:
        for each, value in zip(modules, before, strict=True):
            setattr(each, name, value)


def hybrid_backend(model: Model) -> tuple[Any, Any]:
    """SGLang's hybrid backend and the linear one below it; a batch's rows have slots of the pool."""
    from sglang.srt.layers.attention.hybrid_linear_attn_backend import HybridLinearAttnBackend

    linear = model.linear()
    linear.device, linear.pad_slot_id, linear.topk = CARD, -1, 0
    linear.enable_mis = linear.enable_unified_memory = linear._use_strided_target_verify_qkv = False
    linear.mis_metadata = linear.prefill_graph_metadata = linear.accept_lens_pool = None
    linear._mamba_chunk_size = model.chunk_size
    hybrid = HybridLinearAttnBackend.__new__(HybridLinearAttnBackend)
    hybrid.linear_attn_backend = linear
    hybrid.full_attn_layers = []
    hybrid.full_attn_backend = SimpleNamespace(init_forward_metadata=lambda _: None)
    hybrid.attn_backend_list = [hybrid.full_attn_backend, linear]
    return hybrid, linear


def with_pool(backend: type, conv: Any, temporal: Any, kernel: Any) -> Any:
    """A linear backend whose layers have states in `conv` and `temporal`, and prefill by `kernel`."""
    linear = backend.__new__(backend)
    states = SimpleNamespace(conv=[conv], temporal=temporal, **dict.fromkeys(REPLAYED))
    every_layer = SimpleNamespace(conv=[conv[None]], temporal=temporal[None])
    linear.req_to_token_pool = SimpleNamespace(
        mamba2_layer_cache=lambda _: states,
        translate_mamba_indices=lambda slots: slots,
        get_mamba_indices=lambda rows: empty(rows.shape[0], dtype="int32"),
        mamba_pool=SimpleNamespace(mamba_cache=every_layer, replayssm_is_kda=False, enable_linear_replayssm=False),
        mamba_map={layer: layer for layer in range(NUM_LAYERS)},
    )
    linear.kernel_dispatcher = kernel and SimpleNamespace(
        extend_kernel=kernel,
        extend=lambda *args, **kwargs: kernel.extend(*args, **kwargs),
        extend_uses_state_checkpoints=False,
        supports_packed_decode=False,
        effective_extend_kernel=lambda *_: kernel,
    )
    return linear


REPLAYED: Final = ("replayssm_d", "replayssm_k", "replayssm_g", "replayssm_rawv")


def forward_batch_of(batch: Prefill) -> Any:
    """The `ForwardBatch` of a prefill."""
    import torch
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    num, num_tokens = len(batch.lengths), sum(batch.lengths)
    lengths = [prefix + length for prefix, length in zip(batch.prefixes, batch.lengths, strict=True)]
    return SimpleNamespace(
        batch_size=num,
        forward_mode=ForwardMode.EXTEND,
        logical_forward_mode=ForwardMode.EXTEND,
        req_pool_indices=empty(num, dtype="int64"),
        seq_lens=empty(num, dtype="int64"),
        seq_lens_cpu=torch.tensor(lengths),
        mamba_track_indices=empty(num, dtype="int64"),
        mamba_track_mask=empty(num, dtype="bool"),
        mamba_track_seqlens=empty(num, dtype="int64"),
        mamba_prefill_track_mask_cpu=[False] * num,
        mamba_track_seqlens_cpu=[-1] * num,
        extend_start_loc=empty(num, dtype="int32"),
        extend_seq_lens=empty(num, dtype="int32"),
        extend_prefix_lens=empty(num, dtype="int32"),
        extend_seq_lens_cpu=[*batch.lengths],
        extend_prefix_lens_cpu=[*batch.prefixes],
        extend_num_tokens=num_tokens,
        input_ids=empty(num_tokens, dtype="int64"),
        global_num_token_non_padded_cpu=num_tokens,
        tbo_parent_token_range=None,
        spec_info=None,
        multi_item_delimiter_indices=None,
        sampling_info=object(),
        out_cache_loc=empty(num_tokens + batch.num_padding, dtype="int64"),
    )


def linear_layer(num_key_heads: int, layer: int) -> Any:
    """A `RadixLinearAttention` of Gated DeltaNet or of KDA."""
    key_dim = num_key_heads * HEAD_DIM
    return SimpleNamespace(
        layer_id=layer,
        num_q_heads=num_key_heads,
        num_k_heads=num_key_heads,
        num_v_heads=NUM_HEADS,
        head_q_dim=HEAD_DIM,
        head_k_dim=HEAD_DIM,
        head_v_dim=HEAD_DIM,
        q_dim=key_dim,
        k_dim=key_dim,
        v_dim=NUM_HEADS * HEAD_DIM,
        conv_weights=empty(2 * key_dim + NUM_HEADS * HEAD_DIM, 4),
        bias=None,
        activation="silu",
        A_log=empty(NUM_HEADS, dtype="float32"),
        dt_bias=empty(NUM_HEADS),
        lower_bound=None,
    )


def gated_delta_net(kernel: str) -> Model:
    """Qwen3-Next, whose layers prefill by the kernel of that name."""
    from sglang.srt.layers.attention.linear.gdn_backend import GDNAttnBackend
    from sglang.srt.layers.attention.linear.kernels.gdn_flashinfer import FlashInferGDNKernel
    from sglang.srt.layers.attention.linear.kernels.gdn_triton import TritonGDNKernel

    def kernel_of() -> Any:
        if kernel == "TritonGDNKernel":
            return TritonGDNKernel()
        if kernel != "FlashInferGDNKernel":
            return type(kernel, (TritonGDNKernel,), {})()
        found = FlashInferGDNKernel.__new__(FlashInferGDNKernel)
        found.use_state_pool = found._prefill_needs_fp32_state = False
        found._prefill_fn = lambda **given: (given["v"].new_empty(given["v"].shape), given["output_state"])
        return found

    def linear() -> Any:
        states = empty(NUM_SLOTS, NUM_HEADS, HEAD_DIM, HEAD_DIM, dtype="float32")
        return with_pool(GDNAttnBackend, empty(NUM_SLOTS, NUM_CHANNELS, 3), states, kernel_of())

    def layer(hybrid: Any, _linear: Any, forward_batch: Any, number: int, num_tokens: int) -> Any:
        return hybrid.forward(
            layer=linear_layer(NUM_KEY_HEADS, number),
            forward_batch=forward_batch,
            mixed_qkv=empty(num_tokens, NUM_CHANNELS),
            a=empty(num_tokens, NUM_HEADS),
            b=empty(num_tokens, NUM_HEADS),
            linear_attn_output=empty(1, num_tokens, NUM_HEADS, HEAD_DIM),
        )

    return Model(linear, layer)


def kimi_delta_attention() -> Model:
    """Kimi-Linear."""
    from sglang.srt.layers.attention.linear.kda_backend import KDAAttnBackend
    from sglang.srt.layers.attention.linear.kernels.kda_triton import TritonKDAKernel

    num_channels = 3 * NUM_HEADS * HEAD_DIM

    def linear() -> Any:
        states = empty(NUM_SLOTS, NUM_HEADS, HEAD_DIM, HEAD_DIM, dtype="float32")
        return with_pool(KDAAttnBackend, empty(NUM_SLOTS, 3, num_channels), states, TritonKDAKernel())

    def layer(hybrid: Any, _linear: Any, forward_batch: Any, number: int, num_tokens: int) -> Any:
        attention = linear_layer(NUM_HEADS, number)
        attention.dt_bias = empty(NUM_HEADS * HEAD_DIM, dtype="float32")
        attention.A_log = empty(1, 1, NUM_HEADS, 1, dtype="float32")
        return hybrid.forward(
            layer=attention,
            forward_batch=forward_batch,
            mixed_qkv=empty(num_tokens, num_channels),
            a=empty(1, num_tokens, NUM_HEADS * HEAD_DIM),
            b=empty(1, num_tokens, NUM_HEADS),
            linear_attn_output=empty(1, num_tokens, NUM_HEADS, HEAD_DIM),
        )

    return Model(linear, layer)


def mamba2() -> Model:
    """Nemotron-H: the forward of SGLang's mixer, without its projections."""
    from sglang.srt.layers.attention.hybrid_linear_attn_backend import Mamba2AttnBackend
    from sglang.srt.layers.attention.mamba.mamba import MambaMixer2

    num_heads, head_dim, state_dim, num_groups, hidden = 128, 64, 128, 8, 4096
    inner, groups = num_heads * head_dim, num_groups * state_dim
    num_channels = inner + 2 * groups

    def linear() -> Any:
        states = empty(NUM_SLOTS, num_heads, head_dim, state_dim, dtype="float32")
        return with_pool(Mamba2AttnBackend, empty(NUM_SLOTS, num_channels, 3), states, None)

    def mixer() -> Any:
        found = SimpleNamespace(
            in_proj=lambda given: (empty(given.shape[0], inner + num_channels + num_heads), None),
            out_proj=lambda given: (empty(given.shape[0], hidden), None),
            norm=lambda given, _gate: given,
            conv1d=SimpleNamespace(weight=empty(num_channels, 1, 4), bias=None),
            intermediate_size=inner,
            conv_dim=num_channels,
            num_heads=num_heads,
            head_dim=head_dim,
            n_groups=num_groups,
            groups_ssm_state_size=groups,
            tp_size=1,
            activation="silu",
            **{name: empty(num_heads, dtype="float32") for name in ("A", "D", "dt_bias")},
        )
        found.forward = lambda **given: MambaMixer2.forward(found, **given)
        return found

    def layer(_hybrid: Any, linear: Any, forward_batch: Any, number: int, num_tokens: int) -> Any:
        return linear.forward(
            mixer=mixer(),
            hidden_states=empty(num_tokens, hidden),
            output=None,
            layer_id=number,
            forward_batch=forward_batch,
            use_triton_causal_conv=True,
        )

    return Model(linear, layer, chunk_size=128)


# Faults that must be found.


def watched(card: Card, finding: Finding) -> None:
    """What the watch sees of single expressions: those that wait, and those that do not."""
    import torch

    on_card, mask, numbers = empty(4, dtype="int64"), empty(4, dtype="bool"), [0, 2]

    def pinned() -> Any:
        return torch.tensor(numbers, pin_memory=True)

    expressions: dict[str, dict[str, Callable[[], Any]]] = {
        "waits": {
            "a number": lambda: on_card[0].item(),
            "an int": lambda: int(on_card[0]),
            "a condition": lambda: bool(on_card[0]),
            "a list": on_card.tolist,
            "to the host": on_card.cpu,
            "to the host, by name": lambda: on_card.to("cpu"),
            "made on the card": lambda: torch.tensor(numbers, device=CARD),
            "made like one on the card": lambda: on_card.new_tensor(numbers),
            "from the host": lambda: torch.tensor(numbers).to(CARD),
            "from the host, as another is": lambda: torch.tensor(numbers).to(on_card),
            "from the host, pinned and blocking": lambda: pinned().to(CARD),
            "from the host, not pinned": lambda: torch.tensor(numbers).to(CARD, non_blocking=True),
            "into a tensor": lambda: on_card[:2].copy_(torch.tensor(numbers)),
            "a list as index": lambda: on_card[numbers],
            "a place in a list": lambda: on_card.__setitem__(numbers, 0),
            "a host's index": lambda: on_card[torch.tensor(numbers)],
        },
        "goes on": {
            "pinned": lambda: pinned().to(CARD, non_blocking=True),
            "pinned, into a tensor": lambda: on_card[:2].copy_(pinned(), non_blocking=True),
            "to the host in time": lambda: on_card.to("cpu", non_blocking=True),
            "an index on the card": lambda: on_card[on_card],
            "a place on the card": lambda: on_card.masked_fill_(mask, 0),
            "a slice": lambda: on_card[1:3],
            "on the host": lambda: torch.tensor(2).item(),
        },
    }
    for group, each in expressions.items():
        finding.facts[group] = {}
        for name, run_it in each.items():
            before = len(card.waits)
            with HostWaits(card):
                run_it()
            finding.facts[group][name] = len(card.waits) - before


@contextlib.contextmanager
def instead(owner: Any, name: str, value: Any) -> Iterator[None]:
    """`value` in place of an attribute."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def planted(
    model: Model, fault: Callable[[], contextlib.AbstractContextManager[None]]
) -> Callable[[Card, Finding], None]:
    """A prefill with a fault in our code."""

    def case(card: Card, finding: Finding) -> None:
        with fault():
            run_prefill(card, finding, model, Prefill())

    return case


def on_the_host(model: Model) -> Callable[[Card, Finding], None]:
    """The inputs of the windows stay where they were listed."""
    import dataclasses

    from marconi.engine.prefill import spans

    right = spans.spans_from_start

    def on_host(where: Any, lengths: Any, _device: Any) -> Any:
        made = right(where, lengths, "cpu")
        return dataclasses.replace(made, slots=made.slots.to(CARD))

    return planted(model, lambda: instead(spans, "spans_from_start", on_host))


def waiting(model: Model) -> Callable[[Card, Finding], None]:
    """The working slots are looked at."""
    from marconi.engine.prefill import spans

    right = spans.working_slots

    def look(metadata: Any, rows: Any) -> Any:
        slots = right(metadata, rows)
        int(slots[0])
        return slots

    return planted(model, lambda: instead(spans, "working_slots", look))


def pageable(model: Model) -> Callable[[Card, Finding], None]:
    """The working slots are copied from memory that is not pinned."""
    import torch

    from marconi.engine.prefill import spans

    def copy(_metadata: Any, rows: Any) -> Any:
        return torch.tensor(rows).to(CARD, non_blocking=True)

    return planted(model, lambda: instead(spans, "working_slots", copy))


def unmet(model: Model) -> Callable[[Card, Finding], None]:
    """The hook after the chunk kernel sees nothing."""
    from marconi.engine.prefill import operands

    return planted(model, lambda: instead(operands, "keep_gated_delta_rule", lambda *_: None))


if __name__ == "__main__":
    main()
