"""A launch like the last runs its compilation; any other is Triton's, by whatever Triton compiles for."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")

from triton.compiler import CompiledKernel  # noqa: E402

from sgl_kernel_ext import launch  # noqa: E402
from sgl_kernel_ext.launch import Launcher, is_launchable  # noqa: E402


@dataclass
class Kernel:
    """In the place of a `triton.jit` function: notes whether Triton or a compilation launched, and with what."""

    compiles: bool = True
    launches: list[tuple[str, tuple[int, ...], tuple[Any, ...]]] = field(default_factory=list)
    arg_names: tuple[str, ...] = ("x", "pool", "ends", "s_x", "N", "B", "W")

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def run(*args: Any, B: int, W: int) -> Any:
            self.launches.append(("Triton", grid, (*args, B, W)))
            return Compilation(self) if self.compiles else None

        return run

    @property
    def ways(self) -> list[str]:
        return [way for way, *_ in self.launches]


class Compilation(CompiledKernel):
    def __init__(self, kernel: Kernel) -> None:
        self.of = kernel

    def __del__(self) -> None:
        """Nothing was loaded."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args: self.of.launches.append(("bound", grid, args))


POOL, ENDS = torch.zeros(4, 8), torch.zeros(1, dtype=torch.int64)


def of(x: Tensor | None, pool: Tensor = POOL, num: int = 4, width: int = 3) -> dict[str, Any]:
    """A launch of inputs x."""
    strides = None if x is None else x.stride()
    return {"batch": object(), "tensors": (x, pool), "spans": (ENDS,), "rest": (strides, num), "B": 16, "W": width}


def test_a_launch_with_other_tensors_alike_is_bound_with_all_arguments_in_order() -> None:
    kernel = Kernel()
    launcher, first, other, end = Launcher(kernel), torch.zeros(4, 8), torch.ones(4, 8), torch.ones_like(ENDS)
    launcher(grid=(2, 1), **of(first))
    launcher(grid=(5,), **(of(other) | {"spans": (end,), "W": 3}))
    assert kernel.ways == ["Triton", "bound"]
    _, grid, (x, pool, ends, strides, num, block, width) = kernel.launches[1]
    assert grid == (5, 1, 1)
    assert x is other
    assert pool is POOL
    assert ends is end
    assert (strides, num, block, width) == ((8, 1), 4, 16, 3)


def test_constants_are_put_in_the_order_of_the_kernel() -> None:
    kernel = Kernel()
    launcher, given = Launcher(kernel), of(torch.zeros(4, 8))
    backwards = {name: given[name] for name in reversed(given)}
    for _ in range(2):
        launcher(grid=(1,), **backwards)
    assert kernel.launches[1][2][-2:] == (16, 3)


@pytest.mark.parametrize(
    "other",
    [
        of(torch.zeros(8, 4).T),
        of(torch.zeros(40)[1:33].view(4, 8)),
        of(torch.zeros(4, 8, dtype=torch.bfloat16)),
        of(torch.zeros(4, 8), pool=torch.zeros(4, 8, dtype=torch.float16)),
        of(torch.zeros(4, 8), pool=torch.zeros(4, 8, device="meta")),
        of(None),
        of(torch.zeros(4, 8), num=5),
        of(torch.zeros(4, 8), width=4),
    ],
    ids=["strides", "misaligned", "dtype", "dtype of the pool", "device", "absent", "an extent", "a constant"],
)
def test_a_launch_that_differs_is_tritons(other: dict[str, Any]) -> None:
    """And the one after it, like the first again, too; the next is bound once more."""
    kernel = Kernel()
    launcher, given = Launcher(kernel), of(torch.zeros(4, 8))
    for each in (given, other, given, given):
        launcher(grid=(1,), **each)
    assert kernel.ways == ["Triton", "Triton", "Triton", "bound"]


def test_what_is_misaligned_is() -> None:
    """Negative control: the case above differs in nothing else."""
    x, other = torch.zeros(4, 8), torch.zeros(40)[1:33].view(4, 8)
    assert (x.dtype, x.shape, x.stride()) == (other.dtype, other.shape, other.stride())
    assert x.data_ptr() % 16 == 0
    assert other.data_ptr() % 16 == 4


def test_without_a_compilation_every_launch_is_tritons() -> None:
    """The interpreter returns none."""
    kernel = Kernel(compiles=False)
    launcher = Launcher(kernel)
    for _ in range(3):
        launcher(grid=(1,), **of(torch.zeros(4, 8)))
    assert kernel.ways == ["Triton"] * 3
    assert not launcher.repeat(ENDS, torch.zeros(4, 8), POOL)


@pytest.mark.parametrize("ways", [["Triton"], ["Triton", "bound"]])
def test_a_layer_repeats_the_launch_before_with_its_own_tensors(ways: list[str]) -> None:
    kernel, other, pool = Kernel(), torch.ones(4, 8), torch.ones(4, 8)
    launcher, given = Launcher(kernel), of(torch.zeros(4, 8))
    for _ in ways:
        launcher(grid=(2, 1), **given)
    for _ in range(2):
        assert launcher.repeat(given["batch"], other, pool)
    assert kernel.ways == [*ways, "bound", "bound"]
    _, grid, (x, written, ends, *rest) = kernel.launches[-1]
    assert grid == (2, 1, 1)
    assert (x is other, written is pool, ends is ENDS) == (True, True, True)
    assert rest == [(8, 1), 4, 16, 3]


@pytest.mark.parametrize(
    "x",
    [
        torch.zeros(8, 4).T,
        torch.zeros(3, 8),
        torch.zeros(40)[1:33].view(4, 8),
        torch.zeros(4, 8, dtype=torch.bfloat16),
        None,
    ],
    ids=["strides", "rows", "misaligned", "dtype", "absent"],
)
def test_another_layout_is_no_repetition(x: Tensor | None) -> None:
    kernel = Kernel()
    launcher, given = Launcher(kernel), of(torch.zeros(4, 8))
    launcher(grid=(1,), **given)
    assert not launcher.repeat(given["batch"], x, POOL)
    assert kernel.ways == ["Triton"]
    assert launcher.repeat(given["batch"], torch.zeros(4, 8), POOL), "negative control"


def test_another_batch_is_no_repetition() -> None:
    launcher, first, other = Launcher(Kernel()), of(torch.zeros(4, 8)), of(torch.zeros(4, 8))
    assert not launcher.repeat(first["batch"], torch.zeros(4, 8), POOL), "nothing was launched"
    for given in (first, other):
        launcher(grid=(1,), **given)
    assert not launcher.repeat(first["batch"], torch.zeros(4, 8), POOL)
    assert launcher.repeat(other["batch"], torch.zeros(4, 8), POOL)


def test_a_launch_is_repeated_on_its_own_card_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The current card stands in for one where the tensors do not lie."""
    launcher, given = Launcher(Kernel()), of(torch.zeros(4, 8))
    launcher(grid=(1,), **given)
    assert launcher._repeatable is not None
    launcher._repeatable = launcher._repeatable._replace(card=1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert not launcher.repeat(given["batch"], torch.zeros(4, 8), POOL)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert launcher.repeat(given["batch"], torch.zeros(4, 8), POOL)


@pytest.mark.parametrize(
    ("version", "is_known"),
    [("3.5.1", False), ("3.6.0", True), ("3.8.0", True), ("3.9.0+git1", False), ("4.0.0", False)],
)
def test_compilations_of_versions_that_were_read_are_launchable(
    version: str, is_known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton, "__version__", version)
    launch._compilations.cache_clear()
    try:
        assert is_launchable(Compilation(Kernel())) is is_known
        assert not is_launchable(None)
    finally:
        launch._compilations.cache_clear()


def test_tritons_compilation_takes_what_a_launcher_gives_it() -> None:
    """The installed Triton's own, without a binary: all arguments reach its launch, constants among them."""
    got: list[tuple[Any, ...]] = []

    class Real(CompiledKernel):
        def __init__(self) -> None:
            self.module = self.function = self.packed_metadata = object()
            self.name, self.src = "", None
            self._run = lambda *args: got.append(args)

        def __del__(self) -> None:
            """Nothing was loaded."""

    Real()[2, 1, 1](POOL, ENDS, (8, 1), 4, 16, stream=7)
    ((*grid, stream, _, _, _, _, _, pool, ends, strides, num, block),) = got
    assert (grid, stream) == ([2, 1, 1], 7)
    assert pool is POOL
    assert ends is ENDS
    assert (strides, num, block) == ((8, 1), 4, 16)
