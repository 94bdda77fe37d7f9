"""The kernel finds who ends in a step over drafts as its reference does, and writes nothing else."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor

from sgl_kernel_ext import draft_ends
from sgl_kernel_ext.draft_ends import kernel, reference

from .verify_steps import Drafted, arguments, expected, steps

UNTOUCHED = -99
LONG = Drafted([*range(40)], [*range(0, 40, 2)], 10, [12, 20], 100, by_host=False, slots=[4, 5], turn=1)
"""More nodes than a block has at least."""


def outs(step: list[Drafted], device: torch.device) -> tuple[Tensor, Tensor]:
    """Where the reference and where the kernel writes, with room behind every row."""
    first, second = (torch.full((3, len(step) + 3), UNTOUCHED, dtype=torch.int32, device=device) for _ in range(2))
    return first, second


def assert_same(step: list[Drafted], device: torch.device, *dtypes: torch.dtype) -> None:
    given_arguments = arguments(step, device, dtypes) if dtypes else arguments(step, device)  # type: ignore[arg-type]
    by_reference, by_kernel = outs(step, device)
    reference.find(by_reference[:, : len(step)], **given_arguments)
    kernel.find(by_kernel[:, : len(step)], **given_arguments)
    assert torch.equal(by_kernel, by_reference)
    assert by_kernel[:, : len(step)].tolist() == expected(step)


@given(step=steps(max_batch=5, max_nodes=20))
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_step_is_the_reference_s(step: list[Drafted], device: torch.device) -> None:
    assert_same(step, device)


@pytest.mark.parametrize("narrow", [torch.int32, torch.int64])
@pytest.mark.parametrize("wide", [torch.int32, torch.int64])
def test_every_integer_is_taken(narrow: torch.dtype, wide: torch.dtype, device: torch.device) -> None:
    assert_same([LONG, replace(LONG, stops=[]), replace(LONG, stops=[], by_host=True)], device, narrow, wide)


@pytest.mark.parametrize("stops", [[], [38], [*range(1, 40, 2)], [*range(39)]])
def test_any_number_of_stops_is_gone_through(stops: list[int], device: torch.device) -> None:
    assert_same([replace(LONG, stops=stops)] * 3, device)


def test_a_batch_of_none_launches_nothing(device: torch.device) -> None:
    given_arguments: dict[str, Any] = {
        name: value[:0] if isinstance(value, Tensor) else value for name, value in arguments([LONG], device).items()
    }
    kernel.find(draft_ends.new(0, device), **given_arguments)


def test_fewer_rows_than_the_batch_are_named(device: torch.device) -> None:
    given_arguments = arguments([LONG, LONG], device)
    for name in ("num_accepted", "num_before", "max_lengths", "by_host", "requests", "turns"):
        with pytest.raises(ValueError, match=rf"^{name} must be \(2,\)"):
            kernel.find(draft_ends.new(2, device), **{**given_arguments, name: given_arguments[name][:1]})


def test_a_stop_that_is_overlooked_would_be_seen(device: torch.device) -> None:
    """Negative control: the comparison can fail."""
    by_reference, by_kernel = outs([LONG], device)
    reference.find(by_reference[:, :1], **arguments([LONG], device))
    kernel.find(by_kernel[:, :1], **arguments([replace(LONG, stops=[20])], device))
    assert not torch.equal(by_kernel, by_reference)
