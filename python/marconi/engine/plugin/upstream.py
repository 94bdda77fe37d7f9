"""Every change that the cache makes to SGLang's behaviour, by group: `upstream.toml` has a line for each.

A group is what a process takes on at one place: `touch.hook_into(GROUP)` puts its hooks in and holds that they took
effect; the other kinds stand in the code that they name. `UPSTREAM.md` (`make ledger`) shows this list, and that of the
CPU platform and the demo. What is merely called or read is found in the source, and its signatures stand in
`test/engine/upstream_signatures.json`; the contract test holds both against the installed SGLang.
"""

from pathlib import Path
from typing import Final

from marconi.engine import cpu_platform
from marconi.engine.plugin.touch import Group, groups_of, resolve

_ALL: Final = groups_of(Path(__file__).with_suffix(".toml"))
GROUPS: Final = tuple(_ALL.values())
PLUGIN, REQUESTS, TEXT, HTTP, SCHEDULER = (_ALL[name] for name in ("plugin", "requests", "text", "http", "scheduler"))
TRACKING, QUEUE, PREFILLS, DRAFTS = (_ALL[name] for name in ("tracking", "queue", "prefills", "drafts"))
SHORT_CONVOLUTIONS, SIDE_STATES, CHAINS = (_ALL[name] for name in ("short_convolutions", "side_states", "chains"))
KERNELS, ONE_POOL, RUNNING, INT8, LOAD = (_ALL[name] for name in ("kernels", "one_pool", "running", "int8", "load"))
_IN_CACHE: Final = (_ALL["cache"], TRACKING, _ALL["ranks"], QUEUE, PREFILLS, SHORT_CONVOLUTIONS, DRAFTS)


def of_every_process(on_cpu_platform: bool) -> tuple[Group, ...]:
    """The groups in place from the start of a process: the plugin's, and the CPU platform's where it was chosen."""
    return (PLUGIN, *resolve(cpu_platform.GROUPS)) if on_cpu_platform else (PLUGIN,)


def of_a_cache(on_cpu_platform: bool) -> tuple[Group, ...]:
    """The groups that the cache of a hybrid model needs; the CPU platform replaces the launchers above the kernels."""
    return _IN_CACHE if on_cpu_platform else (*_IN_CACHE, KERNELS)
