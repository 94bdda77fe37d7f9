"""A platform on which SGLang serves hybrid models with plain torch: no accelerator, no Triton, no graphs.

It is chosen by name, `SGLANG_PLATFORM=marconi_cpu`, and does nothing otherwise. `platform.py` is the device as SGLang
sees it; `launchers.py` puts a function in the place of each Triton launcher (`upstream.toml` lists them), which takes
upstream's arguments, refuses those that it does not support, and calls an operator of `sgl_kernel_ext`. It is made for
tests, demonstrations and development: every token and every cached state is exact, times say nothing about an
accelerator.
"""

from marconi.engine.cpu_platform import PLATFORM, is_active


def register_launchers() -> None:
    """The entry point in `sglang.srt.plugins`: the replaced launchers, where the platform was chosen."""
    if is_active():
        from marconi_cpu import launchers

        launchers.register()


def activate() -> str | None:
    """The entry point in `sglang.srt.platforms`: the platform's class, or None unless it was chosen by name.

    Raises RuntimeError where a GPU is visible: SGLang would pick its CUDA code beside this platform's.
    """
    if not is_active():
        return None
    import torch

    if torch.cuda.is_available():
        raise RuntimeError(
            f"SGLANG_PLATFORM={PLATFORM} serves on the CPU, but a GPU is visible: set CUDA_VISIBLE_DEVICES= (empty), "
            "or unset SGLANG_PLATFORM to serve on the GPU"
        )
    return "marconi_cpu.platform:CpuPlatform"
