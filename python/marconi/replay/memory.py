"""How much memory a replay gets: `40GB`, `512MiB`, `1e9B`, `0.05x` or, for block caches, `3000blocks`.

`0.05x` is relative to the bytes that an unbounded cache would hold at the end of the trace: judicious admission at the
trace's unit, nothing evicted. Decimal units are powers of 1000, binary ones (`KiB`, `MiB`, `GiB`, `TiB`) of 1024. A
bare number is refused, since who writes `8` does not mean bytes. A number of blocks is whole, and turned into bytes at
what a block of the trace takes, so that it holds just so many.
"""

import math
import re
from dataclasses import dataclass
from enum import StrEnum

MAX_BYTES = 10**18
"""The most memory, and the most blocks, that an amount may name."""
MAX_TIMES = 10**6
"""The most times of what an unbounded cache holds."""

_UNITS = {"B": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("KMGT", start=1)
    for suffix, base in (("B", 1000), ("iB", 1024))
}
_UNIT_OF = {name.lower(): size for name, size in _UNITS.items()}
_AMOUNT = re.compile(r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*([a-z]*)\s*", re.IGNORECASE)
_BLOCKS = re.compile(r"\s*(.*?)\s*blocks\s*", re.IGNORECASE)


class MemoryUnit(StrEnum):
    """The unit of an amount of memory."""

    BYTES = "B"
    UNBOUNDED = "x"
    """Multiples of what an unbounded cache holds."""
    BLOCKS = "blocks"
    """Blocks of the trace, for block caches alone."""


@dataclass(frozen=True, slots=True)
class MemorySize:
    """An amount of a unit; of blocks a whole one."""

    amount: float
    unit: MemoryUnit

    @classmethod
    def parse(cls, text: str) -> "MemorySize":
        """Read one amount; `ValueError` where it is malformed, not more than 0 or too large."""
        if blocks := _BLOCKS.fullmatch(text):
            return cls(_num_blocks(text, blocks.group(1)), MemoryUnit.BLOCKS)
        match = _AMOUNT.fullmatch(text)
        unit = match.group(2).lower() if match else ""
        try:
            number = float(match.group(1)) if match else math.nan
        except ValueError:
            number = math.nan
        if not (unit or math.isnan(number)):
            raise ValueError(f"memory must be a size with a unit such as {text.strip()}GB, got {text!r}")
        if math.isnan(number) or (unit != "x" and unit not in _UNIT_OF):
            raise ValueError(
                "memory must be a number above 0 with B, KB ... TB, KiB ... TiB or x, as 40GB, or 3000blocks for block "
                f"caches, got {text!r}"
            )
        amount = number if unit == "x" else number * _UNIT_OF[unit]
        if unit == "x" and amount > MAX_TIMES:
            raise ValueError(f"memory must be at most {MAX_TIMES}x, got {text!r}")
        if amount > MAX_BYTES:
            raise ValueError(f"memory must be at most {MAX_BYTES // 10**12}TB, got {text!r}")
        if amount <= 0 or (unit != "x" and amount < 1):
            raise ValueError(f"memory must be more than 0 bytes, got {text!r}")
        return cls(amount, MemoryUnit.UNBOUNDED if unit == "x" else MemoryUnit.BYTES)

    def bytes_of(self, unbounded_bytes: int | None, block_bytes: int) -> int:
        """The amount in bytes, 1 or more, given the sizes of an unbounded cache and of a block."""
        match self.unit:
            case MemoryUnit.BYTES:
                return int(self.amount)
            case MemoryUnit.BLOCKS:
                return int(self.amount) * block_bytes
            case MemoryUnit.UNBOUNDED:
                assert unbounded_bytes is not None, "a relative amount needs what it is relative to"
                return max(1, int(self.amount * unbounded_bytes))


def _num_blocks(text: str, number: str) -> int:
    if not (number.isascii() and number.isdigit() and float(number) >= 1):
        raise ValueError(f"memory in blocks must be a whole number, 1 or more, as 3000blocks, got {text!r}")
    if float(number) > MAX_BYTES:
        raise ValueError(f"memory must be at most {MAX_BYTES} blocks, got a number of {len(number)} digits")
    return int(number)


def parse_memories(text: str) -> tuple[MemorySize, ...]:
    """Read amounts separated by commas; `ValueError` for the same one twice."""
    memories: dict[MemorySize, str] = {}
    for part in text.split(","):
        memory = MemorySize.parse(part)
        if memory in memories:
            same = f"{memories[memory]!r} and {part!r} are the same amount"
            raise ValueError(f"--memory must name each amount once, got {text!r}: {same}")
        memories[memory] = part
    return tuple(memories)


def parse_host_memory(text: str | None) -> MemorySize | None:
    """Read the amount of a host tier, None if there is none; `ValueError` for blocks."""
    if text is None:
        return None
    try:
        memory = MemorySize.parse(text)
    except ValueError as error:
        raise ValueError(f"--host-memory: {error}") from None
    if memory.unit is MemoryUnit.BLOCKS:
        raise ValueError(f"--host-memory must be an amount of bytes, as 200GB, got {text!r}")
    return memory


def parse_storage_memory(text: str) -> int:
    """Read the amount of a store behind a host tier, in bytes; `ValueError` for any other unit."""
    try:
        memory = MemorySize.parse(text)
    except ValueError as error:
        raise ValueError(f"--storage-memory: {error}") from None
    if memory.unit is not MemoryUnit.BYTES:
        raise ValueError(f"--storage-memory must be an amount of bytes, as 2TB, got {text!r}")
    return int(memory.amount)


def format_bytes(num_bytes: int) -> str:
    """Format a size in decimal units, three digits."""
    for power, unit in ((4, "TB"), (3, "GB"), (2, "MB"), (1, "KB")):
        if num_bytes >= 1000**power:
            return f"{num_bytes / 1000**power:.3g} {unit}"
    return f"{num_bytes} B"
