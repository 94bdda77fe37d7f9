"""What a server of a negative control breaks, told in its log: a control that broke nothing fails, and says so.

Wrong answers alone do not show that the control's fault made them, and right ones not that there was a fault to see.
Servers import this from their own folder, tests from the package.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SWITCH = "MARCONI_BREAK_STATES"
"""What names the file that `broken_state_server.py` looks for."""
BREAKS = "breaks"
"""That file, beside a server's log."""
_LINE = "negative control: {} broken"


def tell(num: int) -> None:
    """In the server: as many states were broken, or what else the control is about."""
    if num:
        print(_LINE.format(num), flush=True)


def num_broken(log_path: Path) -> int:
    """How many the server of this log broke, on all ranks."""
    log = log_path.read_text(encoding="utf-8", errors="replace")
    return sum(map(int, re.findall(_LINE.format(r"(\d+)"), log)))


def require_broken(log_path: Path, before: int = 0) -> int:
    """How many the server of this log broke beyond `before`, of which there must be some."""
    num = num_broken(log_path) - before
    assert num, f"the negative control broke nothing, so its answers say nothing: {log_path}"
    return num


@contextmanager
def broken_states(server: Any) -> Iterator[None]:
    """A server of the fixture that breaks states, some at least, from an empty cache to an empty cache."""
    switch, before = server.log_path.parent / BREAKS, num_broken(server.log_path)
    flush = f"{server.url}/flush_cache?timeout=30"
    from .client import HTTP

    HTTP.post(flush, timeout=60.0).raise_for_status()
    switch.touch()
    try:
        yield
    finally:
        switch.unlink()
    HTTP.post(flush, timeout=60.0).raise_for_status()
    require_broken(server.log_path, before)
