"""A request that has ended, as the record of `--marconi-record FILE` has it (`marconi/record.py`)."""

from typing import TYPE_CHECKING

from marconi.record import Ended

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


def ended(req: "Req", arrival_s: float, namespace: int) -> Ended | None:
    """The entry of `req`; None for one that was aborted, and for embeddings, which have no ids to hash."""
    if req.finished_reason.to_json()["type"] == "abort" or req.input_embeds is not None:
        return None
    prompt, output = memoryview(req.origin_input_ids), memoryview(req.output_ids)
    num_cached = min(req.cached_tokens, len(prompt))
    return Ended(arrival_s, len(prompt), len(output), num_cached, namespace, b"".join((prompt, output)))
