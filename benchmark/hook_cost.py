"""Host time that keeping states adds to a prefill, a recurrent layer of the gated delta rule.

On a card these layers run eagerly on the scheduler's thread, between the captured parts of a prefill, and after a hit
little else keeps the card busy: what the host adds to them is added to the time to first token. No card is needed to
measure it: SGLang is imported as on a Hopper card, its own layer runs on small tensors of the host, and every Triton
launch, SGLang's and ours, ends where the driver would be called: arguments are bound, specialized and looked up, or, by
our launchers after a batch's first layer, compared with the last ones and handed to Triton's compilation.

    layer     `HybridLinearAttnBackend.forward` as SGLang has it, the mean over the layers of a forward
    idle      the same with hooks installed and nothing planned
    inside    the same with a state inside the batch and one at its end
    end       the same with a state at its end alone

What is added counts all that a batch pays: the choice of its way and the copies after its last layer, over its layers.
They are also shown apart. Shapes are those of Qwen3-Next on eight cards. Forwards with and without take turns, the
garbage collector is off, and the least of the rounds counts for each layer. No slot is looked at, as none is on a card.

    python benchmark/hook_cost.py [--rounds N] [--check] [--json FILE]

Exit status 1, with `--check`: more than `MAX_ADDED` is added, which it is.
"""

import argparse
import gc
import importlib.abc
import importlib.machinery
import json
import logging
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch

MAX_ADDED = 0.08
FORWARDS_A_TURN = 3
NUM_LAYERS, NUM_SLOTS, NUM_TOKENS = 36, 16, 512
KEY_HEADS, VALUE_HEADS, WIDTH = 2, 4, 128
CHANNELS = (2 * KEY_HEADS + VALUE_HEADS) * WIDTH


class _Stub(ModuleType):
    """A module in which everything is found."""

    __path__: list[str] = []  # noqa: RUF012 - what Python asks of a package

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=name)


class _Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Stand-ins for SGLang's compiled kernels, which load a driver; a layer of the gated delta rule calls none."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        """A stub for what is in the package of those kernels."""
        is_stub = name.partition(".")[0] == "sgl_kernel"
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if is_stub else None

    def create_module(self, spec: Any) -> ModuleType:
        """It is made empty."""
        return _Stub(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """It stays empty."""


class _Driver:
    """What Triton asks of its driver before a launch."""

    def get_current_target(self) -> Any:
        """A Hopper card."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_benchmarker(self) -> Any:
        """Nothing is tuned."""
        return None

    def get_current_device(self) -> int:
        """The only one."""
        return 0

    def get_current_stream(self, device: object = None) -> int:
        """The only one."""
        return 0

    def get_active_torch_device(self) -> torch.device:
        """Where the tensors are."""
        return torch.device("cpu")


def pretend_hopper() -> None:
    """Let SGLang take this process for one with a Hopper card; to be called before it is imported."""
    os.environ.pop("SGLANG_PLATFORM", None)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    card = SimpleNamespace(
        name="NVIDIA H100 80GB HBM3",
        major=9,
        minor=0,
        multi_processor_count=132,
        total_memory=80 << 30,
        warp_size=32,
        L2_cache_size=50 << 20,
        shared_memory_per_block_optin=232_448,
        shared_memory_per_multiprocessor=233_472,
        is_integrated=False,
    )
    answers: dict[str, Any] = {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_capability": (9, 0),
        "get_device_properties": card,
        "get_device_name": card.name,
        "device": nullcontext(),
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)
    torch.get_device_module = lambda *_: torch.cuda
    sys.meta_path.insert(0, _Stubs())


def stop_launches() -> None:
    """Let a Triton launch end after its arguments are bound and its kernel is looked up.

    It returns a compilation that launches nothing, as one is returned to who launches it again by itself.
    """
    from triton.compiler import CompiledKernel
    from triton.runtime import autotuner, driver, jit

    driver.set_active(_Driver())

    class Compiled(CompiledKernel):
        """Triton's own, without a binary."""

        def __init__(self) -> None:
            self.name, self.src = "", None
            self.module = self.function = self.packed_metadata = self._run = lambda *_: None

        def __del__(self) -> None:
            """Nothing was loaded."""

    compiled = Compiled()

    def launch(self: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> Any:
        kwargs["debug"], kwargs["instrumentation_mode"] = False, ""
        kernels, keys, _, _, bind = self.device_caches[0]
        bound, specialization, options = bind(*args, **kwargs)
        kernels.get(jit.compute_cache_key(keys, specialization, options))
        if callable(grid):
            grid(bound)
        return compiled

    def launch_tuned(self: Any, *args: Any, **kwargs: Any) -> None:
        self.fn.run(*args, **kwargs, **self.configs[0].all_kwargs())

    jit.JITFunction.run = launch
    autotuner.Autotuner.run = launch_tuned


class Layers:
    """The recurrent layers of a model, over SGLang's own backends, and a prefill of one sequence."""

    def __init__(self) -> None:
        from sglang.srt.layers.attention.hybrid_linear_attn_backend import HybridLinearAttnBackend
        from sglang.srt.layers.attention.linear.gdn_backend import GDNAttnBackend
        from sglang.srt.layers.attention.linear.kernels.gdn_triton import TritonGDNKernel
        from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool, MambaPool
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        states = MambaPool.__new__(MambaPool)
        states.mamba_cache = MambaPool.State(
            conv=[torch.zeros(NUM_LAYERS, NUM_SLOTS, CHANNELS, 3, dtype=torch.bfloat16)],
            temporal=torch.zeros(NUM_LAYERS, NUM_SLOTS, VALUE_HEADS, WIDTH, WIDTH),
        )
        pool = HybridReqToTokenPool.__new__(HybridReqToTokenPool)
        pool.mamba_pool, pool.layer_transfer_counter, pool.start_layer = states, None, 0
        pool.mamba_map = {layer: layer for layer in range(NUM_LAYERS)}

        kernel = TritonGDNKernel()
        linear = GDNAttnBackend.__new__(GDNAttnBackend)
        linear.req_to_token_pool, linear.mis_metadata = pool, None
        linear._use_strided_target_verify_qkv = False
        linear.kernel_dispatcher = SimpleNamespace(extend_kernel=kernel, extend=kernel.extend)
        linear.forward_metadata = SimpleNamespace(
            query_start_loc=torch.tensor([0, NUM_TOKENS], dtype=torch.int32),
            mamba_cache_indices=torch.tensor([1], dtype=torch.int32),
            retrieve_next_token=None,
            retrieve_next_sibling=None,
            retrieve_parent_token=None,
            has_mamba_track_mask=False,
            conv_block_table=None,
            state_checkpoint_cu_starts=None,
            num_state_checkpoints=0,
            state_checkpoint_every_n_tokens=0,
        )
        self.hybrid = HybridLinearAttnBackend.__new__(HybridLinearAttnBackend)
        self.hybrid.linear_attn_backend, self.hybrid.full_attn_layers = linear, []
        self.forward_batch = SimpleNamespace(
            forward_mode=ForwardMode.EXTEND,
            logical_forward_mode=ForwardMode.EXTEND,
            extend_prefix_lens=torch.zeros(1, dtype=torch.int32),
            extend_prefix_lens_cpu=[0],
            extend_seq_lens_cpu=[NUM_TOKENS],
            sampling_info=object(),
        )
        gates = torch.zeros(VALUE_HEADS)
        of_all = {
            "num_q_heads": KEY_HEADS,
            "num_k_heads": KEY_HEADS,
            "num_v_heads": VALUE_HEADS,
            "head_q_dim": WIDTH,
            "head_k_dim": WIDTH,
            "head_v_dim": WIDTH,
            "q_dim": KEY_HEADS * WIDTH,
            "k_dim": KEY_HEADS * WIDTH,
            "v_dim": VALUE_HEADS * WIDTH,
            "conv_weights": torch.zeros(CHANNELS, 4, dtype=torch.bfloat16),
            "bias": None,
            "activation": "silu",
            "A_log": gates,
            "dt_bias": gates.bfloat16(),
        }
        self.layers = [SimpleNamespace(layer_id=layer, **of_all) for layer in range(NUM_LAYERS)]
        self.inputs = {
            "mixed_qkv": torch.zeros(NUM_TOKENS, CHANNELS, dtype=torch.bfloat16),
            "a": torch.zeros(NUM_TOKENS, VALUE_HEADS, dtype=torch.bfloat16),
            "b": torch.zeros(NUM_TOKENS, VALUE_HEADS, dtype=torch.bfloat16),
        }

    def run(self) -> list[float]:
        """Every layer, as the model calls it; seconds before the first, which are 0, and of each."""
        times_s = [0.0]
        for layer in self.layers:
            start_s = time.thread_time()
            self.hybrid.forward(layer=layer, forward_batch=self.forward_batch, **self.inputs)
            times_s.append(time.thread_time() - start_s)
        return times_s

    def run_and_keep(self, depths: Sequence[int]) -> list[float]:
        """The same, with states kept at `depths`, if any; raises RuntimeError if a layer did not write one of them."""
        from marconi.engine.cache.scheduler import PLAN
        from marconi.engine.prefill import hooks
        from marconi.engine.prefill.checkpoint import Checkpoint

        checkpoints = [Checkpoint(0, depth, torch.tensor([2 + at])) for at, depth in enumerate(depths)]
        batch = SimpleNamespace(forward_mode=self.forward_batch.forward_mode, **{PLAN: checkpoints})
        runner = SimpleNamespace(attn_backend=self.hybrid, is_draft_worker=False)
        start_s = time.thread_time()
        hooks.on_init_new(self.forward_batch, SimpleNamespace, batch, runner)
        hooks.on_init_forward_metadata(None, self.hybrid, self.forward_batch)
        way_s = time.thread_time() - start_s
        times_s = [way_s, *self.run()[1:]]
        if any(each.num_parts != NUM_LAYERS for each in checkpoints):
            written = [each.num_parts for each in checkpoints]
            raise RuntimeError(f"every state must be written by {NUM_LAYERS} layers, got {written}")
        return times_s


@contextmanager
def placed(functions: Sequence[tuple[Any, str, Any]]) -> Iterator[None]:
    """Put `functions` in their places, (owner, name, function), for a while."""
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in functions]
    for owner, name, function in functions:
        setattr(owner, name, function)
    try:
        yield
    finally:
        for owner, name, function in before:
            setattr(owner, name, function)


def measure(num_rounds: int) -> dict[str, list[float]]:
    """Microseconds before the first layer and of each, the least of all rounds, by the names above."""
    from sglang.kernels.ops.attention.fla import chunk
    from sglang.srt.layers.attention.hybrid_linear_attn_backend import HybridLinearAttnBackend
    from sglang.srt.layers.attention.linear import gdn_backend
    from sglang.srt.layers.attention.mamba import causal_conv1d

    from marconi.engine.plugin import touch, upstream
    from sgl_kernel_ext import launch, state_pool

    places = [
        (HybridLinearAttnBackend, "forward"),
        (gdn_backend, "causal_conv1d_fn"),
        (causal_conv1d, "_causal_conv1d_fn_triton"),
        (chunk, "chunk_gated_delta_rule_fwd_h"),
    ]
    own = [(owner, name, getattr(owner, name)) for owner, name in places]
    touch.hook_into(upstream.PREFILLS, upstream.KERNELS)
    layers = Layers()
    # The tensors stand for a card's.
    with placed([(each, "runs_kernels", lambda _: True) for each in (launch, state_pool)]):
        best: dict[str, list[float]] = {}

        def timed(name: str, work: Callable[[], list[float]]) -> None:
            # The first after another kind finds Python's own caches cold.
            for _ in range(FORWARDS_A_TURN):
                found = work()
                best[name] = list(map(min, best.get(name, found), found))

        gc.disable()
        for number in range(num_rounds + 1):
            with placed(own):
                timed("layer", layers.run)
            timed("idle", lambda: layers.run_and_keep([]))
            timed("inside", lambda: layers.run_and_keep([100, NUM_TOKENS]))
            timed("end", lambda: layers.run_and_keep([NUM_TOKENS]))
            if not number:
                # What is imported, compiled and cached on first use is no layer's.
                best.clear()
        gc.enable()
    return {name: [1e6 * each for each in times_s] for name, times_s in best.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; with `--check` the exit status says whether the bar is met."""
    parser = argparse.ArgumentParser(description="Host time that keeping states adds to a recurrent layer.")
    parser.add_argument("--rounds", type=int, default=100, help="turns of each kind (default: 100)")
    parser.add_argument("--check", action="store_true", help="exit status 1 where more than 8 %% is added")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    given = parser.parse_args(arguments)
    if given.rounds < 1:
        parser.error(f"--rounds must be 1 or more, got --rounds {given.rounds}")
    pretend_hopper()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    stop_launches()
    found = measure(given.rounds)
    layer_us = sum(found["layer"]) / NUM_LAYERS
    print(f"a layer of SGLang's own {layer_us:28.1f} us")
    added = {name: sum(found[name]) / NUM_LAYERS - layer_us for name in ("idle", "inside", "end")}
    print(f"+ {'hooks installed, nothing planned':30} {added['idle']:17.1f} us {added['idle'] / layer_us:7.1%}")
    for name, kept in (("inside", "a state inside, one at the end"), ("end", "a state at the end")):
        way, *layers, last = (each - own for each, own in zip(found[name], found["layer"], strict=True))
        print(f"+ {kept:30} {added[name]:19.1f} us {added[name] / layer_us:7.1%}")
        print(
            f"      the way of a batch {way:.1f} us, a layer {statistics.median(layers):.1f} us, the last {last:.1f} us"
        )
    if given.json is not None:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        document = {"layer_us": layer_us, **{f"{name}_us": each for name, each in added.items()}}
        given.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return int(given.check and max(added.values()) > MAX_ADDED * layer_us)


if __name__ == "__main__":
    sys.exit(main())
