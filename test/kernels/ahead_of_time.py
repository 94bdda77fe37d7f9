"""Compile the kernels for CUDA targets without a device, and list what they take of a chip; or what batches compile.

    python -m kernels.ahead_of_time resources TARGET     what each compilation takes
    python -m kernels.ahead_of_time specializations      how many of each kernel random batches compile, and how many
                                                         after the warm-up

The operators' own launchers run on CPU tensors. In the place of Triton's driver stands one that names a target, and a
launch ends where it would load the compiled kernel; so signature, constants and what Triton specializes for are those
that a device would be given. Registers, spills and the stack are what ptxas says of each. Prints JSON, one value.

It is a program, as whether Triton interprets is settled when it is imported, and as nothing is to be put back.
"""

import io
import json
import random
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from sgl_kernel_ext import draft_ends, gated_delta_rule, kda, launch, mamba2, short_conv, state_copy, warm_up
from sgl_kernel_ext.checkpoints import (
    Checkpoints,
    last_chunks,
    spans_after_chunks,
    spans_from_start,
    spans_over_batch,
    spans_per_sequence,
)
from sgl_kernel_ext.state_pool import StateSlots

NUM_SLOTS: Final = 90
NUM_BATCHES: Final = 400
WITH_FLOAT32: Final = (90, 120)
"""Where inputs in float32 are compiled as well, which take the most: the card that is measured, and the one with the
least shared memory."""
SPILLS: Final = "a kernel that spills"
INVALID: Final = "a kernel that does not compile"
"""Cases that are broken on purpose."""


class Target:
    """What Triton asks of a driver while it compiles for compute capability `capability`."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class Compiled:
    """What one compilation takes, or why there is none."""

    case: str
    kernel: str
    registers: int = -1
    stack_bytes: int = -1
    spilled_bytes: int = -1
    shared_bytes: int = -1
    is_exact: bool = False
    """Whether products are those of float32."""
    error: str = ""


class Delta(NamedTuple):
    """A layer of the gated delta rule, or of KDA."""

    num_key_heads: int
    num_heads: int
    dim: int = 128

    @property
    def num_channels(self) -> int:
        return (2 * self.num_key_heads + self.num_heads) * self.dim


class Mamba(NamedTuple):
    num_groups: int
    num_heads: int
    head_dim: int
    state_dim: int
    chunk_size: int

    @property
    def num_channels(self) -> int:
        return self.num_heads * self.head_dim + 2 * self.num_groups * self.state_dim


PART: Final = "one of 4 ranks"
GATED: Final = {"Qwen3-Next": Delta(16, 32), f"Qwen3-Next, {PART}": Delta(4, 8)}
KIMI: Final = {"Kimi-Linear": Delta(32, 32), f"Kimi-Linear, {PART}": Delta(8, 8)}
MAMBA: Final = {"Nemotron-H-8B": Mamba(8, 128, 64, 128, 128), "Granite-4": Mamba(1, 128, 64, 128, 256)}


def state_pool(layer: Delta | Mamba, dtype: torch.dtype) -> Tensor:
    extents = (layer.head_dim, layer.state_dim) if isinstance(layer, Mamba) else (layer.dim, layer.dim)
    return torch.empty(NUM_SLOTS, layer.num_heads, *extents, dtype=dtype)


def windows(name: str, layer: Delta | Mamba) -> Tensor:
    """KDA's pool keeps the window before the channels."""
    if name in KIMI:
        return torch.empty(NUM_SLOTS, 3, layer.num_channels, dtype=torch.bfloat16).mT
    return torch.empty(NUM_SLOTS, layer.num_channels, 3, dtype=torch.bfloat16)


def warm_ups(dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], None]]]:
    """The models' calls of `warm_up` with inputs of `dtype`."""
    for state_dtype in (torch.float32, torch.bfloat16):
        for name, layer in {**GATED, **KIMI, **MAMBA}.items():
            for call in state_warm_ups(name, layer, state_pool(layer, state_dtype), dtype):
                yield f"{name}, states in {state_dtype}", call
    for name, layer in {**GATED, **KIMI, **MAMBA}.items():
        pool = windows(name, layer)
        yield name, partial(warm_up.short_conv_checkpoint, pool, pool.new_empty(1, pool.shape[1], dtype=dtype))
        yield name, partial(warm_up.state_copies, pool)
    yield "drafts", partial(warm_up.find_draft_ends, torch.zeros(64, 2, dtype=torch.int64), max_depth=4)


def state_warm_ups(name: str, layer: Delta | Mamba, pool: Tensor, dtype: torch.dtype) -> Iterator[Callable[[], None]]:
    if isinstance(layer, Mamba):
        of_layer: dict[str, Any] = {"num_groups": layer.num_groups, "chunk_size": layer.chunk_size}
        calls: tuple[Callable[..., None], ...] = (warm_up.mamba2_checkpoint,)
    else:
        of_layer = {"num_key_heads": layer.num_key_heads}
        calls = (warm_up.gated_delta_rule_checkpoint, warm_up.gated_delta_rule_advance)
        if name in KIMI:
            calls = (warm_up.kda_checkpoint,)
    for call in calls:
        yield partial(call, pool, **of_layer, dtype=dtype)
    yield partial(warm_up.state_copies, pool)


@triton.jit
def _invalid_kernel(x):
    tl.store(x + tl.arange(0, 3), 0)


def spill() -> None:
    """Multiply exactly in blocks that do not fit into registers."""
    launch.tiling.cache_clear()
    largest, launch._MAX_EXACT_BLOCK = launch._MAX_EXACT_BLOCK, launch.MAX_BLOCK
    layer = GATED["Qwen3-Next"]
    pool = state_pool(layer, torch.float32)
    warm_up.gated_delta_rule_checkpoint(pool, num_key_heads=layer.num_key_heads, dtype=torch.float32)
    launch._MAX_EXACT_BLOCK = largest
    launch.tiling.cache_clear()


def resources(capability: int) -> list[Compiled]:
    """Compile for a target what models need, in bfloat16 perhaps in float32, and what must be found broken."""
    stand_in(capability)
    knobs.nvidia.dump_ptxas_log = True
    found: list[Compiled] = []
    compile_only = JITFunction.run
    case = ""

    def run(kernel: Any, *args: Any, **kwargs: Any) -> None:
        with redirect_stdout(io.StringIO()) as log:
            made = compile_only(kernel, *args, **kwargs)
        said = log.getvalue()
        if said:  # Else it has been compiled for another case.
            stack, *spilled = map(int, re.findall(r"(\d+) bytes (?:stack frame|spill stores|spill loads)", said))
            (registers,) = map(int, re.findall(r"Used (\d+) registers", said))
            taken = (registers, stack, sum(spilled), made.metadata.shared)
            found.append(Compiled(case, name_of(kernel), *taken, kwargs.get("PRECISION") == "ieee"))

    JITFunction.run = run
    wide = warm_ups(torch.float32) if capability in WITH_FLOAT32 else ()
    for case, call in (
        *warm_ups(torch.bfloat16),
        *((f"{case}, inputs in float32", call) for case, call in wide if PART not in case),
        (SPILLS, spill),
        (INVALID, partial(_invalid_kernel[1,], torch.empty(4))),
    ):
        try:
            call()
        except triton.CompilationError as error:
            found.append(Compiled(case, "", error=str(error)))
    return found


def specializations() -> dict[str, dict[str, int]]:
    """How many of each kernel the launches of random batches meet, and how many that `warm_ups` had not met."""
    stand_in(90)
    met: set[tuple[str, str]] = set()

    def look(*, key: str, fn: Any, **_: Any) -> bool:
        """In the place of compiling."""
        met.add((name_of(fn.jit_function), key))
        return True

    knobs.runtime.jit_cache_hook = look
    for _, call in warm_ups(torch.bfloat16):
        call()
    warmed = set(met)
    met.clear()
    rng = random.Random(0)  # noqa: S311 - a workload, not a secret
    layers = {**GATED, **KIMI, **MAMBA}
    pools = {
        (name, dtype): (state_pool(layer, dtype), windows(name, layer))
        for name, layer in layers.items()
        for dtype in (torch.float32, torch.bfloat16)
    }
    for _ in range(NUM_BATCHES):
        name, dtype = rng.choice(list(pools))
        prefill(rng, layers[name], *pools[name, dtype], is_kda=name in KIMI)
        verify_step(rng)
    return {way: Counter(name for name, _ in keys) for way, keys in (("cold", met), ("warm", met - warmed))}


def verify_step(rng: random.Random) -> None:
    """Find who ends in one random step over drafts; a server may change how many there are."""
    batch, num_nodes = rng.choice((1, 2, 3, 4, 16, 33)), rng.choice((1, 2, 4, 16))
    depth = rng.choice((1, num_nodes))

    def numbers(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        """Anywhere in a longer vector."""
        size = torch.Size(shape).numel()
        return torch.zeros(size + 4, dtype=dtype)[rng.randrange(4) :][:size].view(shape)

    draft_ends.find(
        draft_ends.new(batch, "cpu"),
        tokens_out=numbers(batch * num_nodes, dtype=torch.int32),
        accepted=numbers(batch, depth, dtype=torch.int32),
        num_accepted=numbers(batch, dtype=torch.int32),
        num_before=numbers(batch),
        num_nodes=num_nodes,
        stop_tokens=numbers(batch, rng.choice((0, 1, 2, 16))),
        max_lengths=numbers(batch),
        by_host=numbers(batch, dtype=torch.bool),
        tracking_slots=torch.zeros(64, 2, dtype=torch.int64),
        requests=numbers(batch),
        turns=numbers(batch),
    )


def prefill(rng: random.Random, layer: Delta | Mamba, pool: Tensor, windows: Tensor, *, is_kda: bool) -> None:
    """Keep states of one random batch in a layer, as a server does."""
    lengths = [min(int(9000 ** rng.uniform(0, 1.01)), 9000) for _ in range(rng.choice((1, 1, 2, 3, 8, 16, 40)))]
    sequences = [rng.randrange(len(lengths)) for _ in range(rng.choice((1, 2, 3, rng.randint(1, 40))))]
    positions = [
        rng.choice((rng.randint(1, lengths[each]), rng.randint(1, min(lengths[each], 64)))) for each in sequences
    ]
    num_tokens, num_sequences = sum(lengths), len(lengths)
    # Anywhere in a longer vector, as an allocator hands them out.
    slots, others = (half[rng.randrange(4) :][: len(sequences)] for half in torch.randperm(NUM_SLOTS).chunk(2))
    where = Checkpoints(sequences, positions, slots)

    def narrow(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16)

    own = torch.full((num_sequences + 4,), -1, dtype=torch.int32)[rng.randrange(4) :][:num_sequences]
    continues = torch.empty(num_sequences + 4, dtype=torch.bool)[rng.randrange(4) :][:num_sequences]
    short_conv.checkpoint(
        narrow(num_tokens, layer.num_channels),
        states=rng.choice((None, StateSlots(windows, own, continues))),
        spans=spans_from_start(where, lengths, "cpu"),
        pool=windows,
    )
    for each in (windows, pool):
        state_copy.copy(each, slots, others)
    initial_states = torch.empty(num_sequences, *pool.shape[1:], dtype=pool.dtype)
    if isinstance(layer, Mamba):
        num_chunks = -(-num_tokens // layer.chunk_size)
        delta, sums = (torch.empty(layer.num_heads, num_chunks, layer.chunk_size) for _ in range(2))
        # x and B lie in the convolution's output.
        x, B, _ = narrow(num_tokens, layer.num_channels).split(
            (layer.num_heads * layer.head_dim, *(layer.num_groups * layer.state_dim,) * 2), dim=1
        )
        mamba2.checkpoint(
            x.unflatten(1, (layer.num_heads, layer.head_dim)),
            delta,
            sums,
            B.unflatten(1, (layer.num_groups, layer.state_dim)),
            torch.empty(num_chunks, *pool.shape[1:], dtype=pool.dtype),
            initial_states=rng.choice((None, initial_states)),
            chunk_size=layer.chunk_size,
            spans=spans_over_batch(where, lengths, layer.chunk_size, "cpu"),
            pool=pool,
        )
        return
    k, values = narrow(num_tokens, layer.num_key_heads, layer.dim), narrow(num_tokens, layer.num_heads, layer.dim)
    chunk_states = narrow(sum(-(-each // 64) for each in lengths), *pool.shape[1:])
    spans = spans_per_sequence(where, lengths, 64, "cpu")
    g, beta = torch.empty(num_tokens, layer.num_heads), torch.empty(num_tokens, layer.num_heads)
    if is_kda:
        sums = torch.empty(num_tokens, layer.num_heads, layer.dim)
        spans = spans_per_sequence(where, lengths, 64, "cpu", last_chunks(where, num_sequences, 64))
        snapshots = torch.empty(num_sequences, *pool.shape[1:])
        kda.checkpoint(k, values, sums, chunk_states, spans=spans, pool=pool, log_base=2.0, snapshots=snapshots)
        return
    gated_delta_rule.checkpoint(k, values, g, chunk_states, spans=spans, pool=pool)
    spans = spans_after_chunks(where, lengths, 64, "cpu")
    num_rows = sum(each // 64 for each in lengths)
    gated_delta_rule.advance(
        k,
        values,
        g,
        beta,
        torch.empty(num_rows, *pool.shape[1:]) if num_rows else None,
        spans=spans,
        pool=pool,
        initial_states=initial_states if spans.has_no_chunk else None,
    )


def stand_in(capability: int) -> None:
    """Let operators launch for a target, up to where a launch would load a compiled kernel."""
    driver.set_active(Target(capability))
    launch.runs_kernels = lambda _: True
    run = JITFunction.run

    def compile_only(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        return run(kernel, *args, **{**kwargs, "warmup": True})

    JITFunction.run = compile_only


def name_of(kernel: Any) -> str:
    return f"{kernel.fn.__module__}.{kernel.fn.__name__}"


def main(command: str, *target: str) -> None:
    if command == "resources":
        print(json.dumps([asdict(each) for each in resources(int(*target))]))
    else:
        print(json.dumps(specializations()))


if __name__ == "__main__":
    main(*sys.argv[1:])
