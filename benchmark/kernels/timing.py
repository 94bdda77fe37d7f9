"""Time functions that take turns: medians, minima, and what it takes the host to launch them.

On a device a run is timed by events around it. Before it a large buffer is read, which leaves nothing in the L2 cache
that must be written back, and the device is kept busy long enough for the host to launch all: what is timed is the
device's work and not the host's.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

NUM_WARM_UPS = 3
HEAD_START_CYCLES = 5_000_000
"""Some 2.5 ms at 2 GHz, in which the host launches a prefill."""
COPY_BYTES = 1 << 30


class Reading(NamedTuple):
    """One run, in microseconds."""

    run_us: float
    host_us: float


class Clock(Protocol):
    """A clock that times one run."""

    def read(self, run: Callable[[], object]) -> Reading:
        """Run and time it."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Several runs, in microseconds; `host_us` is the median time until the last launch."""

    median_us: float
    min_us: float
    host_us: float
    num_timed: int

    def plus_difference(self, with_it: "Sample", without: "Sample") -> "Sample":
        """Add what another function takes `with_it` beyond what it takes `without`."""
        return Sample(
            self.median_us + max(0.0, with_it.median_us - without.median_us),
            self.min_us + max(0.0, with_it.min_us - without.min_us),
            self.host_us + max(0.0, with_it.host_us - without.host_us),
            self.num_timed,
        )


class HostClock:
    """Processor time, to which other work on the machine adds little."""

    def read(self, run: Callable[[], object]) -> Reading:
        """Run and time it."""
        start_s = time.process_time()
        run()
        elapsed_us = (time.process_time() - start_s) * 1e6
        return Reading(elapsed_us, elapsed_us)


class CudaClock:
    """Device time, from a cold L2 cache."""

    def __init__(self, device: torch.device) -> None:
        self.l2_bytes: int = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0) or 50 << 20
        self._flush = torch.zeros(max(256 << 20, 4 * self.l2_bytes) // 4, dtype=torch.int32, device=device)

    def read(self, run: Callable[[], object]) -> Reading:
        """Run and time it."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.sum(self._flush)
        torch.cuda._sleep(HEAD_START_CYCLES)
        start.record()
        start_s = time.perf_counter()
        run()
        host_us = (time.perf_counter() - start_s) * 1e6
        end.record()
        torch.cuda.synchronize()
        return Reading(start.elapsed_time(end) * 1e3, host_us)


def in_turns(clock: Clock, runs: Mapping[str, Callable[[], object]], repetitions: int) -> dict[str, Sample]:
    """Time each of `runs` equally often, side by side, in rounds that each begin with another."""
    readings: dict[str, list[Reading]] = {name: [] for name in runs}
    for run in runs.values():
        for _ in range(NUM_WARM_UPS):
            run()
    names = list(runs)
    for number in range(repetitions):
        first = number % len(names)
        for name in (*names[first:], *names[:first]):
            readings[name].append(clock.read(runs[name]))
    return {name: _sample(found) for name, found in readings.items()}


def _sample(readings: list[Reading]) -> Sample:
    times_us = [reading.run_us for reading in readings]
    host_us = statistics.median(reading.host_us for reading in readings)
    return Sample(statistics.median(times_us), min(times_us), host_us, len(readings))


def copy_bytes_per_s(clock: Clock, device: torch.device | str, repetitions: int, num_bytes: int = COPY_BYTES) -> float:
    """Measure the bytes that a large copy reads and writes in a second: the most that the memory gives."""
    source, target = (torch.zeros(num_bytes // 4, dtype=torch.int32, device=device) for _ in range(2))
    copied = in_turns(clock, {"copy": lambda: target.copy_(source)}, repetitions)
    return 2 * num_bytes / (copied["copy"].median_us * 1e-6)
