"""The packages beside the product, by entry point: it finds what they offer by these groups, and imports neither.

    marconi.commands         functions that add commands, or options of one, to those of `marconi`
    marconi.policies         policies that a replay knows beside those that a server offers
    marconi.trace_formats    readers of further trace formats

This distribution's own are `marconi_cpu` and `marconi_lab`; another distribution's are found in the same way.
"""

from collections.abc import Iterator
from importlib.metadata import entry_points
from typing import Any, Final

COMMANDS: Final = "marconi.commands"
POLICIES: Final = "marconi.policies"
TRACE_FORMATS: Final = "marconi.trace_formats"


def installed(group: str) -> Iterator[Any]:
    """The objects of `group` that are installed, loaded, in order of name."""
    for entry in sorted(entry_points(group=group)):
        yield entry.load()
