"""How what a router knows of its workers stays true: sequence numbers, epochs, snapshots, and guesses that expire."""

from marconi.router.sync.base import Request, State, SyncLimits, SyncStats
from marconi.router.sync.fleet import Fleet

__all__ = ["Fleet", "Request", "State", "SyncLimits", "SyncStats"]
