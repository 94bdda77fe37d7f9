"""What a replica said of its server, as far as a router on some node can make use of it."""

from collections.abc import Mapping
from typing import Any

from marconi.events.address import TcpAddress


def heard_here(said: Mapping[str, Any], *, is_same_node: bool) -> Mapping[str, Any]:
    """What a replica said, with the reason as `unheard` where its events are told on another node's loopback.

    The same address of this node may be another replica's.
    """
    marconi = said.get("marconi")
    ranks = marconi.get("ranks") if isinstance(marconi, dict) else None
    if is_same_node or not isinstance(ranks, list) or not any(map(_is_on_loopback, ranks)):
        return said
    return {**said, "unheard": "it tells on the loopback of another node: events_keys is right"}


def _is_on_loopback(rank: Any) -> bool:
    events = rank.get("events") if isinstance(rank, dict) else None
    if not isinstance(events, dict):
        return False
    try:
        return TcpAddress.parse(str(events.get("events"))).is_loopback
    except ValueError:
        # A path in the file system of that node.
        return True
