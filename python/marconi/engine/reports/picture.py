"""The live page of a server: the tree of each scheduler's cache, drawn in a browser (`marconi.view`).

    GET /marconi/ui                  the page, which asks for frames
    GET /marconi/ui/frame            the latest frame of the scheduler of `?dp_rank=` (default: the first), as JSON
    GET /marconi/ui/history          its last hour in small figures, which were noted whether or not anybody looked
                                     (`history.py`)

A scheduler walks its tree only while somebody looks, `SLICE_NODES` at a time, whenever the process that answers HTTP
asks; that asks again until the frame is whole. So a server on which nobody looks pays nothing for frames. One that is
looked at waits for a slice at most, some two milliseconds, but for the last three: its states are ranked, its columns
made and its JSON written, each in one piece, some 14 ms with 100,000 nodes. A large tree's prefixes are hashed over
several frames: until then the page says that it does not know them. A flush begins a new walk. Owner: the scheduler's
thread.
"""

from collections.abc import Callable
from typing import Any, Final

import msgspec

from marconi.engine.reports.status import Status, Use
from marconi.policy.base import Costs
from marconi.policy.hybrid_cache import HybridCache
from marconi.view.frame import Frame, PoolFrame
from marconi.view.recorder import Recorder
from marconi.view.snapshot import MAX_HASHED_BYTES, Columns

SLICE_NODES: Final = 1_500
"""Some two milliseconds."""


PATIENCE_S: Final = 60.0
"""Without a request for a frame, until evictions are no longer noted."""


class Picture:
    """Makes the frames of one cache."""

    def __init__(self, costs: Costs, status: Callable[[], Status]) -> None:
        self._costs = costs
        self._status = status
        self._recorder: Recorder | None = None
        self._whole: Frame | None = None
        """A frame that is not encoded yet: a large one's JSON is a slice of its own."""

    def advance(self, hybrid: HybridCache, now_s: float) -> bytes:
        """Walk on through the tree of `hybrid`; returns the frame of `now_s` as JSON once it is whole, else nothing."""
        if self._whole is not None:
            whole, self._whole = self._whole, None
            return msgspec.json.encode(whole)
        if self._recorder is None:
            self._recorder = Recorder(hybrid, self._costs, self._pools, PATIENCE_S, MAX_HASHED_BYTES)
        elif self._recorder.hybrid is not hybrid:
            self._recorder.follow(hybrid)
        frame = self._recorder.advance(now_s, SLICE_NODES)
        if frame is not None and len(frame.nodes.parent) > SLICE_NODES:
            self._whole = frame
            return b""
        return b"" if frame is None else msgspec.json.encode(frame)

    def _pools(self, _nodes: Columns) -> list[PoolFrame]:
        status = self._status()
        pools = [_pool("KV", "tokens", status.kv_tokens), _pool("states", "slots", status.state_slots)]
        if status.joint_bytes is not None:
            held, joint = status.held_bytes, status.joint_bytes
            cached = {kind: held[kind] for kind in ("KV", "states")}
            pools = [PoolFrame("KV and states", "bytes", joint.size, joint.free, cached)]
        if status.host is not None:
            pools.append(_pool("KV on the host", "tokens", status.host.kv_tokens))
            pools.append(_pool("states on the host", "slots", status.host.state_slots))
        return pools


def _pool(name: str, unit: str, use: Use) -> PoolFrame:
    what: Any = "KV" if unit == "tokens" else "states"
    return PoolFrame(name, unit, use.size, use.free, {what: use.cached})
