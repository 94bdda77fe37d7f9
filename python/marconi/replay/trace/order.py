"""Records in order: which of them are bad where a value, a time for one, goes back.

Without skipping, records pass one by one, and the first that goes back is bad. With it, all are read first and the
fewest are left out whose absence leaves the rest in order, later ones rather than earlier ones: a single time far too
late takes nothing with it but its own line. These are the records outside a longest non-decreasing subsequence, found
by patience sorting in n log n steps.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from marconi.replay.trace.base import Watch
from marconi.replay.trace.source import Source

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Placed(Generic[T]):
    """A value with the line of the document that it was read from."""

    document: str
    line: int
    content: T

    @property
    def place(self) -> str:
        """Name for messages."""
        return f"{self.document}, line {self.line}"


@dataclass(frozen=True, slots=True)
class Order(Generic[T]):
    """A value that must not go back from a record to the next."""

    name: str
    of: Callable[[T], Any]
    shown: Callable[[Any], str]
    session: Callable[[T], Hashable] | None = None
    """Where each session has an order of its own: which one a record is of."""

    def group(self, content: T) -> Hashable:
        """Equal for records that stand in one order."""
        return None if self.session is None else self.session(content)

    def fault(self, value: object, than: object, *, before: bool) -> str:
        """The fault of `value`, beside one that stands before or after it."""
        whose = "" if self.session is None else " of its session"
        side = (
            f"earlier than {self.shown(than)}{whose} before"
            if before
            else f"later than {self.shown(than)}{whose} after"
        )
        return f"{self.name} {self.shown(value)} is {side} it"


def lines(source: Source, watch: Watch, of: Callable[[bytes], T]) -> Iterator[Placed[T]]:
    """Yield the result of `of` for each line of the documents, bad ones left to `watch`."""
    for document in source.documents():
        yield from document_lines(document.name, document.lines(), watch, of)


def document_lines(
    document: str, numbered: Iterable[tuple[int, bytes]], watch: Watch, of: Callable[[bytes], T]
) -> Iterator[Placed[T]]:
    """Yield the result of `of` for each of a document's lines, which come with their numbers."""
    for number, line in numbered:
        read: list[T] = []
        with watch.at(document, number):
            read.append(of(line))
        if read:
            yield Placed(document, number, read[0])


def in_order(records: Iterable[Placed[T]], order: Order[T], watch: Watch) -> Iterator[Placed[T]]:
    """The records that are in order, as they came; the others are refused by `watch`."""
    return _fewest_left_out(list(records), order, watch) if watch.skips else _checked(records, order, watch)


def _checked(records: Iterable[Placed[T]], order: Order[T], watch: Watch) -> Iterator[Placed[T]]:
    lasts: dict[Hashable, Any] = {}
    for record in records:
        value, group = order.of(record.content), order.group(record.content)
        if group in lasts and value < lasts[group]:
            watch.refuse(record.place, order.fault(value, lasts[group], before=True))
        lasts[group] = value
        yield record


def _fewest_left_out(records: Sequence[Placed[T]], order: Order[T], watch: Watch) -> Iterator[Placed[T]]:
    groups: defaultdict[Hashable, list[int]] = defaultdict(list)
    for index, record in enumerate(records):
        groups[order.group(record.content)].append(index)
    faults: dict[int, str] = {}
    for indices in groups.values():
        values = [order.of(records[index].content) for index in indices]
        kept = longest_in_order(values)
        for before, after in zip([None, *kept], [*kept, None], strict=True):
            for left_out in range(0 if before is None else before + 1, len(values) if after is None else after):
                value = values[left_out]
                if before is not None and value < values[before]:
                    faults[indices[left_out]] = order.fault(value, values[before], before=True)
                elif after is not None:
                    faults[indices[left_out]] = order.fault(value, values[after], before=False)
    for index, record in enumerate(records):
        if index in faults:
            watch.refuse(record.place, faults[index])
        else:
            yield record


def longest_in_order(values: Sequence[Any]) -> list[int]:
    """Indices of a longest subsequence that never goes back, of earlier rather than later values among equals."""
    # From the end, so that of two that exclude each other the earlier one stands in the end.
    ranks = {value: -rank for rank, value in enumerate(sorted(set(values)))}
    tails: list[int] = []
    ends: list[int] = []
    following = [-1] * len(values)
    for index in range(len(values) - 1, -1, -1):
        rank = ranks[values[index]]
        length = bisect_right(tails, rank)
        following[index] = ends[length - 1] if length else -1
        tails[length : length + 1] = [rank]
        ends[length : length + 1] = [index]
    kept = [ends[-1]] if ends else []
    while kept and following[kept[-1]] >= 0:
        kept.append(following[kept[-1]])
    return kept
