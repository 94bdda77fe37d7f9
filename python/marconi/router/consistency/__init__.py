"""How what a router knows of a fleet stays true: sequence numbers, epochs, snapshots, and guesses that expire."""

from marconi.router.consistency.base import Counters, Limits, Missing
from marconi.router.consistency.fleet import Fleet

__all__ = ["Counters", "Fleet", "Limits", "Missing"]
