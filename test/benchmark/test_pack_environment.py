"""What is packed for a card: of fat binaries the code that the card reads, and nothing else is changed."""

import struct

import pytest

from .scripts import load

pack = load("pack_environment")
ELF, PTX = 2, 1


def entry(kind: int, arch: int, payload: bytes) -> bytes:
    return struct.pack("<HHIQIIHHI32x", kind, 0, 64, len(payload), 0, 0, 0, 0, arch) + payload


def container(*entries: bytes) -> bytes:
    payload = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(payload)) + payload


def test_the_code_of_other_cards_is_blanked_and_everything_else_stays() -> None:
    both = container(entry(ELF, 80, b"older" * 9), entry(ELF, 90, b"this one"), entry(PTX, 90, b"source"))
    packed = pack.keep_card(b"before" + both + b"after")
    assert len(packed) == len(b"before" + both + b"after")
    assert packed == (b"before" + both + b"after").replace(b"older" * 9, bytes(45))


def test_ptx_stays_where_there_is_no_code_for_the_card() -> None:
    packed = pack.keep_card(container(entry(ELF, 80, b"older"), entry(PTX, 80, b"source")))
    assert b"source" in packed
    assert b"older" not in packed


@pytest.mark.parametrize("code", [b"\x50\xed\x55\xba", struct.pack("<IHHQ", 0xBA55ED50, 1, 0, 0), b"none at all"])
def test_what_only_looks_like_a_container_is_packed_as_it_is(code: bytes) -> None:
    assert pack.keep_card(code + b"x" * 32) == code + b"x" * 32
