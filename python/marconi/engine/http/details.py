"""The `cached_tokens_details` of an answer: its hints, and why its request missed."""

import json
from typing import Any

from marconi.engine.cache.scheduler import notes_of
from marconi.engine.http import diverged
from marconi.engine.http.hints import KV_HINTS, WITHOUT_SLOT
from marconi.engine.reports.explain import EXPLAIN, dumps


def on_get_cached_tokens_details(details: Any, _streamer: Any, req: Any) -> Any:
    """After `SchedulerOutputStreamer.get_cached_tokens_details`: what became of its hints, and why it missed."""
    notes = notes_of(req)
    told: dict[str, int | str] = {WITHOUT_SLOT: notes.num_without_slot} if notes.num_without_slot else {}
    if notes.kv_hints is not None:
        told[KV_HINTS] = json.dumps(notes.kv_hints)
    # A streamed answer is explained in its last part: the steps of its request are complete there.
    if notes.explained is not None and notes.steps is not None and req.finished():
        told[EXPLAIN] = dumps(notes.explained, notes.steps)
        # Without a salt of its own, a prompt may be beside anybody's.
        if notes.explained.diverged is not None and req.cache_salt:
            told[diverged.DIVERGED] = json.dumps(diverged.as_dict(notes.explained.diverged))
    return {**(details or {"device": 0, "host": 0}), **told} if told else details
