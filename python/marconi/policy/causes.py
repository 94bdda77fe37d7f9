"""The causes of misses in one table, which names, orders and colours them wherever they are shown.

    MORE MEMORY       evicted_for_bytes  evicted_from_host
    DIVISION          evicted_for_kv  evicted_for_states  no_slot  chunk_rounding  page_rounding
    PROMPT            no_state  hint_over_limit  other_namespace  first_seen
    NOTHING           load_declined  least_gain  not_written  last_token  uncached

A cause stands with its cure, as do its colour, whose hue is the cure's, and its hatching on the page
(`view/document.py`), which tells it apart without colour. One colour serves light and dark: it has a contrast of 3 with
the ground of either. `misses.py` says when which cause holds, and docs/why-a-miss.md, under the heading of each, what
to do.
"""

from enum import Enum, StrEnum
from typing import Final, Self

_PAGE: Final = "docs/why-a-miss.md"


class Cure(Enum):
    """The cure of a miss, by which causes are grouped."""

    MEMORY = "more memory"
    """On the device or the host."""
    DIVISION = "another division"
    """Memory among KV and states, or prompts into chunks and pages."""
    PROMPT = "the prompt's own change"
    """By whoever writes the prompts, their salts and the positions that they name."""
    NOTHING = "nothing to do"
    """With prompts or memory, at least."""


class Cause(StrEnum):
    """Why prompt tokens were computed: its id, what is said of a part, its cure and its colour.

    The docstring of each says in which case.
    """

    said: str
    """With gaps for what is known of a part: `ago`, `kept`, `diverged` and `since`."""
    cure: Cure
    color: str

    def __new__(cls, value: str, said: str, cure: Cure, color: str) -> Self:
        """A row of the table."""
        cause = str.__new__(cls, value)
        cause._value_ = value
        cause.said, cause.cure, cause.color = said, cure, color
        return cause

    __hash__ = str.__hash__
    """An enumeration's own runs in Python, and each miss is counted under its cause."""

    EVICTED_FOR_BYTES = "evicted_for_bytes", "state evicted{ago} for memory{kept}", Cure.MEMORY, "#b53495"
    """A state stood here until one pool for KV and states was short."""
    EVICTED_FROM_HOST = "evicted_from_host", "state evicted{ago} from the host{kept}", Cure.MEMORY, "#b979d8"
    """The device had evicted a state here, and the host its copy."""
    EVICTED_FOR_KV = "evicted_for_kv", "state evicted{ago} for KV{kept}", Cure.DIVISION, "#bf3c1b"
    """A state stood here; it and its KV were evicted for KV."""
    EVICTED_FOR_STATES = "evicted_for_states", "state evicted{ago} for another state{kept}", Cure.DIVISION, "#bc561b"
    """A state stood here until its slot was needed for another."""
    NO_SLOT = "no_slot", "state planned{ago}, no slot was free", Cure.DIVISION, "#b56c1a"
    """A state was planned here, and every slot held something worth more."""
    CHUNK_ROUNDING = "chunk_rounding", "known, less than a chunk", Cure.DIVISION, "#ad8019"
    """Known, beyond the last multiple of the grid on which states stand; only where they stand on one."""
    PAGE_ROUNDING = "page_rounding", "less than a page", Cure.DIVISION, "#a59318"
    """The rest of a page, which is never kept in part, behind whole pages that are all known."""
    NO_STATE = "no_state", "{diverged}, no state kept", Cure.PROMPT, "#16767e"
    """Known, but the prompt diverges before the next state: none was planned between the last one and there."""
    HINT_OVER_LIMIT = "hint_over_limit", "state asked for{ago} beyond the limit of a request", Cure.PROMPT, "#188673"
    """A program named this position beyond the number that a request may name."""
    OTHER_NAMESPACE = "other_namespace", "known in another name space", Cure.PROMPT, "#1b9763"
    """Known under another adapter, key or salt alone."""
    FIRST_SEEN = "first_seen", "first seen{since}", Cure.PROMPT, "#1ea84c"
    """Not known, or no longer."""
    LOAD_DECLINED = "load_declined", "on the host, not loaded", Cure.NOTHING, "#636b79"
    """The host has a copy of a state here, and computing was expected to be faster than loading, or memory short."""
    LEAST_GAIN = "least_gain", "{diverged}, too near the last state to keep one", Cure.NOTHING, "#6c7485"
    """Known, as in `NO_STATE`, but by fewer tokens than a state has to save to be planned."""
    NOT_WRITTEN = "not_written", "state planned{ago}, not written", Cure.NOTHING, "#767e8f"
    """A state was planned here, and the forward pass did not write it."""
    LAST_TOKEN = "last_token", "last token", Cure.NOTHING, "#818998"
    """The prompt's last token."""
    UNCACHED = "uncached", "served uncached", Cure.NOTHING, "#8c93a1"
    """The request was served without the cache: on request, or because it does not fit or has no identity."""

    @property
    def words(self) -> str:
        """Its name for people."""
        return self.value.replace("_", " ")

    @property
    def page(self) -> str:
        """Where to read on, in the project's tree."""
        return f"{_PAGE}#{self.value.replace('_', '-')}"
