"""The numbers of `contents.py`, kept in SGLang's one pool itself: an entry of KV or a state is full of its mark.

So what SGLang does to the buffer is seen: entries that it moves to close up what was freed, or that overlap where the
two sides meet. With `--dcp-size` an entry has the tokens of as many ranks, a part each. Indices and slots are names, by
which its allocators tell where an entry lies.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from rig.contents import LEFT_ALONE, Contents

_WORD_BYTES = 8


class JointContents(Contents):
    """Of the one pool behind SGLang's allocator `kv`."""

    def __init__(self, kv: Any) -> None:
        self._allocator = kv
        words = kv.unified_buffer._raw.view(torch.int64)
        side = kv.full_attn_allocator
        self._num_sharing = side.page_size // side.pool_page_size
        self._kv_entries = _entries(words, side, self._num_sharing)
        self._state_entries = _entries(words, kv.mamba_allocator)[:, 0]

    def check_kv(self, row: np.ndarray[Any, Any], expected: np.ndarray[Any, Any], who: str) -> None:
        """Raise `AssertionError` unless the KV at the indices of `row` is of the tokens with the marks `expected`."""
        held = self._kv_entries[self._kv_places(row), row % self._num_sharing]
        wrong = (held != torch.from_numpy(expected)[:, None]).any(dim=1).nonzero().flatten()
        assert not len(wrong), f"{who} reads KV of another sequence, first at token {int(wrong[0])} of {len(row)}"

    def write_kv(self, row: np.ndarray[Any, Any], written: np.ndarray[Any, Any]) -> None:
        """A forward pass leaves KV at the indices of `row`."""
        self._kv_entries[self._kv_places(row), row % self._num_sharing] = torch.from_numpy(written)[:, None]

    def check_state(self, slot: int, expected: int, who: str) -> None:
        """Raise `AssertionError` unless the state in `slot` is the one with the mark `expected`."""
        held = self._state_entries[self._state_places([slot])]
        assert bool((held == int(expected)).all()), f"{who} reads a state of another sequence, in slot {slot}"

    def write_states(self, slots: Sequence[int], mark: int) -> None:
        """A forward pass leaves a state in `slots`."""
        self._state_entries[self._state_places(slots)] = int(mark)

    def copy_states(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """States are copied from slot to slot."""
        self._state_entries[self._state_places(destinations)] = self._state_entries[self._state_places(sources)]

    def places(self, indices: torch.Tensor, *, are_slots: bool) -> torch.Tensor:
        """Where the entries with these names lie, until they are moved."""
        return self._state_places(indices.tolist()) if are_slots else self._kv_places(indices.numpy())

    def read(self, places: torch.Tensor, *, are_slots: bool) -> np.ndarray[Any, Any]:
        """The marks of whole entries; what is of two is none."""
        held = (self._state_entries if are_slots else self._kv_entries[:, 0])[places]
        is_whole = (held == held[:, :1]).all(dim=1)
        marks: np.ndarray[Any, Any] = torch.where(is_whole, held[:, 0], LEFT_ALONE).numpy()
        return marks

    def write(self, places: torch.Tensor, written: np.ndarray[Any, Any] | int, *, are_slots: bool) -> None:
        """Leave marks there."""
        entries = self._state_entries if are_slots else self._kv_entries[:, 0]
        entries[places] = torch.as_tensor(written).reshape(-1, 1)

    def follow(self, rows: Any) -> None:
        """What SGLang copies, it copies here."""

    def _kv_places(self, row: np.ndarray[Any, Any]) -> torch.Tensor:
        places: torch.Tensor = self._allocator.translate_kv_loc(
            torch.from_numpy(row.astype(np.int64) // self._num_sharing)
        )
        return places

    def _state_places(self, slots: Sequence[int]) -> torch.Tensor:
        places: torch.Tensor = self._allocator.mamba_allocator.virtual_to_physical[list(slots)]
        return places


def _entries(words: torch.Tensor, allocator: Any, num_sharing: int = 1) -> torch.Tensor:
    """The buffer as entries of one side, each in `num_sharing` parts: (num_entries, num_sharing, num_words), a view."""
    num_words = allocator.entry_bytes // _WORD_BYTES
    return words[: allocator.max_slots * num_words].view(allocator.max_slots, num_sharing, -1)
