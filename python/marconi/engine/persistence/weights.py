"""A digest of the bytes of a model's weights, taken while the server starts and serves.

    digest     BLAKE2 over every parameter's name, type, layout and bytes; by it the next server knows its own states
    mark       the same on the host; on a GPU sums that see what moved, taken there in milliseconds: whether the
               weights are still those that were digested

Parameters are shared among a few threads, which leave the interpreter to the scheduler while they copy and hash. From a
GPU they are copied a slice at a time, to pinned memory, on a stream of their own. A permutation and an exchange of
parameters change a digest as any other value does, and change a mark as well: its sums are weighed by position.
"""

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from hashlib import blake2b
from threading import Event, Thread
from typing import Final, Protocol

import torch

from marconi.engine.persistence.files import Unusable

_SLICE_BYTES: Final = 1 << 24
_MAX_THREADS: Final = 8
_POLL_S: Final = 0.05
_WIDTH: Final = 4096
"""Words of a row of a mark."""
_WORDS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


class Weights(Protocol):
    """The weights that states were made by."""

    @property
    def is_known(self) -> bool:
        """Whether digesting them has ended."""
        ...

    def digest(self, is_going_on: Callable[[], bool]) -> str:
        """The digest, once it is known; `Unusable` if it is not by the time that `is_going_on` is false."""
        ...

    def were_updated(self) -> bool:
        """True if they are not those of the digest, which must be known."""
        ...

    def end(self) -> None:
        """Digest no further."""
        ...


class ModelWeights:
    """The weights of a model, and what they were when it began. Any thread may ask."""

    def __init__(self, model: torch.nn.Module) -> None:
        """Begin to digest them."""
        self._model = model
        self._ended = Event()
        self._first_mark = _of_all(model, _mark, self._ended) if _is_on_gpu(model) else None
        self._digest: Future[str] = Future()
        Thread(target=self._run, name="marconi-weights", daemon=True).start()

    @property
    def is_known(self) -> bool:
        """Whether digesting them has ended."""
        return self._digest.done()

    def digest(self, is_going_on: Callable[[], bool]) -> str:
        """The digest, once it is known; `Unusable` if it is not by the time that `is_going_on` is false."""
        while True:
            try:
                return self._digest.result(_POLL_S)
            except TimeoutError:
                if not is_going_on():
                    raise Unusable("the weights must be digested by now, and are not yet") from None

    def were_updated(self) -> bool:
        """True if they are not those of the digest, which must be known."""
        return _of_all(self._model, _mark, self._ended) != (self._first_mark or self._digest.result())

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
    return _of_all(model, _bytes_of, ended or Event())


def _of_all(model: torch.nn.Module, of_one: Callable[[torch.Tensor, Event], bytes], ended: Event) -> str:
    digest, named = blake2b(digest_size=16), list(model.named_parameters())
    num_threads = max(1, min(_MAX_THREADS, (os.cpu_count() or 1) // 2))
    with ThreadPoolExecutor(num_threads, "marconi-weights") as threads:
        for (name, parameter), found in zip(
            named, threads.map(partial(_on_its_device, of_one, ended), (each for _, each in named)), strict=True
        ):
            layout = f"{parameter.dtype} {tuple(parameter.shape)} {parameter.stride()}"
            digest.update(f"{name} {layout}\n".encode())
            digest.update(found)
    return digest.hexdigest()


def _is_on_gpu(model: torch.nn.Module) -> bool:
    return any(parameter.is_cuda for parameter in model.parameters())


def _on_its_device(of_one: Callable[[torch.Tensor, Event], bytes], ended: Event, parameter: torch.Tensor) -> bytes:
    data = parameter.detach()
    if not data.is_cuda:
        return of_one(data, ended)
    with torch.cuda.device(data.device), torch.cuda.stream(torch.cuda.Stream(data.device)):
        return of_one(data, ended)


def _bytes_of(data: torch.Tensor, ended: Event) -> bytes:
    """Digest the bytes of one parameter, a slice at a time."""
    digest, flat = blake2b(digest_size=32), _flat(data).view(torch.uint8)
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


def _mark(data: torch.Tensor, ended: Event) -> bytes:
    """The sums of rows and of columns of one parameter, weighed by position; on the host, its bytes."""
    return word_sums(data) if data.is_cuda else _bytes_of(data, ended)


def word_sums(data: torch.Tensor) -> bytes:
    """Sum a parameter's words by rows and by columns, and these sums by pseudorandom weights."""
    words = _flat(data).view(_WORDS[data.element_size()])
    rows, rest = words[: len(words) // _WIDTH * _WIDTH].view(-1, _WIDTH), words[len(words) // _WIDTH * _WIDTH :]
    sums = (rows.sum(0, dtype=torch.int64), rows.sum(1, dtype=torch.int64), rest.to(torch.int64))
    totals = torch.stack([(each * _position_weights(each)).sum() for each in sums])
    return totals.cpu().numpy().tobytes()


def _position_weights(sums: torch.Tensor) -> torch.Tensor:
    """An odd number for each position, as SplitMix64 mixes them."""
    mixed = torch.arange(1, len(sums) + 1, device=sums.device) * -7046029254386353131
    mixed = (mixed ^ (mixed >> 30)) * -4658895280553007687
    return (mixed ^ (mixed >> 27)) | 1
