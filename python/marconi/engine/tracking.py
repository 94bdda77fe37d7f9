"""Requests without tracking slots, where nobody would read what SGLang tracks.

SGLang copies the state of a running request to one of two further slots every few hundred tokens, and keeps that at its
end. With pages of one token and no drafts this cache keeps the working state instead (`speculation.Ends.WORKING`), so a
request needs one slot in place of three, and the tree has the others:

    pool       is said to begin a request with no tracking slot: none is taken, reserved or freed
    request    has slot 0 in both places, the padding that no pool lends; what SGLang tracks is written there

Where SGLang has to keep states itself after all (`faults.py`), requests that begin from then on have their slots.

Owner: the scheduler's thread.
"""

from typing import Any

from marconi.engine.speculation import Ends


def lends_slots(ends: Ends, is_lazy: bool) -> bool:
    """True if a server that plans its states reads nothing that SGLang tracks; `is_lazy` is `extra_buffer_lazy`.

    There SGLang takes a request's second slot whenever it tracks, and frees the first.
    """
    return ends is Ends.WORKING and not is_lazy


def lend(pool: Any) -> int:
    """Have requests of `pool`, SGLang's of requests, begin without tracking slots; returns how many they had."""
    num_slots: int = pool.mamba_initial_tracking_slots
    pool.mamba_initial_tracking_slots = 0
    return num_slots


def after_alloc_buffer(_result: None, pool: Any, req: Any) -> None:
    """After `HybridReqToTokenPool._alloc_ping_pong_buffer`: what has no slot writes to the padding."""
    if not pool.mamba_initial_tracking_slots:
        req.kv.mamba_ping_pong_track_buffer.zero_()


def is_tracked(req: Any) -> bool:
    """False for a request that began without tracking slots; true as well where SGLang tracks nothing at all."""
    is_empty = req.kv.mamba_ping_pong_empty
    return is_empty is None or not all(is_empty)
