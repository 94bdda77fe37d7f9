"""Choosing an eviction rule's parameter by replaying what was seen."""

from marconi.tuning.choice import LRU, choose
from marconi.tuning.live import Tunable, TunableTree
from marconi.tuning.objective import Objective, Score
from marconi.tuning.schedule import Schedule
from marconi.tuning.trial import Setup, Trial, run_trial, run_trials
from marconi.tuning.tuner import Decision, Tuner
from marconi.tuning.window import Window, pack_window
from marconi.tuning.workers import InlineWorkers, ProcessWorkers, Workers

__all__ = [
    "LRU",
    "Decision",
    "InlineWorkers",
    "Objective",
    "ProcessWorkers",
    "Schedule",
    "Score",
    "Setup",
    "Trial",
    "Tunable",
    "TunableTree",
    "Tuner",
    "Window",
    "Workers",
    "choose",
    "pack_window",
    "run_trial",
    "run_trials",
]
