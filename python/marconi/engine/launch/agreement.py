"""The checks that a server's ranks agree: on flags, versions and pools before its first request, then on their actions.

Flags travel as environment variables, node by node; a pool that is larger on one rank evicts later there; and where
logarithms are rounded differently (another processor or C library), so are ages compared. Each makes ranks diverge in
the middle of a request. So every rank sends all others its settings, once, when the cache is built
(`all_gather_object` of SGLang's group of ranks), and a difference ends the server with one line.
"""

import math
import socket
import struct
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

from marconi.engine.version import Refusal


class RankSettings(NamedTuple):
    """The settings of one rank, as text, by name."""

    rank: int
    node: str
    settings: Mapping[str, str]


def first_difference(ranks: Sequence[RankSettings]) -> str | None:
    """The first setting in which a rank differs from rank 0, in one line; None where all are alike."""
    first, *others = ranks
    for other in others:
        for name in dict.fromkeys([*first.settings, *other.settings]):
            values = [each.settings.get(name, "not set") for each in (first, other)]
            if values[0] != values[1]:
                places = [f"{each.node} (rank {each.rank})" for each in (first, other)]
                return (
                    f"{name} must be the same on all ranks, got {values[0]} on {places[0]} "
                    f"and {values[1]} on {places[1]}"
                )
    return None


def digest_of_logarithms() -> str:
    """Digest how this machine rounds logarithms and exponentials, over the range of ages and benefits."""
    numbers = [math.ldexp(1.0 + step / 64, exponent) for exponent in range(-10, 30) for step in range(0, 64, 3)]
    values = [function(number) for function in (math.log2, math.log, math.log1p) for number in numbers]
    values += [function(-number) for function in (math.exp, math.expm1) for number in numbers]
    return blake2b(struct.pack(f"<{len(values)}d", *values), digest_size=8).hexdigest()


def require_alike(settings: Mapping[str, str], group: Any) -> None:
    """Raise `Refusal` on every rank of `group`, SGLang's coordinator of ranks, unless all give the same settings."""
    if group.world_size == 1:
        return
    import torch.distributed

    own = RankSettings(group.rank_in_group, socket.gethostname(), dict(settings))
    ranks: list[Any] = [None] * group.world_size
    torch.distributed.all_gather_object(ranks, own, group=group.cpu_group)
    difference = first_difference(ranks)
    if difference is not None:
        raise Refusal(difference)
