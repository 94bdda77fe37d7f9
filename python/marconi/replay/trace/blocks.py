"""A token trace as a block trace: what an engine with pages or a block cache sees of it.

A block's id stands for its tokens and all before it. A request's path holds the whole blocks of prompt and output and,
where the output does not complete it, the prompt's last partial block, which has an id of its own.
"""

import dataclasses

from marconi.policy.request import Request, Trace, pack
from marconi.replay.trace.identity import DenseIds
from marconi.tree.node import ID_BYTES

_ROOT = -1


def in_blocks(trace: Trace, block_tokens: int) -> Trace:
    """`trace`, whose unit must be a token, in units of `block_tokens`."""
    if trace.unit_tokens != 1:
        raise ValueError(f"{trace.name} must be a trace of single tokens, got units of {trace.unit_tokens} tokens")
    if block_tokens < 1:
        raise ValueError(f"block_tokens must be at least 1, got {block_tokens}")
    numbers = DenseIds()
    return dataclasses.replace(
        trace,
        unit_tokens=block_tokens,
        requests=tuple(_blocks(request, block_tokens, numbers) for request in trace.requests),
    )


def number_prompt_blocks(request: Request, block_tokens: int, numbers: DenseIds) -> list[int]:
    """Number the blocks of a token request's prompt, the partial last one included, and give their ids."""
    return _chained(request.path[: request.num_prompt_tokens * ID_BYTES], block_tokens, numbers)


def _blocks(request: Request, block_tokens: int, numbers: DenseIds) -> Request:
    num_known = request.num_known_tokens // block_tokens * block_tokens
    num_named = max(num_known, request.num_prompt_tokens)
    path = pack(_chained(request.path[: num_named * ID_BYTES], block_tokens, numbers))
    return dataclasses.replace(request, path=path, num_known_tokens=num_known)


def _chained(path: bytes, block_tokens: int, numbers: DenseIds) -> list[int]:
    parent, found = _ROOT, []
    step = block_tokens * ID_BYTES
    for start in range(0, len(path), step):
        parent = numbers[parent, path[start : start + step]]
        found.append(parent)
    return found
