"""Identities of blocks and tokens: ids made dense, and what is known of decoded tokens.

A block trace names the blocks of prompts only. What was decoded becomes known from the next prompt of the conversation:
if that starts with all whole blocks of this prompt and is at least as long as prompt and output together, its blocks up
to (prompt + output) // block are taken for this request's own. A server knows its own output, so this is no look-ahead.
"""

from collections.abc import Hashable
from dataclasses import dataclass

from marconi.tree.node import ID_BYTES


class DenseIds(dict[Hashable, int]):
    """Numbers keys from 0 in the order of their first use."""

    def __missing__(self, key: Hashable) -> int:
        self[key] = number = len(self)
        return number


@dataclass(frozen=True, slots=True)
class Known:
    """A request's path and how many tokens of it are known in whole units."""

    path: bytes
    num_known_tokens: int


def with_output(
    prompt: bytes,
    num_prompt_tokens: int,
    num_output_tokens: int,
    following: bytes,
    num_following_tokens: int,
    unit: int,
) -> Known:
    """The known path of a request with the packed blocks `prompt`; its conversation's next prompt shows its output.

    `following` is empty, and `num_following_tokens` 0, where there is none. `unit` is the number of tokens a block.
    """
    num_whole = num_prompt_tokens // unit
    num_tokens = num_prompt_tokens + num_output_tokens
    if num_following_tokens >= num_tokens and following.startswith(prompt[: num_whole * ID_BYTES]):
        num_blocks = num_tokens // unit
        # The prompt's partial block has an id of its own: it stays where the output does not complete it.
        path = following[: num_blocks * ID_BYTES] if num_blocks > num_whole else prompt
        return Known(path, num_blocks * unit)
    return Known(prompt, num_whole * unit)
