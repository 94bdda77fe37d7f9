"""How long states stay, and for what: each use and each end of a state on the device, by where it was left.

    gap         seconds between two uses of a state; the first counts from when it was left
    lifetime    seconds from when a state was left, or loaded from the host, to its eviction
    idle        seconds from its last use to its eviction, or from when it was left
    unused      whether no request resumed from it before it was evicted

A cache calls its watchers before it changes anything, and they change nothing (`hybrid_cache.py`).
"""

from enum import StrEnum
from typing import NamedTuple, Protocol

from marconi.policy.base import Need
from marconi.tree import Kept, Node


class Place(StrEnum):
    """Where a state was left."""

    BRANCH = "branch"
    """Several prompts continue it."""
    PROMPT_END = "prompt_end"
    ANSWER_END = "answer_end"
    WAY = "way"
    """On the way of a long prompt, or where a program asked."""


class Stay(NamedTuple):
    """A state's time on the device, which ends with its eviction. Times are in seconds."""

    place: Place
    lifetime_s: float
    idle_s: float
    is_unused: bool


class Watcher(Protocol):
    """Sees what becomes of the states of a cache."""

    def resuming(self, node: Node, now_s: float) -> None:
        """A request resumes from the state of `node`; said before its last use is written."""
        ...

    def evicting(self, node: Node, need: Need, now_s: float, kept: Kept | None) -> None:
        """The state of `node` is about to be evicted for `need`, and `kept` is kept instead, if the rule names one."""
        ...


def place_of(node: Node) -> Place:
    """Where the state of `node` was left."""
    if len(node.children) > 1:
        return Place.BRANCH
    if node.left_by is None:
        return Place.WAY
    return Place.PROMPT_END if node.depth <= node.left_by.num_prompt_tokens else Place.ANSWER_END


def gap_s(node: Node, now_s: float) -> float:
    """Seconds since the last use of the state of `node`, which is used now."""
    return max(now_s - node.last_hit_s, 0.0)


def stay_of(node: Node, now_s: float) -> Stay:
    """The stay of the state of `node`, which ends now."""
    since_s = node.last_hit_s if node.held_since_s is None else node.held_since_s
    return Stay(place_of(node), max(now_s - since_s, 0.0), gap_s(node, now_s), not node.num_hits)
