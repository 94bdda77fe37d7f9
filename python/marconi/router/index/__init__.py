"""Who of a fleet holds which blocks of KV and which states, and what each has of a request."""

from marconi.router.index.base import NO_HIT, Chain, Hit, IndexStats
from marconi.router.index.fleet_index import FleetIndex

__all__ = ["NO_HIT", "Chain", "FleetIndex", "Hit", "IndexStats"]
