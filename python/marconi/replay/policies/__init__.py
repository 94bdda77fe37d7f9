"""Policies as a replay drives them: `target.py` makes one for a trace and an amount of memory, in bytes.

`block.py` is a cache of blocks in place of a server.
"""

from marconi.replay.policies.target import CacheConfig, Host, ReplayTarget, build, require_possible

__all__ = ["CacheConfig", "Host", "ReplayTarget", "build", "require_possible"]
