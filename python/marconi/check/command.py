"""The answer of the subcommand `marconi check`."""

from functools import partial

from marconi.check.answer import answer
from marconi.check.line import CommandLine
from marconi.check.question import Question
from marconi.check.report import render, to_json
from marconi.engine.launch.model import Model
from marconi.replay.report import deliver


def run(question: Question) -> int:
    """Print the answer; returns 0 if the command line would be served and 1 if not. `ValueError` for bad usage."""
    line = CommandLine.parse(question.launch)
    found = answer(line, Model.find(line.model_path, question.config), question.machine)
    deliver(render(found), question.json, partial(to_json, found))
    return 0 if found.is_served else 1
