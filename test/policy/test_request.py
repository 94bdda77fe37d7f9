"""Packed ids: four bytes each, little-endian, unsigned, so that a prefix of ids is a prefix of bytes."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from marconi.policy.request import Request, Trace, pack, unpack

IDS = st.lists(st.integers(0, 2**32 - 1), max_size=50)


@given(ids=IDS)
def test_unpacking_gives_back_what_was_packed(ids: list[int]) -> None:
    path = pack(ids)
    assert len(path) == 4 * len(ids)
    unpacked = unpack(path)
    assert unpacked == ids
    assert all(type(unit) is int for unit in unpacked)


def test_an_id_is_four_bytes_the_lowest_first() -> None:
    assert pack([1, 0x01020304, 2**32 - 1]) == bytes([1, 0, 0, 0, 4, 3, 2, 1, 255, 255, 255, 255])


def test_no_ids_are_no_bytes() -> None:
    assert pack([]) == b""
    assert unpack(b"") == []


def test_any_iterable_of_ids_is_packed() -> None:
    assert pack(unit for unit in (3, 4)) == pack((3, 4)) == pack(range(3, 5))


@given(left=IDS, right=IDS)
def test_a_prefix_of_ids_is_a_prefix_of_bytes(left: list[int], right: list[int]) -> None:
    assert pack(left + right) == pack(left) + pack(right)
    assert pack(right).startswith(pack(left)) == (right[: len(left)] == left)


@pytest.mark.parametrize("ids", [[-1], [2**32], [5, 2**40, 6]])
def test_an_id_that_does_not_fit_is_refused(ids: list[int]) -> None:
    with pytest.raises(OverflowError):
        pack(ids)


@pytest.mark.parametrize("path", [b"abc", b"abcde"])
def test_a_path_cut_within_an_id_is_refused(path: bytes) -> None:
    with pytest.raises(ValueError, match="multiple of element size"):
        unpack(path)


def test_a_request_without_a_session_says_so() -> None:
    request = Request(pack([1]), 1, 0, 1, 0.0)
    assert (request.session, request.turn, request.namespace) == (-1, 0, 0)


@pytest.mark.parametrize("value", [Request(pack([1]), 1, 0, 1, 0.0), Trace("t", 1, ())])
def test_requests_and_traces_do_not_change(value: Request | Trace) -> None:
    field = dataclasses.fields(value)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(value, field, None)


def test_equal_requests_are_equal_and_hash_alike() -> None:
    one, other = (Request(pack([1, 2]), 2, 0, 2, 0.5, session=3) for _ in range(2))
    assert one == other
    assert len({one, other}) == 1


@pytest.mark.parametrize("number", [np.int64(-1), np.int64(2**32)])
def test_a_numpy_id_that_does_not_fit_is_refused_and_does_not_wrap(number: np.int64) -> None:
    with pytest.raises(OverflowError):
        pack([3, number])


def test_an_id_that_is_no_integer_is_refused() -> None:
    with pytest.raises(TypeError):
        pack([1.5])  # type: ignore[list-item]
