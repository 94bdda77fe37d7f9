"""The CPU as SGLang's platform: memory, backends, and defaults that suit a host which does more than serve.

SGLang sizes its pools by free device memory, which on a CPU is all of the host's: unbounded, a tiny model gets a
hundred thousand state slots and takes seconds to zero them. Its loops expect cores of their own: an idle scheduler
polls without pause, and threads that wait for each other spin, which on shared cores makes a step ten times slower.
A value that the operator gave is never replaced.
"""

import os
from collections.abc import Callable
from typing import Any

import psutil  # type: ignore[import-untyped]
import torch
from sglang.srt.environ import envs
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

from marconi.engine.cpu_platform import NUM_KV_TOKENS, NUM_STATE_SLOTS
from marconi_cpu.draft_slots import assign_extend_cache_locs

MAX_RUNNING_REQUESTS = 16
SPECULATIVE_ALGORITHMS = frozenset({"NGRAM", "EAGLE", "STANDALONE"})
_BIND = "SGLANG_CPU_OMP_THREADS_BIND"


def bind_ranks(num_ranks: int) -> None:
    """Share the cores out among ranks that outnumber the NUMA nodes: SGLang takes a node a rank, and ends else."""
    # Deferred: SGLang imports the platform while it imports this.
    from sglang.srt.utils.common import get_cpu_ids_by_node

    if _BIND in os.environ or num_ranks <= len(get_cpu_ids_by_node()):
        return
    cores = sorted(os.sched_getaffinity(0))
    shares = [cores[rank % len(cores) :: num_ranks] for rank in range(num_ranks)]
    os.environ[_BIND] = "|".join(",".join(map(str, share)) for share in shares)


class CpuPlatform(SRTPlatform):
    """Plain torch on the host: gloo between ranks, native attention, no Triton, no graphs."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"
    capabilities = PlatformCapabilities()

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """Bound what is sized by memory, yield the cores when idle, and keep a float32 checkpoint in float32."""
        # What it imports asks for the platform, which is this file.
        from sglang.srt.arg_groups.model_override_base import model_config_of

        if server_args.max_running_requests is None:
            server_args.max_running_requests = MAX_RUNNING_REQUESTS
        if server_args.max_mamba_cache_size is None:
            server_args.max_mamba_cache_size = NUM_STATE_SLOTS
        if server_args.max_total_tokens is None:
            server_args.max_total_tokens = NUM_KV_TOKENS
        bind_ranks(server_args.dp_size * server_args.tp_size * server_args.pp_size)
        # Read when a process loads its OpenMP runtime, so it reaches those that are started from here.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        # The one pair that copies without a kernel (`host_copies.py`).
        server_args.hicache_io_backend, server_args.hicache_mem_layout = "direct", "page_first_direct"
        # An idle scheduler would otherwise keep a core busy, of the few that everything runs on here.
        server_args.sleep_on_idle = True
        if server_args.dtype == "auto":
            # SGLang would serve it in float16, which a CPU computes slowly.
            checkpoint_dtype = getattr(model_config_of(server_args).hf_text_config, "dtype", None)
            if checkpoint_dtype in (torch.float32, "float32"):
                server_args.dtype = "float32"

    def post_load_model(self, model: torch.nn.Module) -> None:
        """Let the convolution's states have the model's dtype, unless the operator chose one.

        SGLang copies inputs of the model into them as they are, and by default makes them bfloat16.
        """
        if not envs.SGLANG_MAMBA_CONV_DTYPE.is_set():
            embedding = next(model.parameters())
            envs.SGLANG_MAMBA_CONV_DTYPE.set(str(embedding.dtype).removeprefix("torch."))

    def get_default_attention_backend(self) -> str:
        """Attention by torch's scaled_dot_product_attention."""
        return "torch_native"

    def support_mamba_cache_extra_buffer(self) -> bool:
        """State snapshots work: the launchers behind them are replaced."""
        return True

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        """Drafts are verified: the launchers behind that are replaced."""
        return algorithm in SPECULATIVE_ALGORITHMS

    def get_speculative_cache_locs_fn(self) -> Callable[..., torch.Tensor]:
        """The slots of the KV of drafts."""
        return assign_extend_cache_locs

    def get_compile_backend(self, mode: str | None = None) -> str:
        """No compilation."""
        return "eager"

    def get_torch_distributed_backend_str(self) -> str:
        """Ranks talk through gloo."""
        return "gloo"

    def get_device(self, device_id: int = 0) -> str:
        """There is one device, so its index is left out."""
        return "cpu"

    def set_device(self, device: torch.device) -> None:
        """There is one device, so there is nothing to choose."""

    def get_device_name(self, device_id: int = 0) -> str:
        """The name of the device in logs."""
        return "cpu"

    def get_device_uuid(self, device_id: int = 0) -> str:
        """Equal on every start: the host has no number that would matter."""
        return "cpu"

    def get_device_capability(self, device_id: int = 0) -> None:
        """A compute capability is a GPU's."""

    def get_device_total_memory(self, device_id: int = 0) -> int:
        """Bytes of host memory."""
        return int(psutil.virtual_memory().total)

    def get_current_memory_usage(self, device: torch.device | None = None) -> float:
        """Bytes of host memory that are taken, by anyone."""
        memory = psutil.virtual_memory()
        return float(memory.total - memory.available)

    def get_available_memory(self, device_id: int = 0) -> tuple[int, int]:
        """Free and total bytes of host memory."""
        memory = psutil.virtual_memory()
        return int(memory.available), int(memory.total)
