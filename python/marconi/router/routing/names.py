"""The rules by name, as command lines and reports call them."""

from collections.abc import Callable, Mapping
from typing import Final

from marconi.model.latency import LatencyModel
from marconi.router.routing.base import Routing
from marconi.router.routing.least_loaded import LeastLoaded
from marconi.router.routing.round_robin import RoundRobin
from marconi.router.routing.soonest import kv_only, state_aware
from marconi.router.routing.sticky_hash import StickyHash

ROUTINGS: Final[Mapping[str, Callable[[LatencyModel], Routing]]] = {
    "round-robin": RoundRobin,
    "least-loaded": LeastLoaded,
    "sticky-hash": StickyHash,
    "kv-only": kv_only,
    "state-aware": state_aware,
}


def routing_of(name: str, latency: LatencyModel) -> Routing:
    """The rule called `name`, as it comes; `ValueError` for another name."""
    if name not in ROUTINGS:
        raise ValueError(f"routing {name!r} is unknown; known are {', '.join(ROUTINGS)}")
    return ROUTINGS[name](latency)
