"""An H100 that is not there, so that SGLang's CUDA branches run on any machine: shapes and devices, no numbers.

    torch.cuda     says that there is a card, and which
    tensors        `FakeTensor`s: an operation on tensors of two devices raises, as does one that needs a number
    Triton         a launch is recorded, with its grid, and refused if one of its tensors is not on the card
    host waits     what would hold the host until the card is done is recorded, with the line that asked for it

A wait is a number that is read from the card, a copy between the card and memory that is not pinned, and an index whose
size only the card knows. Where one is not recognized, `FakeTensorMode` has no number to give and raises.

It changes torch, Triton and the import system, so it has a process to itself, and is put in before SGLang is imported.
"""

import importlib.abc
import importlib.machinery
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar, Final, NamedTuple, Self
from unittest.mock import MagicMock

import torch
import triton.runtime.autotuner as triton_autotuner
import triton.runtime.jit as triton_jit
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

CARD: Final = torch.device("cuda")
_CAPABILITY: Final = (9, 0)
_PROPERTIES: Final = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    major=_CAPABILITY[0],
    minor=_CAPABILITY[1],
    multi_processor_count=132,
    total_memory=80 << 30,
    warp_size=32,
    shared_memory_per_block_optin=232_448,
    shared_memory_per_multiprocessor=233_472,
    L2_cache_size=50 << 20,
    is_integrated=False,
)
_COMPILED_FOR_CUDA: Final = frozenset({"sgl_kernel"})
"""Packages whose import loads libraries of CUDA."""

_READS: Final = frozenset(
    {"item", "tolist", "numpy", "nonzero", "argwhere", "equal", "allclose", "masked_select", "unique", "is_nonzero"}
    | {"__bool__", "__int__", "__float__", "__index__"}
)
"""What reads a number from a tensor."""
_FROM_HOST: Final = frozenset({"tensor", "as_tensor", "new_tensor"})
"""What makes a tensor of numbers of Python's."""
_FREE: Final = frozenset(
    {"view", "_unsafe_view", "slice", "select", "unsqueeze", "squeeze", "expand", "detach", "alias", "permute", "t"}
    | {"transpose", "unbind", "split", "as_strided", "empty", "empty_like", "new_empty", "empty_strided", "device"}
    | {"lift_fresh", "scalar_tensor", "broadcast_tensors", "split_with_sizes"}
)
"""Operations that run nothing on a card."""


class Launch(NamedTuple):
    """One launch of a Triton kernel."""

    module: str
    kernel: str
    grid: tuple[int, ...] | None
    """None where a launcher or an autotuner chooses it."""


class Wait(NamedTuple):
    """One place where the host waits for the card."""

    kind: str
    owner: str
    """Whose line it is: `Owners`."""
    line: str


@dataclass(frozen=True, slots=True)
class Owners:
    """Whose code lies in which folder."""

    folders: dict[str, tuple[Path, ...]]

    def of(self, frames: traceback.StackSummary) -> tuple[str, str]:
        """The owner of the innermost frame that has one, and its line."""
        for frame in reversed(frames):
            path = Path(frame.filename)
            for owner, folders in self.folders.items():
                if any(path.is_relative_to(folder) for folder in folders):
                    return owner, f"{path.name}:{frame.lineno} {frame.line}"
        return "test", ""


@dataclass(slots=True)
class Card:
    """What ran on the card."""

    owners: Owners
    launches: list[Launch] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)
    copies: list[tuple[str, str]] = field(default_factory=list)
    """Copies from the host to the card: whose line makes each, and the line."""

    def put_in(self) -> None:
        """Put the card in this process; before SGLang is imported."""
        cuda: Any = torch.cuda
        torch._C._ensureCUDADeviceGuardSet()
        cuda.is_available = lambda: True
        cuda.device_count = lambda: 1
        cuda.current_device = lambda: 0
        cuda.get_device_capability = lambda *_, **__: _CAPABILITY
        cuda.get_device_properties = lambda *_, **__: _PROPERTIES
        cuda.get_device_name = lambda *_, **__: _PROPERTIES.name
        cuda.device = _Device
        devices: Any = lambda *_: _DeviceModule()  # noqa: E731
        torch.get_device_module = devices
        sys.meta_path.insert(0, _Finder())
        driver.set_active(_Driver())
        # Where a card's memory lies is asked to tell tensors apart.
        address: Any = lambda tensor: tensor.untyped_storage()._cdata + tensor.storage_offset()  # noqa: E731
        FakeTensor.data_ptr = address  # type: ignore[method-assign]

        def launch(kernel: Any, *args: Any, grid: Any = None, **kwargs: Any) -> None:
            self._launch(kernel, [*args, *kwargs.values()], grid)

        def tune(tuner: Any, *args: Any, grid: Any = None, **kwargs: Any) -> None:
            del grid
            while not isinstance(tuner, triton_jit.JITFunction):
                configs = getattr(tuner, "configs", ())
                if len(configs) == 1:
                    kwargs |= configs[0].all_kwargs()
                tuner = tuner.fn
            triton_jit.JITFunction.run(tuner, *args, **kwargs)

        triton_jit.JITFunction.run = launch
        triton_autotuner.Autotuner.run = triton_autotuner.Heuristics.run = tune

    def _launch(self, kernel: Any, arguments: list[Any], grid: Any) -> None:
        for each in _tensors(arguments):
            if each.device.type != CARD.type:
                raise RuntimeError(
                    f"the tensors of a launch of {kernel.fn.__name__} must be on {CARD}, got {each.device}"
                )
        self.launches.append(
            Launch(kernel.fn.__module__, kernel.fn.__name__, tuple(grid) if isinstance(grid, tuple) else None)
        )

    def waits_for(self, kind: str) -> None:
        """Record that the line that runs now waits."""
        self.waits.append(Wait(kind, *self.owners.of(traceback.extract_stack())))

    def clear(self) -> None:
        """Forget what ran."""
        self.launches.clear()
        self.waits.clear()
        self.copies.clear()


class Tensors(FakeTensorMode):
    """Fake tensors; small ones of the host's keep their numbers, and none is made on a card in earnest."""

    @property
    def avoid_device_init(self) -> bool:
        """True: `torch.cuda` says otherwise."""
        return True


class HostWaits(TorchFunctionMode):
    """Records every wait, and goes on with a number in its place."""

    def __init__(self, card: Card) -> None:
        super().__init__()
        self._card = card
        self._pinned: dict[int, Any] = {}
        """Storages by their address; held, so that no other has it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", str(func)), dict(kwargs or {})
        first = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if kwargs.pop("pin_memory", False) or name == "pin_memory":
            return self._pin(first if name == "pin_memory" else func(*args, **kwargs))
        if name == "is_pinned":
            return self._is_pinned(first)
        if name in _FROM_HOST and _is_card(
            kwargs.get("device", first.device if name == "new_tensor" and first is not None else "cpu")
        ):
            return self._made_on_card(func, args, kwargs)
        if first is None:
            return func(*args, **kwargs)
        if name in _READS and _is_card(first.device):
            return self._read(name, first, kwargs)
        if name in ("to", "cuda", "cpu", "copy_"):
            self._copied(name, first, args[1:], kwargs)
        if name in ("__getitem__", "__setitem__") and _is_card(first.device):
            args = (first, self._index(args[1], first), *args[2:])
        return func(*args, **kwargs)

    def _pin(self, tensor: Any) -> torch.Tensor:
        storage = tensor.untyped_storage()
        self._pinned[storage._cdata] = storage
        found: torch.Tensor = tensor
        return found

    def _is_pinned(self, tensor: Any) -> bool:
        return tensor.untyped_storage()._cdata in self._pinned

    def _made_on_card(self, func: Any, args: Any, kwargs: Any) -> torch.Tensor:
        self._card.waits_for(f"torch.{func.__name__} of numbers on the card")
        like = torch.tensor(args[-1], dtype=kwargs.get("dtype"))
        return torch.empty(like.shape, dtype=like.dtype, device=CARD)

    def _read(self, name: str, tensor: torch.Tensor, kwargs: dict[str, Any]) -> Any:
        self._card.waits_for(f"{name}()")
        if name in ("__bool__", "is_nonzero", "equal", "allclose"):
            return True
        if name in ("item", "__int__", "__float__", "__index__"):
            return 1
        if name in ("nonzero", "argwhere"):
            found = torch.empty(1, tensor.dim(), dtype=torch.int64, device=CARD)
            return found.unbind(1) if kwargs.get("as_tuple") else found
        raise RuntimeError(f"{name}() has no size on a card that is not there")

    def _copied(self, name: str, tensor: torch.Tensor, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        arguments = [*rest, *kwargs.values()]
        source, target = tensor, _target(name, tensor, rest, kwargs)
        if name == "copy_":
            source, target = rest[0], tensor.device
        if _is_card(source.device) is _is_card(target):
            return
        is_async = kwargs.get("non_blocking", any(each is True for each in arguments))
        # A copy to the host that is asked for without a place gets one that is pinned.
        host = source if name != "copy_" or _is_card(target) else tensor
        is_pinned = self._is_pinned(host) if not _is_card(host.device) else is_async
        way = "to" if _is_card(target) else "from"
        if way == "to":
            self._card.copies.append(self._card.owners.of(traceback.extract_stack()))
        if not is_async:
            self._card.waits_for(f"a blocking copy {way} the card")
        elif not is_pinned:
            self._card.waits_for(f"a copy {way} the card, memory not pinned")

    def _index(self, index: Any, tensor: torch.Tensor) -> Any:
        parts = list(index) if isinstance(index, tuple) else [index]
        for at, each in enumerate(parts):
            if isinstance(each, list):
                self._card.waits_for("an index by a list")
                parts[at] = torch.empty(len(each), dtype=torch.int64, device=tensor.device)
            elif isinstance(each, torch.Tensor) and each.dtype is torch.bool:
                self._card.waits_for("an index by a mask")
            elif isinstance(each, torch.Tensor) and each.dim() and not _is_card(each.device):
                self._card.waits_for("an index of the host's")
        return tuple(parts) if isinstance(index, tuple) else parts[0]


class Operations(TorchDispatchMode):
    """Operations that run on the card, kernels and copies: their names, and whose line asks for each."""

    def __init__(self, card: Card) -> None:
        super().__init__()
        self._card = card
        self.names: list[str] = []
        self.owners: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name not in _FREE and any(_is_card(each.device) for each in _tensors([args, made])):
            self.names.append(name)
            self.owners.append(self._card.owners.of(traceback.extract_stack())[0])
        return made


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for each in values:
        if isinstance(each, torch.Tensor):
            yield each
        elif isinstance(each, tuple | list):
            yield from _tensors(each)


def _is_card(device: Any) -> bool:
    return device is not None and not isinstance(device, int) and torch.device(device).type == CARD.type


def _target(name: str, tensor: torch.Tensor, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    """Where `to`, `cuda` or `cpu` puts a tensor."""
    if name in ("cuda", "cpu"):
        return torch.device(name)
    for each in (kwargs.get("device"), kwargs.get("other"), *rest):
        if isinstance(each, torch.Tensor):
            return each.device
        if isinstance(each, str | torch.device):
            return torch.device(each)
    return tensor.device


class _Device:
    """A context that makes a card the current one."""

    def __init__(self, *_: Any) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...


class _DeviceModule:
    """`torch.cuda`, which is not asked to start."""

    device: ClassVar = _Device

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)


class _Driver:
    """What Triton asks of a driver where nothing is compiled."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: Any = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return CARD

    def get_device_interface(self) -> Any:
        return torch.cuda


class _Stub(ModuleType):
    """A module that has everything."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds stubs of packages that are compiled for CUDA."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        del path, target
        if name.partition(".")[0] not in _COMPILED_FOR_CUDA:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        stub = _Stub(spec.name)
        stub.__path__ = []
        return stub

    def exec_module(self, module: ModuleType) -> None:
        del module
