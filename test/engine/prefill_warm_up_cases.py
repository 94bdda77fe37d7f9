"""What is compiled after the warm-up, on a card that is not there (`fake_cuda.py`).

    python -m engine.prefill_warm_up_cases

Prints a JSON object: for each family, and for verify steps, how many new compilations of each kernel random batches
through the real hooks met after the engine's warm-up, and how many without it. What Triton compiles for is what its
own binder says; what FlashInfer does, the dtypes and extents of its operands, where it is to leave states after chunks.
"""

import json
import logging
import random
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import torch
from torch._subclasses.fake_tensor import FakeTensor
from triton.runtime import jit

from .fake_cuda import Card, HostWaits, Owners, Tensors
from .fake_cuda_cases import Finding, run_prefill
from .fake_cuda_models import (
    DeltaHeads,
    Model,
    Prefill,
    empty,
    gated_delta_net,
    hybrid_backend,
    instead,
    kimi_delta_attention,
    mamba2,
    stand_in,
)
from .fake_cuda_verify import run_verify_steps, speculating_pool

NUM_BATCHES: Final = 12
OURS: Final = "sgl_kernel_ext."

Specialization = tuple[str, str]
"""A kernel, and what it is compiled for."""


def main() -> None:
    """Print what every family met."""
    import marconi

    card = Card(Owners({"ours": (Path(marconi.__file__).parent,)}))
    card.put_in()
    # Bytes from a boundary as a card's allocator has it: Triton asks how pointers are aligned.
    address: Any = lambda tensor: (  # noqa: E731
        256 * tensor.untyped_storage()._cdata + tensor.itemsize * tensor.storage_offset()
    )
    FakeTensor.data_ptr = address  # type: ignore[method-assign]
    logging.disable(logging.WARNING)
    from sglang.srt.layers.attention.linear import gdn_backend
    from sglang.srt.layers.attention.mamba.mamba2_metadata import Mamba2Metadata

    from marconi.engine import faults
    from marconi.engine.plugin import touch, upstream
    from marconi.engine.prefill.warm_up import warm_up_drafts, warm_up_prefills

    class Raised(faults.Faults):
        """What a hook raises ends the program."""

        def catch(self, _hook: str, error: Exception) -> None:
            raise error

    faults.OF_PROCESS.set(Raised())
    touch.hook_into(upstream.PREFILLS, upstream.KERNELS)
    met: Counter[Specialization] = Counter()
    listen(met)
    found: dict[str, Any] = {}
    with Tensors(allow_non_fake_inputs=True):
        stand_in()
        gates: Any = lambda _A, a, _b, _bias: tuple(empty(1, *a.shape, dtype="float32") for _ in range(2))  # noqa: E731
        gdn_backend.fused_gdn_gating = gates
        for name, model in models(met).items():
            met.clear()
            with HostWaits(card):
                warm_up_prefills(SimpleNamespace(attn_backend=hybrid_backend(model)[0], dtype=torch.bfloat16))
            compiled = set(met)
            met.clear()
            rng = random.Random(0)  # noqa: S311 - a workload, not a secret
            for _ in range(NUM_BATCHES):
                batch, finding = random_batch(rng), Finding()
                num_rows = logical_chunks(batch.lengths, model.chunk_size)
                rows: Any = staticmethod(lambda *_, num=num_rows: (empty(num, dtype="int32"),) * 2)
                with instead(Mamba2Metadata, "_query_start_loc_to_chunk_indices_offsets", rows):
                    run_prefill(card, finding, model, batch)
                if set(finding.num_written) != {finding.num_layers}:
                    raise RuntimeError(f"every layer must write every state, got {finding.num_written}")
            found[name] = after(compiled, met)
        met.clear()
        with HostWaits(card):
            warm_up_drafts(speculating_pool(DeltaHeads(), 4), 4)
        compiled = set(met)
        met.clear()
        for num_requests in (1, 2, 3, 4, 16, 33):
            # A server may change how many drafts it asks for.
            for num_nodes in (1, 2, 4):
                run_verify_steps(card, num_requests, num_nodes)
        found["verify steps"] = after(compiled, met)
    json.dump(found, sys.stdout)


def after(compiled: set[Specialization], met: Counter[Specialization]) -> dict[str, Any]:
    """For how much each kernel that was `met` was not among the `compiled`, and for how much had none been."""
    new, of_all = (Counter(kernel for kernel, _ in keys) for keys in (met.keys() - compiled, met.keys()))
    return {"new": new, "new_without": of_all}


def listen(met: Counter[Specialization]) -> None:
    """Note what each launch of ours would be compiled for."""
    record = jit.JITFunction.run

    def run(kernel: Any, *args: Any, grid: Any = None, **kwargs: Any) -> None:
        # Of SGLang's own kernels, one that is asked for more than SGLang does.
        if kernel.fn.__module__.startswith(OURS) or kwargs.get("TRACK_STATE"):
            bind = kernel.device_caches[0][-1]
            options = {**kwargs, "debug": False, "instrumentation_mode": ""}
            _, specialization, options = bind(*args, **{name: options[name] for name in options if name != "warmup"})
            met[f"{kernel.fn.__module__}.{kernel.fn.__name__}", f"{specialization} {options}"] += 1
        record(kernel, *args, grid=grid, **kwargs)

    jit.JITFunction.run = run


def models(met: Counter[Specialization]) -> dict[str, Model]:
    """A model of each family."""
    return {
        "GDN by Triton": gated_delta_net("TritonGDNKernel"),
        "GDN by FlashInfer": heard(gated_delta_net("FlashInferGDNKernel"), met),
        "KDA by Triton": kimi_delta_attention(),
        "Mamba2": mamba2(),
    }


def heard(model: Model, met: Counter[Specialization]) -> Model:
    """`model`, whose prefills by FlashInfer that leave states after chunks are noted.

    SGLang's own prefills leave none, and have been run before a request is.
    """

    def linear() -> Any:
        made = model.linear()
        kernel = made.kernel_dispatcher.extend_kernel
        prefill: Callable[..., Any] = kernel._prefill_fn

        def run(**given: Any) -> Any:
            if given["state_checkpoints"] is not None:
                names = ("q", "k", "v", "g", "beta", "initial_state", "state_checkpoints")
                met["FlashInfer", str([(given[name].dtype, *given[name].shape[1:]) for name in names])] += 1
            return prefill(**given)

        kernel._prefill_fn = run
        return made

    return replace(model, linear=linear)


def random_batch(rng: random.Random) -> Prefill:
    """Sequences of any length, with and without a prefix, of each some states."""
    lengths = tuple(int(2000 ** rng.uniform(0.1, 1)) for _ in range(rng.choice((1, 1, 2, 3, 8, 16))))
    prefixes = tuple(rng.choice((0, 0, 128, 77)) for _ in lengths)
    planned = {
        (row, prefixes[row] + rng.choice((1, lengths[row], rng.randint(1, lengths[row]))))
        for row in rng.choices(range(len(lengths)), k=rng.choice((1, 2, 5, 16)))
    }
    return Prefill(lengths, prefixes, tuple(sorted(planned)))


def logical_chunks(lengths: tuple[int, ...], chunk_size: int) -> int:
    """The chunks of a grid over the batch, cut where a sequence starts inside one."""
    starts = [sum(lengths[:row]) for row in range(1, len(lengths))]
    return -(-sum(lengths) // chunk_size) + sum(start % chunk_size != 0 for start in starts)


if __name__ == "__main__":
    main()
