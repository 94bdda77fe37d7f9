"""SGLang's own backends and launchers under the prefill hooks, on a card that is not there (`fake_cuda.py`).

Run as a program, it prints a JSON object: what each case found, by its name. Two recurrent layers run in each, so that
one that writes nothing shows. A planted fault is a case like any other.
"""

import contextlib
import json
import logging
import re
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import sgl_kernel_ext

from .fake_cuda import CARD, Card, HostWaits, Launch, Owners, Tensors, Wait
from .fake_cuda_faults import Fault, model_of, places
from .fake_cuda_models import (
    HEAD_DIM,
    NUM_CHANNELS,
    NUM_HEADS,
    NUM_KEY_HEADS,
    NUM_LAYERS,
    DeltaHeads,
    Model,
    Prefill,
    chunks_of,
    empty,
    forward_batch_of,
    gated_delta_net,
    hybrid_backend,
    instead,
    kimi_delta_attention,
    linear_layer,
    mamba2,
    stand_in,
)
from .fake_cuda_verify import commit, run_chain_steps, run_verify_steps, speculating_pool, verified, verifying_batch


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
    copies: list[tuple[str, str]] = field(default_factory=list)
    """To the card: whose line, and the line."""
    results: list[str] = field(default_factory=list)
    """What each layer returned: dtype, shape and device."""
    num_operations: list[int] = field(default_factory=list)
    """For each verify step, the operations and launches on the card that are ours."""
    facts: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    """The exception that ended it."""


class Prefilled(NamedTuple):
    """What a prefill leaves to the steps after it."""

    hybrid: Any
    linear: Any
    scheduled: Any
    """The scheduler's batch, which goes on with its plan."""
    planned: list[Any]


def put_in() -> Card:
    """Put a card in, on which what a hook raises ends its case."""
    import sglang

    import marconi

    folders = {
        "ours": (Path(marconi.__file__).parent, Path(sgl_kernel_ext.__file__).parent),
        "SGLang's": (Path(sglang.__file__).parent,),
    }
    card = Card(Owners(folders))
    card.put_in()
    logging.disable(logging.WARNING)
    from marconi.engine import faults

    class Raised(faults.Faults):
        """What a hook raises ends its case."""

        def catch(self, _hook: str, error: Exception) -> None:
            raise error

    faults.OF_PROCESS.set(Raised())
    return card


def main() -> None:
    """Print what every case found."""
    card = put_in()
    from marconi.engine.plugin import touch, upstream

    fault = Fault()
    fault.plant()
    touch.hook_into(upstream.PREFILLS, upstream.DRAFTS, upstream.KERNELS)
    with Tensors(allow_non_fake_inputs=True):
        stand_in()
        found = {name: asdict(run(card, case)) for name, case in (cases() | faulty(fault)).items()}
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
    finding.launches, finding.waits, finding.copies = [*card.launches], [*card.waits], [*card.copies]
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
        "Mamba2": prefill(mamba2()),
        "a ragged batch": prefill(gdn, Prefill((4000, *[8] * 12), (0,) * 13, ((0, 1000), (0, 4000), (3, 4)))),
        "a padded replay": padded_replay(gdn),
        "verify steps": verify_steps,
        "a chain's step": partial(chain_step, keeps_states=True),
        "a chain's step from inputs": partial(chain_step, keeps_states=False),
        "a state of a verify step": state_of_a_step,
        "layers of Mamba": layers_of_mamba,
        "what waits": watched,
        "planted: a tensor on the host": on_the_host(gdn),
        "planted: a wait": waiting(gdn),
        "planted: pageable memory": pageable(gdn),
        "planted: blocking copies of a pass": blocking(gated_delta_net("AnotherGDNKernel")),
        "planted: copies of passes": copied_apart(gated_delta_net("AnotherGDNKernel")),
        "planted: tracked nodes without slots": nodes_without_slots,
        "planted: copies of stops": stops_apart,
        "planted: a kernel that is not met": unmet(gdn),
    }


def prefill(model: Model, batch: Prefill | None = None) -> Callable[[Card, Finding], None]:
    """A prefill of `batch` by every layer of `model`."""

    def case(card: Card, finding: Finding) -> None:
        run_prefill(card, finding, model, batch or Prefill())

    return case


def run_prefill(card: Card, finding: Finding, model: Model, batch: Prefill) -> Prefilled:
    from marconi.engine.cache.scheduler import PLAN
    from marconi.engine.prefill import hooks
    from marconi.engine.prefill.checkpoint import Checkpoint

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
                finding.results.append(shape_of(model.layer(hybrid, linear, forward_batch, layer, sum(batch.lengths))))
    finding.num_written = [each.num_parts for each in planned]
    return Prefilled(hybrid, linear, scheduled, planned)


def shape_of(result: Any) -> str:
    """All that is known of what a layer returned."""
    return "" if result is None else f"{result.dtype} {tuple(result.shape)} {result.device}"


def faulty(fault: Fault) -> dict[str, Callable[[Card, Finding], None]]:
    """A prefill for every hook around a kernel and every operator: it raises in each layer."""

    def raising(where: str, when: str) -> Callable[[Card, Finding], None]:
        def case(card: Card, finding: Finding) -> None:
            finding.facts["like"], model = model_of(where)
            with fault.raised(where, when) as noticed:
                run_prefill(card, finding, model, Prefill())
            finding.facts |= noticed

        return case

    return {f"fault: {where} {when}": raising(where, when) for where, when in places()}


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


def chain_step(card: Card, finding: Finding, *, keeps_states: bool) -> None:
    """A step of drafts that DSPARK's own code commits."""
    run_chain_steps(card, num_requests=4, num_nodes=4, keeps_states=keeps_states)


def verify_steps(card: Card, finding: Finding) -> None:
    """Verify steps of the same requests, whose states at ends are left in tracking slots."""
    finding.num_operations += run_verify_steps(card, num_requests=4, num_nodes=4)


def state_of_a_step(card: Card, _finding: Finding) -> None:
    """A state that a verify step kept is copied to a slot, by what the host knows."""
    from marconi.engine.cache import speculation

    with HostWaits(card):
        speculation.copy_state(speculating_pool(DeltaHeads(), 4), 1, 2, empty(1, dtype="int64"))


def layers_of_mamba(_card: Card, finding: Finding) -> None:
    """What SGLang's breakable prefill graph makes of the recurrent layers of every model that calls a backend itself.

    A layer is as its class fills it in `__init__`; those of other models break out in `RadixLinearAttention` and
    `RadixAttention`.
    """
    import importlib
    import inspect
    import pkgutil

    import torch
    from sglang.srt import models
    from sglang.srt.model_executor.model_runner_components import cuda_graph_setup, layer_setup

    is_recurrent = re.compile(r"= (MambaMixer\d?|JetBlock)\(")
    for each in pkgutil.iter_modules(models.__path__):
        file = Path(models.__path__[0], f"{each.name}.py")
        source = "" if each.ispkg else file.read_text(encoding="utf-8")
        if not is_recurrent.search(source):
            continue
        module = importlib.import_module(f"{models.__name__}.{each.name}")
        (owner,) = (
            found
            for found in vars(module).values()
            if inspect.isclass(found)
            and found.__module__ == module.__name__
            and is_recurrent.search(inspect.getsource(found))
        )
        layer = owner.__new__(owner)
        torch.nn.Module.__init__(layer)
        for name in re.findall(r"self\.(\w+)(?:, self\.\w+)* = ", inspect.getsource(owner.__init__)):
            setattr(layer, name, SimpleNamespace())
        attention, *_ = layer_setup.compute_attention_and_moe_layers(SimpleNamespace(layers=[layer]))
        finding.facts[each.name] = {
            "keeps_graph": cuda_graph_setup.has_standard_gqa_for_all_local_layers(
                attention_layer_count=sum(found is not None for found in attention), start_layer=0, end_layer=1
            ),
            "breaks": bool(re.search(r"= eager_on_graph\(True\)\(\s*\w*mamba\w*\s*\)", source)),
            "architectures": [found.__name__ for found in _as_list(module.EntryClass)],
        }


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


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
            "which are set": lambda: mask.nonzero(as_tuple=True),
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


def planted(
    model: Model, fault: Callable[[], contextlib.AbstractContextManager[None]]
) -> Callable[[Card, Finding], None]:
    """A prefill with a fault in our code."""

    def case(card: Card, finding: Finding) -> None:
        with fault():
            run_prefill(card, finding, model, Prefill())

    return case


def on_the_host(model: Model) -> Callable[[Card, Finding], None]:
    """The inputs of the windows, which follow the rows of ends, stay where they were listed."""
    from marconi.engine.prefill import spans

    right: Any = vars(spans)["moved"]

    def on_host(vectors: Any, device: Any) -> Any:
        rows, *others = right(vectors, device)
        return [rows, *vectors[1:5], *others[4:]]

    return planted(model, lambda: instead(spans, "moved", on_host))


def waiting(model: Model) -> Callable[[Card, Finding], None]:
    """The working slots are looked at."""
    from marconi.engine.prefill import spans

    right: Any = vars(spans)["working_slots"]

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
        return torch.zeros(rows.shape, dtype=torch.int64).to(CARD, non_blocking=True)

    return planted(model, lambda: instead(spans, "working_slots", copy))


def blocking(model: Model) -> Callable[[Card, Finding], None]:
    """What passes are given is made on the card, each vector by itself."""
    import torch

    from marconi.engine.prefill import passes

    def made(vectors: Any, card: Any) -> Any:
        return [torch.tensor([0] * len(each), device=card) for each in vectors]

    return planted(model, lambda: instead(passes, "moved", made))


def copied_apart(model: Model) -> Callable[[Card, Finding], None]:
    """Vectors of passes are copied one by one."""
    from marconi.engine.prefill import passes

    right: Any = vars(passes)["moved"]

    def each_alone(vectors: Any, card: Any) -> Any:
        return [right([each], card)[0] for each in vectors]

    return planted(model, lambda: instead(passes, "moved", each_alone))


def stops_apart(card: Card, finding: Finding) -> None:
    """Stop conditions are copied one by one."""
    from marconi.engine.cache import speculation

    right: Any = vars(speculation)["moved"]
    with instead(speculation, "moved", lambda vectors, card: [right([each], card)[0] for each in vectors]):
        verify_steps(card, finding)


def nodes_without_slots(card: Card, _finding: Finding) -> None:
    """SGLang's commit of a verify step is given the nodes that it tracks, and no slots for them."""
    batch = verifying_batch(4, 4, DeltaHeads())
    batch.tree_cache.cuts_prefills = False
    step = verified(batch, 4, 4)
    batch.mamba_track_indices = None
    commit(card, batch, step)


def unmet(model: Model) -> Callable[[Card, Finding], None]:
    """The hook after the chunk kernel sees nothing."""
    from marconi.engine.prefill import operands

    return planted(model, lambda: instead(operands, "keep_gated_delta_rule", lambda *_: None))


if __name__ == "__main__":
    main()
