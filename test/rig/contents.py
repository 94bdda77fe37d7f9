"""What a model would have put into KV and states, remembered as one number for each index and slot.

    mark(0) is that of the name space,  mark(n) = hash(mark(n - 1), token n)

The KV of token n and a state after n tokens carry mark(n) of their sequence, so a request that reads memory of another
sequence, or memory that was lent twice, reads a wrong number. Nothing is freed here: what is stale keeps its number.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

LEFT_ALONE = -1
"""What no model has written."""


def marks(tokens: Iterable[int], namespace: tuple[str | None, str | None]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Mark 0 to mark n of `tokens` in the space of an `extra_key` and a `cache_salt`."""
    # Python salts its hashes of text by process: spell the names as numbers.
    mark = hash(tuple(tuple((part or "").encode()) for part in namespace))
    found = [mark]
    for token in tokens:
        mark = hash((mark, token))
        found.append(mark)
    return np.array(found, dtype=np.int64)


class Contents:
    """Of the pools of one cache."""

    def __init__(self, num_kv_indices: int, num_slots: int) -> None:
        """Indices run from 1 and are padded by a page, slots from 1."""
        self.kv = np.full(num_kv_indices, LEFT_ALONE, dtype=np.int64)
        self.states = np.full(num_slots, LEFT_ALONE, dtype=np.int64)

    def check_kv(self, row: np.ndarray[Any, Any], expected: np.ndarray[Any, Any], who: str) -> None:
        """Raise `AssertionError` unless the KV at the indices of `row` is of the tokens with the marks `expected`."""
        wrong = np.flatnonzero(self.kv[row] != expected)
        assert not len(wrong), f"{who} reads KV of another sequence, first at token {wrong[0]} of {len(row)}"

    def write_kv(self, row: np.ndarray[Any, Any], written: np.ndarray[Any, Any]) -> None:
        """A forward pass leaves KV at the indices of `row`."""
        self.kv[row] = written

    def check_state(self, slot: int, expected: int, who: str) -> None:
        """Raise `AssertionError` unless the state in `slot` is the one with the mark `expected`."""
        assert self.states[slot] == expected, f"{who} reads a state of another sequence, in slot {slot}"

    def write_states(self, slots: Sequence[int], mark: int) -> None:
        """A forward pass leaves a state in `slots`."""
        self.states[list(slots)] = mark

    def copy_states(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """States are copied from slot to slot."""
        self.states[list(destinations)] = self.states[list(sources)]

    def resume(self, source: int, working: int) -> None:
        """A hit: the state of the tree in slot `source` is copied to a request's working slot."""
        self.copy_states([source], [working])

    # Copies from and to a host tier, as SGLang's transfer engine makes them: places are found when one is asked for

    def places(self, indices: torch.Tensor, *, are_slots: bool) -> torch.Tensor:
        """Where what the names `indices` stand for lies: there."""
        return indices

    def read(self, places: torch.Tensor, *, are_slots: bool) -> np.ndarray[Any, Any]:
        """The marks that lie there."""
        return (self.states if are_slots else self.kv)[places.numpy()]

    def write(self, places: torch.Tensor, written: np.ndarray[Any, Any] | int, *, are_slots: bool) -> None:
        """Leave marks there."""
        (self.states if are_slots else self.kv)[places.numpy()] = written

    def follow(self, rows: Any) -> None:
        """See the copies that the pool of states behind `rows`, SGLang's table of requests, makes: forks."""
        pool = rows.mamba_pool
        copy = pool.copy_from

        def watched(sources: torch.Tensor, destinations: torch.Tensor) -> None:
            copy(sources, destinations)
            self.copy_states(sources.tolist(), destinations.tolist())

        pool.copy_from = watched
