"""The processes of a server, by the process group that they share, and ports for more than one socket."""

import os
import random
import socket
import time
from contextlib import ExitStack

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


def free_ports(number: int) -> int:
    """The first of so many loopback ports in a row that nobody listens on, below those that servers are given."""
    while True:
        first = random.randrange(12_000, 20_000 - number)  # noqa: S311 - a port, not a secret
        with ExitStack() as probes:
            try:
                for port in range(first, first + number):
                    probes.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                continue
        return first
