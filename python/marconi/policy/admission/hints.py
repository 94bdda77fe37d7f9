"""Checkpoints where the program asks: a request may name positions of its prompt after which a state is kept.

    {"marconi_checkpoints": [1200, -1]}       after 1,200 tokens, and at the end of the prompt

Positions count the tokens before them, from 1 to the length of the prompt; -1 is that length. At most `MAX_HINTS` a
request: beyond, the shallowest are kept, which are shared by more. With pages of several tokens a position is cut down
to the page's end before it, by the plan (`plan.py`).
"""

from typing import Final, NamedTuple

MAX_HINTS: Final = 4
END: Final = -1


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
        raise ValueError(f"{must}, got {shown(value)}")
    positions = set()
    for index, position in enumerate(value):
        # A boolean is an integer to Python, and to nobody who writes one.
        if type(position) is not int or not (1 <= position <= num_prompt_tokens or position == END):
            raise ValueError(f"{must}, got {shown(position)} at {index}")
        positions.add(num_prompt_tokens if position == END else position)
    rising = sorted(positions)
    return Hints(tuple(rising[:MAX_HINTS]), tuple(rising[MAX_HINTS:]))


def shown(value: object) -> str:
    """`value` as a message shows it, cut where it is long."""
    # The head of a long list says enough.
    text = repr(value[:20] if isinstance(value, list) else value)
    return text if len(text) <= 40 else f"{text[:40]}..."
