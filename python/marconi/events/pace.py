"""Work in slices, with a rest between two, so that another thread hardly notices it.

A thread that runs Python lets another in only every `sys.getswitchinterval` (5 ms), and that is how long a scheduler
would wait each time it comes back from the device. A sleep lets it in at once; one of no length does not, since the
interpreter's lock is taken again before the other has woken up.
"""

import time
from collections.abc import Iterable, Iterator
from typing import Final, TypeVar

WORK_S: Final = 0.0005
REST_S: Final = 0.0005

T = TypeVar("T")


def paced(items: Iterable[T]) -> Iterator[T]:
    """Yield `items`, whose making and use take the time, with rests."""
    began_s = time.perf_counter()
    for item in items:
        yield item
        if time.perf_counter() - began_s >= WORK_S:
            time.sleep(REST_S)
            began_s = time.perf_counter()
