"""The subcommand `marconi check`."""

import argparse

from marconi.check.answer import answer
from marconi.check.line import CommandLine
from marconi.check.machine import Machine, Platform
from marconi.check.report import render, to_json
from marconi.engine.launch.model import Model
from marconi.replay.memory import MemorySize
from marconi.replay.report import console_for_tables
from marconi.replay.result import require_writable, write


def run(args: argparse.Namespace) -> int:
    """Print the answer; returns 0 if the command line would be served and 1 if not. `ValueError` for bad usage."""
    require_writable(args.json)
    memory, weights = (None if text is None else MemorySize.parse(text) for text in (args.gpu_memory, args.weights))
    machine = Machine(Platform(args.platform), memory, weights)
    launch_args = list(args.launch_args)
    if "--" in launch_args:
        launch_args.remove("--")
    line = CommandLine.parse(launch_args)
    found = answer(line, Model.find(line.model_path, args.config), machine)
    console_for_tables().print(render(found))
    if args.json is not None:
        write(args.json, to_json(found))
    return 0 if found.is_served else 1
