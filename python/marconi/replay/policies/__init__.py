"""Policies by their names on the command line.

    NAME[:NUMBER][@ADMISSION]       lru   marconi-static:0.5   lru-joint@every-block:512   best@judicious:64
                                    lru@chunk-end:256:64:8192

`spec.py` reads a name, `entry.py` is what stands behind one, `table.py` lists them all, `admissions.py` reads what
follows the `@`, `cache.py` and `block.py` are what a replay drives.
"""

from marconi.replay.policies.entry import Entry, Setting, Subject
from marconi.replay.policies.spec import PolicySpec, parse_list
from marconi.replay.policies.table import ENTRIES, build, entry_of, require_possible

__all__ = [
    "ENTRIES",
    "Entry",
    "PolicySpec",
    "Setting",
    "Subject",
    "build",
    "entry_of",
    "parse_list",
    "require_possible",
]
