"""What a server of a negative control breaks, told in its log: a control that broke nothing fails, and says so.

Wrong answers alone do not show that the control's fault made them, and right ones not that there was a fault to see.
Servers import this from their own folder, tests from the package.
"""

import re
from pathlib import Path

_LINE = "negative control: {} broken"


def tell(num: int) -> None:
    """In the server: as many states were broken, or what else the control is about."""
    if num:
        print(_LINE.format(num), flush=True)


def num_broken(log_path: Path) -> int:
    """How many the server of this log broke, on all ranks."""
    log = log_path.read_text(encoding="utf-8", errors="replace")
    return sum(map(int, re.findall(_LINE.format(r"(\d+)"), log)))


def require_broken(log_path: Path) -> int:
    """How many the server of this log broke, of which there must be some."""
    num = num_broken(log_path)
    assert num, f"the negative control broke nothing, so its answers say nothing: {log_path}"
    return num
