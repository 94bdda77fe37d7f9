"""Amounts of memory as the command line spells them."""

import pytest

from marconi.replay.memory import MemorySize, format_bytes, parse_memories


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("40GB", 40 * 10**9),
        ("512MiB", 512 * 2**20),
        ("1.5kb", 1500),
        ("2TiB", 2 * 2**40),
        ("1e9B", 10**9),
        (" 7 B ", 7),
    ],
)
def test_an_amount_is_in_decimal_or_binary_units(text: str, num_bytes: int) -> None:
    assert MemorySize.parse(text).bytes_of(None, 7) == num_bytes


def test_a_relative_amount_is_of_what_an_unbounded_cache_holds() -> None:
    assert [memory.bytes_of(2000, 7) for memory in parse_memories("0.05x,2X,1e-9x,30B")] == [100, 4000, 1, 30]


def test_a_number_of_blocks_is_of_what_a_block_takes_to_the_byte() -> None:
    many = 10**17 + 1  # more than a float counts
    memories = parse_memories(f"3000blocks, 1 Blocks ,{many}blocks")
    assert [memory.bytes_of(None, 89_849_857) for memory in memories] == [
        3000 * 89_849_857,
        89_849_857,
        many * 89_849_857,
    ]


@pytest.mark.parametrize("number", ["", "0", "-3", "1.5", "1e3", "0x10", "\u0663", "3 0", "0.1x"])
def test_blocks_that_are_no_whole_number_are_refused_with_their_text(number: str) -> None:
    with pytest.raises(ValueError, match=f"must be a whole number, 1 or more, as 3000blocks, got '{number}blocks'"):
        MemorySize.parse(f"{number}blocks")


@pytest.mark.parametrize("text", ["0B", "0GB", "0x", "0.5B", "1e-999GB"])
def test_no_memory_is_refused_with_its_text(text: str) -> None:
    with pytest.raises(ValueError, match=f"memory must be more than 0 bytes, got '{text}'"):
        MemorySize.parse(text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("1e300TB", "memory must be at most 1000000TB, got '1e300TB'"),
        ("1e999B", "memory must be at most 1000000TB, got '1e999B'"),
        ("1000001TB", "memory must be at most 1000000TB, got '1000001TB'"),
        ("1e308x", "memory must be at most 1000000x, got '1e308x'"),
        ("9" * 5000 + "blocks", "memory must be at most 1000000000000000000 blocks, got a number of 5000 digits"),
    ],
    ids=lambda text: text[:20],
)
def test_too_much_memory_is_refused_with_the_most_that_is_right(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=f"^{says}$"):
        MemorySize.parse(text)


@pytest.mark.parametrize("text", ["8", "0", "1e9", "1.5"])
def test_a_number_without_a_unit_is_refused_with_its_text(text: str) -> None:
    with pytest.raises(ValueError, match=f"^memory must be a size with a unit such as {text}GB, got '{text}'$"):
        parse_memories(f"2GB,{text}")


@pytest.mark.parametrize("text", ["2GB,2GB", "2GB,1GB,2000MB", "0.5x,5e-1x", "3blocks,3 blocks"])
def test_an_amount_named_twice_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=f"--memory must name each amount once, got '{text}'"):
        parse_memories(text)


@pytest.mark.parametrize("text", ["", "GB", "-5GB", "5QB", "1.2.3GB", "nan", "4 0GB", "5xx"])
def test_a_malformed_amount_is_refused_with_its_text(text: str) -> None:
    with pytest.raises(ValueError, match=f"memory must be a number above 0 .*, got '{text}'"):
        MemorySize.parse(text)


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(999, "999 B"), (1500, "1.5 KB"), (40 * 10**9, "40 GB"), (3 * 10**12, "3 TB")]
)
def test_bytes_are_shown_in_decimal_units(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text
