"""Saves a trace, so that a generated workload can be replayed elsewhere. A name that ends in `.gz` is compressed.

- `mooncake`: lengths, times rounded to ms and block ids of prompts; sessions and outputs' identities are lost. A token
  trace is cut into blocks of 512 tokens, a block trace keeps its blocks (give its `block_tokens` when reading).
- `artifact`: everything of a token trace; a request without a session becomes a session of its own.
"""

import gzip
import io
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from marconi.policy.request import Trace, unpack
from marconi.replay.trace.blocks import number_prompt_blocks
from marconi.replay.trace.identity import DenseIds
from marconi.replay.trace.mooncake import BLOCK_TOKENS


def write(trace: Trace, path: str | os.PathLike[str], format: str) -> None:  # noqa: A002
    """Writes `trace` to `path`, whole or not at all.

    `ValueError` for an unknown format or a trace that the format cannot hold.
    """
    if format not in WRITERS:
        raise ValueError(f"format {format!r} cannot be written, must be one of {', '.join(WRITERS)}")
    lines = (json.dumps(record).encode() + b"\n" for record in WRITERS[format](trace))
    path = Path(path)
    unfinished = path.with_name(f"{path.name}.part")
    try:
        with unfinished.open("wb") as file:
            if path.suffix == ".gz":
                # No name and no time in the header: equal traces give equal bytes.
                with io.BufferedWriter(gzip.GzipFile("", "wb", fileobj=file, mtime=0)) as packed:
                    packed.writelines(lines)
            else:
                file.writelines(lines)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _mooncake(trace: Trace) -> Iterator[dict[str, Any]]:
    numbers = DenseIds()
    namespace = next((request.namespace for request in trace.requests if request.namespace), 0)
    if namespace:
        raise ValueError(f"{trace.name} must have no namespaces for the format mooncake, got {namespace}")
    for request in trace.requests:
        if trace.unit_tokens == 1:
            hashes = number_prompt_blocks(request, BLOCK_TOKENS, numbers)
        else:
            num_blocks = -(-request.num_prompt_tokens // trace.unit_tokens)
            hashes = unpack(request.path)[:num_blocks]
            if len(hashes) < num_blocks:
                raise ValueError(
                    f"{trace.name} must name the partial last block of a prompt for the format mooncake, "
                    f"got {len(hashes)} of {num_blocks} blocks"
                )
        yield {
            "timestamp": round(request.arrival_s * 1000),
            "input_length": request.num_prompt_tokens,
            "output_length": request.num_output_tokens,
            "hash_ids": hashes,
        }


def _artifact(trace: Trace) -> Iterator[dict[str, Any]]:
    if trace.unit_tokens != 1:
        raise ValueError(
            f"{trace.name} must be a trace of single tokens for the format artifact, "
            f"got units of {trace.unit_tokens} tokens"
        )
    next_session = 1 + max((request.session for request in trace.requests), default=-1)
    for request in trace.requests:
        tokens = unpack(request.path)
        if len(tokens) != request.num_prompt_tokens + request.num_output_tokens:
            raise ValueError(
                f"{trace.name} must name every token of its outputs for the format artifact, got "
                f"{len(tokens)} of {request.num_prompt_tokens + request.num_output_tokens}"
            )
        session = request.session
        if session < 0:
            session, next_session = next_session, next_session + 1
        record = {
            "session_id": session,
            "turn_id": request.turn,
            "ts": request.arrival_s,
            "num_input_tokens": request.num_prompt_tokens,
            "num_output_tokens": request.num_output_tokens,
            "input_tokens": tokens[: request.num_prompt_tokens],
            "output_tokens": tokens[request.num_prompt_tokens :],
        }
        yield record | ({"namespace": request.namespace} if request.namespace else {})


WRITERS: dict[str, Callable[[Trace], Iterator[dict[str, Any]]]] = {"mooncake": _mooncake, "artifact": _artifact}
