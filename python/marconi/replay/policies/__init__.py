"""Policies as a replay drives them: `subject.py` makes one for a trace and an amount of memory, in bytes.

`block.py` is a cache of blocks in place of a server.
"""

from marconi.replay.policies.subject import Host, Setting, Subject, build, require_possible

__all__ = ["Host", "Setting", "Subject", "build", "require_possible"]
