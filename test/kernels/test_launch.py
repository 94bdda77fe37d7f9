"""An operator runs its kernel where its pool is on an accelerator, and says what its arguments must be."""

import pytest
import torch

from sgl_kernel_ext import launch, state_copy
from sgl_kernel_ext.arguments import INTEGERS, require, require_one_dtype, require_shared
from sgl_kernel_ext.state_copy import kernel
from sgl_kernel_ext.state_pool import StateSlots


@pytest.mark.parametrize("is_named", [False, True])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_an_operator_runs_by_the_device_of_its_pool(
    device: str, is_named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran_kernel = []
    monkeypatch.setattr(kernel, "copy", lambda *_, **__: ran_kernel.append(True))
    pool, slots = torch.arange(2, device=device), torch.tensor([1])
    if is_named:
        state_copy.copy(source_slots=slots, destination_slots=slots - 1, pool=pool)
    else:
        state_copy.copy(pool, slots, slots - 1)
    if device == "cpu":
        assert pool.tolist() == [1, 1]
    assert bool(ran_kernel) == (device != "cpu")
    assert state_copy.copy.__doc__, "the reference's"


def test_slots_for_a_kernel_are_checked_when_they_are_used() -> None:
    pool, slots = torch.zeros(4, 8, 3, device="meta"), torch.zeros(3, dtype=torch.int32, device="meta")
    states = StateSlots(pool, slots, torch.zeros(2, dtype=torch.bool, device="meta"))
    with pytest.raises(ValueError, match=r"^has_initial_state must be 3, got \(2,\)$"):
        states.require(3, (8, 3))


def test_tiles_cover_a_state() -> None:
    assert launch.tiling(72, 20, torch.bfloat16, torch.bfloat16) == ((2, 1), 64, 32, 64, "tf32")
    assert launch.tiling(72, 20, torch.bfloat16, torch.float32) == ((3, 1), 32, 32, 32, "ieee")


def test_an_argument_must_have_a_shape_and_a_dtype() -> None:
    require("x", torch.zeros(2, 3), ("num_tokens", 3))
    require("x", torch.zeros(2, 3), (5,), (2, "width"))
    with pytest.raises(ValueError, match=r"^x must be \(num_tokens, 4\) of a float dtype, got \(2, 3\) of float32$"):
        require("x", torch.zeros(2, 3), ("num_tokens", 4))
    with pytest.raises(ValueError, match=r"^x must be \(4,\) or \(4, 2\) of a float dtype, got \(4,\) of int32$"):
        require("x", torch.zeros(4, dtype=torch.int32), (4,), (4, 2))
    with pytest.raises(ValueError, match=r"^x must be \(n,\) of int32 or int64, got \(4,\) of float64$"):
        require("x", torch.zeros(4, dtype=torch.float64), ("n",), dtypes=INTEGERS)


def test_heads_are_shared_evenly_and_dtypes_are_one() -> None:
    require_shared("k", torch.zeros(1, 2), 6)
    for num_shared in (0, 4):
        with pytest.raises(ValueError, match=f"^dimension 1 of k must divide 6 heads, got {num_shared}$"):
            require_shared("k", torch.zeros(1, num_shared), 6)
    require_one_dtype(q=torch.zeros(1), k=torch.zeros(2))
    with pytest.raises(ValueError, match=r"^q, k must have one dtype, got float32, float64$"):
        require_one_dtype(q=torch.zeros(1), k=torch.zeros(2, dtype=torch.float64))
