"""Identities of blocks and tokens: ids made dense, and what is known of decoded tokens.

A block trace names the blocks of prompts only. What was decoded becomes known from the next prompt of the conversation:
if that starts with all whole blocks of this prompt and is at least as long as prompt and output together, its blocks up
to (prompt + output) // block are taken for this request's own. A server knows its own output, so this is no look-ahead.
"""

import dataclasses
from collections.abc import Hashable

from marconi.policy.request import Request
from marconi.tree.node import ID_BYTES

MAX_ID = 2**32 - 1
"""The largest id that a path can hold."""


class DenseIds(dict[Hashable, int]):
    """Numbers keys from 0 in the order of their first use."""

    def __missing__(self, key: Hashable) -> int:
        self[key] = number = len(self)
        return number


def with_output(request: Request, following: Request | None, unit: int) -> Request:
    """`request`, whose path is its prompt's blocks of `unit` tokens, with what is known of its output.

    `following` is the conversation's next request, with its prompt's blocks as well; None where there is none.
    """
    num_whole = request.num_prompt_tokens // unit
    num_tokens = request.num_prompt_tokens + request.num_output_tokens
    path, num_blocks = request.path, num_whole
    if (
        following is not None
        and following.num_prompt_tokens >= num_tokens
        and following.path.startswith(path[: num_whole * ID_BYTES])
    ):
        num_blocks = num_tokens // unit
        if num_blocks > num_whole:  # or else the prompt's partial block, which has an id of its own, stays
            path = following.path[: num_blocks * ID_BYTES]
    return dataclasses.replace(request, path=path, num_known_tokens=num_blocks * unit)
