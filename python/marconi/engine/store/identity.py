"""The identity of what computes states: all that their bits depend on beside the tokens.

    facts      configuration, versions, device, kernels, ranks and page
    weights    a digest of their bytes, taken while the server starts and serves: XXH3 over every parameter's name,
               type, layout and bytes

Parameters are shared among a few threads, which leave the interpreter to the scheduler while they copy and hash. From a
GPU they are copied a slice at a time, to pinned memory, on a stream of their own. A permutation and an exchange of
parameters change a digest as any other value does.
"""

import json
import os
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from threading import Event, Thread
from typing import TYPE_CHECKING, Final, Protocol

import sglang.version
import torch
from sglang.srt.arg_groups.overrides import resolved_view
from xxhash import xxh3_128

from marconi import __version__

if TYPE_CHECKING:
    from sglang.srt.mem_cache.registry import TreeCacheBuildContext

_KERNELS: Final = (
    *("dtype", "quantization", "attention_backend", "prefill_attention_backend", "decode_attention_backend"),
    *("mamba_backend", "linear_attn_backend", "linear_attn_prefill_backend", "linear_attn_decode_backend"),
)
"""Arguments of a server by which the same tokens give other bits."""

_SLICE_BYTES: Final = 1 << 24
_MAX_THREADS: Final = 8


def facts_of_states(ctx: "TreeCacheBuildContext") -> dict[str, str]:
    """The facts on which the states of a server depend beside its weights and pools, by name."""
    config = ctx.model_config.hf_config.to_dict()
    config.pop("_name_or_path", None)
    arguments, device = resolved_view(ctx.server_args), torch.device(ctx.params.token_to_kv_pool_allocator.device)
    return {
        "the model's configuration": json.dumps(config, sort_keys=True, default=str),
        "the version of SGLang": sglang.version.__version__,
        "the version of marconi": __version__,
        "the device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "the number of ranks": str(ctx.tp_size),
        "the page": str(ctx.params.page_size),
        **{f"--{name.replace('_', '-')}": str(getattr(arguments, name, None)) for name in _KERNELS},
    }


class Unusable(ValueError):
    """The weights cannot be digested."""


class Weights(Protocol):
    """The weights that states were made by."""

    @property
    def digest(self) -> str | None:
        """Their digest, None until it is known; `Unusable` if it cannot be."""
        ...

    def end(self) -> None:
        """Digest no further."""
        ...


class ModelWeights:
    """The weights of a model as they are from now on. Any thread may ask."""

    def __init__(self, model: torch.nn.Module) -> None:
        """Begin to digest them."""
        self._model = model
        self._ended = Event()
        self._digest: Future[str] = Future()
        Thread(target=self._run, name="marconi-weights", daemon=True).start()

    @property
    def digest(self) -> str | None:
        """Their digest, None until it is known; `Unusable` if it cannot be."""
        return self._digest.result() if self._digest.done() else None

    def end(self) -> None:
        """Digest no further."""
        self._ended.set()

    def _run(self) -> None:
        try:
            self._digest.set_result(digest_of_weights(self._model, self._ended))
        except Exception as error:
            self._digest.set_exception(Unusable(f"the weights cannot be digested: {type(error).__name__}: {error}"))


def digest_of_weights(model: torch.nn.Module, ended: Event | None = None) -> str:
    """Digest names, types, layouts and bytes of the parameters of `model`, on whichever device they are."""
    digest, named = xxh3_128(), list(model.named_parameters())
    of_one = partial(_digest_of, ended or Event())
    num_threads = max(1, min(_MAX_THREADS, (os.cpu_count() or 1) // 2))
    with ThreadPoolExecutor(num_threads, "marconi-weights") as threads:
        found = threads.map(of_one, (each for _, each in named))
        for (name, parameter), its_digest in zip(named, found, strict=True):
            layout = f"{parameter.dtype} {tuple(parameter.shape)} {parameter.stride()}"
            digest.update(f"{name} {layout}\n".encode())
            digest.update(its_digest)
    return digest.hexdigest()


def _digest_of(ended: Event, parameter: torch.Tensor) -> bytes:
    data = parameter.detach()
    if not data.is_cuda:
        return _bytes_of(data, ended)
    with torch.cuda.device(data.device), torch.cuda.stream(torch.cuda.Stream(data.device)):
        return _bytes_of(data, ended)


def _bytes_of(data: torch.Tensor, ended: Event) -> bytes:
    """Digest the bytes of one parameter, a slice at a time."""
    digest, flat = xxh3_128(), _flat(data).view(torch.uint8)
    staging = torch.empty(min(_SLICE_BYTES, len(flat)), dtype=torch.uint8, pin_memory=True) if flat.is_cuda else None
    for part in flat.split(_SLICE_BYTES):
        if ended.is_set():
            raise InterruptedError("the server stops")
        if staging is not None:
            part = staging[: len(part)].copy_(part, non_blocking=True)
            torch.cuda.current_stream().synchronize()
        digest.update(memoryview(part.numpy()))
    return digest.digest()


def _flat(data: torch.Tensor) -> torch.Tensor:
    """The elements in the order in which they lie in memory: a transposed parameter is not copied."""
    outermost_first = sorted(range(data.ndim), key=data.stride, reverse=True)
    return data.permute(outermost_first).contiguous().view(-1)
