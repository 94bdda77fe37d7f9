"""Traces: readers of published formats, writers, and a generator of the papers' workloads.

`read` opens a file, folder or tar and guesses its format; `generate` draws a workload from a `Workload` or a preset's
name; `write` saves one; `in_blocks` makes a block trace of a token trace.
"""

from marconi.replay.trace.base import Half, Progress, ReadOptions, UnusedOption
from marconi.replay.trace.blocks import in_blocks
from marconi.replay.trace.formats import read, readers
from marconi.replay.trace.presets import PRESETS, preset
from marconi.replay.trace.workload import Demand, Workload, generate
from marconi.replay.trace.write import WRITERS, write

__all__ = [
    "PRESETS",
    "WRITERS",
    "Demand",
    "Half",
    "Progress",
    "ReadOptions",
    "UnusedOption",
    "Workload",
    "generate",
    "in_blocks",
    "preset",
    "read",
    "readers",
    "write",
]
