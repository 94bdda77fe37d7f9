"""The subcommand `marconi check`."""

import argparse
from functools import partial

from marconi.check.answer import answer
from marconi.check.line import CommandLine
from marconi.check.machine import Generation, Machine, Platform
from marconi.check.report import render, to_json
from marconi.engine.launch.model import Model
from marconi.replay.memory import MemorySize
from marconi.replay.report import deliver
from marconi.replay.result import require_writable


def run(args: argparse.Namespace) -> int:
    """Print the answer; returns 0 if the command line would be served and 1 if not. `ValueError` for bad usage."""
    require_writable(args.json)
    memory, weights = (None if text is None else MemorySize.parse(text) for text in (args.gpu_memory, args.weights))
    machine = Machine(Platform(args.platform), memory, weights, Generation(args.gpu))
    launch_args = list(args.launch_args)
    if "--" in launch_args:
        launch_args.remove("--")
    line = CommandLine.parse(launch_args)
    found = answer(line, Model.find(line.model_path, args.config), machine)
    deliver(render(found), args.json, partial(to_json, found))
    return 0 if found.is_served else 1
