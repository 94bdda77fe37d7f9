"""What a forward pass would read and write, in place of a model: each read is checked, each write remembered.

Indices and slots are taken from where a model takes them, the pool's tables: of a request's row its KV, and by row its
working slot and its tracking slots. Passes run in the order in which they are launched, as on one stream.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np

from rig.contents import Contents

_Marks = np.ndarray[Any, Any]


class ForwardPass:
    """Over `rows`, SGLang's table of requests, whose pools hold `contents`."""

    def __init__(self, rows: Any, contents: Contents) -> None:
        self._rows = rows
        self._contents = contents
        contents.follow(rows)

    def prefill(self, req: Any, expected: _Marks, slots: Iterable[tuple[int, int]]) -> None:
        """A chunk of the sequence with the marks `expected`; `slots` get the states at their depths.

        Raises `AssertionError` where the request would read another's memory.
        """
        kv, contents, start, end = req.kv, self._contents, req.prefix_len, req.extend_end
        working = self._working_slot(req)
        if kv.mamba_cow_src_index is not None:
            contents.resume(int(kv.mamba_cow_src_index), working)
        elif kv.mamba_needs_clear:
            contents.write_states([working], expected[0])
        contents.check_state(working, expected[start], req.rid)
        row = self._row(req)
        contents.check_kv(row[:start], expected[1 : start + 1], req.rid)
        contents.write_kv(row[start:end], expected[start + 1 : end + 1])
        contents.write_states([working], expected[end])
        for depth, slot in slots:
            contents.write_states([slot], expected[depth])

    def decode(self, req: Any, expected: _Marks, track_tokens: int) -> None:
        """The next token; with tracking, every `track_tokens` its state goes to a second slot, too.

        Raises `AssertionError` where the request would read another's memory.
        """
        kv, contents = req.kv, self._contents
        num_tokens, working, row = kv.kv_committed_len, self._working_slot(req), self._row(req)
        contents.check_state(working, expected[num_tokens - 1], req.rid)
        contents.check_kv(row[: num_tokens - 1], expected[1:num_tokens], req.rid)
        contents.write_kv(row[num_tokens - 1 : num_tokens], expected[num_tokens : num_tokens + 1])
        slots = [working]
        if track_tokens and num_tokens % track_tokens == 0:
            slots.append(self.tracking_slot(req, kv.mamba_next_track_idx))
        contents.write_states(slots, expected[num_tokens])

    def tracking_slot(self, req: Any, index: int) -> int:
        """One of a request's tracking slots."""
        return int(self._rows.req_index_to_mamba_ping_pong_track_buffer_mapping[req.kv.req_pool_idx, index])

    def _working_slot(self, req: Any) -> int:
        return int(self._rows.req_index_to_mamba_index_mapping[req.kv.req_pool_idx])

    def _row(self, req: Any) -> np.ndarray[Any, Any]:
        row: np.ndarray[Any, Any] = self._rows.req_to_token[req.kv.req_pool_idx].numpy()
        return row
