"""Every change that the CPU platform, and the demo, make to SGLang: `upstream.toml` has a line for each."""

from pathlib import Path
from typing import Final

from marconi.engine.plugin.touch import groups_of

_ALL: Final = groups_of(Path(__file__).with_suffix(".toml"))
LAUNCHERS, POOL, DEVICE, DEMO = (_ALL[name] for name in ("launchers", "pool", "device", "demo"))
GROUPS: Final = (LAUNCHERS, POOL, DEVICE)
"""The platform's; the demo's are of a client's process."""
