"""Who ends in a step over drafts is found as by going through its tokens one by one."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given

from sgl_kernel_ext import draft_ends

from .verify_steps import Drafted, arguments, expected, steps


def found(step: list[Drafted]) -> list[list[int]]:
    out = draft_ends.new(len(step), "cpu")
    draft_ends.find(out, **arguments(step))
    rows: list[list[int]] = out.tolist()
    return rows


@given(steps())
def test_every_request_is_found_as_by_going_through_its_tokens(step: list[Drafted]) -> None:
    assert found(step) == expected(step)


ONE = Drafted([7, 8, 9, 6], [0, 1, 3], 10, [], 100, by_host=False, slots=[4, 5], turn=1)
"""Says 7, 8 and 6."""


@pytest.mark.parametrize(
    ("changed", "node", "slot", "depth"),
    [
        ({}, -1, 0, -1),
        ({"stops": [7]}, 1, 5, 12),
        ({"stops": [8]}, 3, 5, 13),
        ({"stops": [6]}, 3, 5, 13),
        ({"stops": [9]}, -1, 0, -1),
        ({"max_length": 12}, 1, 5, 12),
        ({"max_length": 12, "turn": 0}, 1, 4, 12),
        ({"by_host": True}, 0, 5, 11),
        ({"by_host": True, "stops": [8]}, 3, 5, 13),
        ({"stops": [8], "turn": -1}, -1, 0, -1),
        ({"stops": [8], "slots": [4, -1]}, -1, 0, -1),
    ],
)
def test_a_state_stands_after_the_stop_unless_that_was_said_last(
    changed: dict[str, object], node: int, slot: int, depth: int
) -> None:
    assert found([replace(ONE, **changed)]) == [[node], [slot], [depth]]  # type: ignore[arg-type]


@pytest.mark.parametrize("num_requests", [1, 3, 4, 5])
def test_rows_that_a_kernel_reads_are_aligned(num_requests: int) -> None:
    out = draft_ends.new(num_requests, "cpu")
    assert out.shape == (3, num_requests)
    assert {(row.data_ptr() - out.data_ptr()) % 16 for row in out} == {0}
    assert all(row.is_contiguous() for row in out)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("num_accepted", torch.zeros(2, dtype=torch.int32), r"num_accepted must be \(1,\) of int32 or int64"),
        ("tokens_out", torch.zeros(3, dtype=torch.int32), r"tokens_out must be \(4,\) of int32 or int64"),
        ("by_host", torch.zeros(1, dtype=torch.int32), r"by_host must be \(1,\) of bool"),
        ("tracking_slots", torch.zeros(3, 1, dtype=torch.int64), r"tracking_slots must be \(num_requests, 2\)"),
    ],
)
def test_a_wrong_argument_is_named(name: str, value: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        draft_ends.find(draft_ends.new(1, "cpu"), **{**arguments([ONE]), name: value})
