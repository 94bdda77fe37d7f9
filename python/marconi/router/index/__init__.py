"""Who of a fleet holds which blocks of KV and which states, and what each has of a request."""

from marconi.router.index.base import Chain, Counters, Hit
from marconi.router.index.fleet_index import FleetIndex
from marconi.router.index.invariants import check_invariants
from marconi.router.index.replacement import Replacement

__all__ = ["Chain", "Counters", "FleetIndex", "Hit", "Replacement", "check_invariants"]
