"""Checkpoints where the program asks: a request may name positions of its prompt after which a state is kept.

    {"marconi_checkpoints": [1200, -1]}       after 1,200 tokens, and at the end of the prompt

Positions count the tokens before them, from 1 to the length of the prompt; -1 is that length. At most `MAX_HINTS` a
request: beyond, the shallowest are kept, which are shared by more. With pages of several tokens a position is cut down
to the page's end before it, by the plan (`plan.py`).

The template of a chat tells where its system prompt ends, and so where other chats will diverge, before a second one
has. A state is planned there as well (`at_first_sighting`), by the first prompt that has at least `MIN_SYSTEM_TOKENS`
up to there that are new. Of a prompt that is known further, the branch point is kept, by the rule.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

MAX_HINTS: Final = 4
END: Final = -1
MIN_SYSTEM_TOKENS: Final = 64
"""A chunk of the kernels: system prompts that differ in their last lines, as in a date, leave no state each."""


class Hints(NamedTuple):
    """The checkpoints that a request asks for."""

    positions: tuple[int, ...]
    """Positions in tokens, rising, at most `MAX_HINTS`."""
    over_limit: tuple[int, ...] = ()
    """Positions asked for beyond those, rising."""


def hints_of(value: object, num_prompt_tokens: int) -> Hints:
    """The hints in `value` for a prompt of that length.

    Raises `ValueError`, in one line that begins with "must be", for anything but a list of integers within the prompt.
    """
    must = f"must be a list of integers from 1 to {num_prompt_tokens}, the prompt's length, or -1 for its end"
    if not isinstance(value, list | tuple):
        raise ValueError(f"{must}, got {_shown(value)}")
    positions = set()
    for index, position in enumerate(value):
        # A boolean is an integer to Python, and to nobody who writes one.
        if type(position) is not int or not (1 <= position <= num_prompt_tokens or position == END):
            raise ValueError(f"{must}, got {_shown(position)} at {index}")
        positions.add(num_prompt_tokens if position == END else position)
    rising = sorted(positions)
    return Hints(tuple(rising[:MAX_HINTS]), tuple(rising[MAX_HINTS:]))


def at_first_sighting(system_end: int, num_seen_tokens: int, asked: Sequence[int]) -> bool:
    """True if a state is kept at `system_end`, of a prompt of which `num_seen_tokens` tokens were seen before.

    `asked` are the positions that it names itself.
    """
    known = max([num_seen_tokens, *(position for position in asked if position <= system_end)])
    return system_end - known >= MIN_SYSTEM_TOKENS


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
