"""The processes of a server, by the process group that they share."""

import os
import time

import psutil


def processes_of(group: int) -> list[psutil.Process]:
    """The live processes of a process group."""
    found = []
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.Error, ProcessLookupError):
            continue
    return found


def is_gone(group: int, *, within_s: float) -> bool:
    """Whether no process of the group is left, now or after a while."""
    deadline_s = time.monotonic() + within_s
    while processes_of(group) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    return not processes_of(group)
