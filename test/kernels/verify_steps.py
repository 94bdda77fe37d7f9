"""Steps over drafts as lists, and who ends in them by going through each token."""

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

NUM_REQUESTS = 9
"""Rows of the table of tracking slots."""


@dataclass(frozen=True, slots=True)
class Drafted:
    """What one request has in a step."""

    said: list[int]
    """Tokens after each of its nodes,"""
    accepted: list[int]
    """and those that were accepted."""
    num_before: int
    stops: list[int]
    max_length: int
    by_host: bool
    slots: list[int]
    turn: int

    def expected(self) -> tuple[int, int, int]:
        """Node, slot and depth of the state that it leaves."""
        # The token that was sampled last is the first that has no state yet.
        length, depth = self.num_before + 1, self.num_before + 1 if self.by_host else None
        for node in self.accepted:
            length += 1
            if self.said[node] in self.stops or length == self.max_length:
                depth = min(length, self.num_before + len(self.accepted))
                break
        if depth is None or self.turn < 0 or self.slots[self.turn] < 0:
            return -1, 0, -1
        return self.accepted[depth - self.num_before - 1], self.slots[self.turn], depth


TOKENS = st.integers(0, 5)


@st.composite
def steps(draw: st.DrawFn, max_batch: int = 3, max_nodes: int = 5) -> list[Drafted]:
    """The requests of a step, as many nodes each."""
    num_nodes = draw(st.integers(1, max_nodes))
    depth = draw(st.integers(1, num_nodes))
    return [
        Drafted(
            said=draw(st.lists(TOKENS, min_size=num_nodes, max_size=num_nodes)),
            accepted=[0, *sorted(draw(st.sets(st.integers(1, num_nodes - 1), max_size=depth - 1)))]
            if num_nodes > 1
            else [0],
            num_before=(num_before := draw(st.integers(1, 20))),
            stops=sorted(draw(st.sets(TOKENS, max_size=2))),
            max_length=num_before + draw(st.integers(-2, 9)),
            by_host=draw(st.booleans()),
            slots=draw(st.lists(st.integers(-1, 40), min_size=2, max_size=2)),
            turn=draw(st.integers(-1, 1)),
        )
        for _ in range(draw(st.integers(1, max_batch)))
    ]


def arguments(
    step: list[Drafted],
    device: torch.device | str = "cpu",
    dtypes: tuple[torch.dtype, torch.dtype] = (torch.int32, torch.int64),
) -> dict[str, Any]:
    """Those of `draft_ends.find`, as SGLang has them: what comes from a step in the first dtype, the rest in the other.

    Requests lie anywhere in the table of tracking slots.
    """
    narrow, wide = dtypes
    num_nodes, depth = len(step[0].said), max(len(each.accepted) for each in step)
    num_stops = max(len(each.stops) for each in step)
    requests = [(5 * row + 2) % NUM_REQUESTS for row in range(len(step))]
    tracking_slots = torch.full((NUM_REQUESTS, 2), 77, dtype=wide)
    for row, each in zip(requests, step, strict=True):
        tracking_slots[row] = torch.tensor(each.slots)
    accepted = [
        [*(row * num_nodes + node for node in each.accepted), *[-1] * (depth - len(each.accepted))]
        for row, each in enumerate(step)
    ]
    stops = [[*each.stops, *[-1] * (num_stops - len(each.stops))] for each in step]
    tensors: dict[str, tuple[list[Any], torch.dtype]] = {
        "tokens_out": ([token for each in step for token in each.said], narrow),
        "accepted": (accepted, narrow),
        "num_accepted": ([len(each.accepted) for each in step], narrow),
        "num_before": ([each.num_before for each in step], wide),
        "stop_tokens": (stops, wide),
        "max_lengths": ([each.max_length for each in step], wide),
        "by_host": ([each.by_host for each in step], torch.bool),
        "requests": (requests, wide),
        "turns": ([each.turn for each in step], wide),
    }
    made = {name: torch.tensor(values, dtype=dtype).to(device) for name, (values, dtype) in tensors.items()}
    return {**made, "tracking_slots": tracking_slots.to(device), "num_nodes": num_nodes}


def expected(step: list[Drafted]) -> list[list[int]]:
    """The rows of `out`."""
    nodes, slots, depths = zip(*(each.expected() for each in step), strict=True)
    return [[*nodes], [*slots], [*depths]]
