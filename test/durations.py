"""How long tests take: `make slowest` prints the longest of the last runs, and a folder has a budget.

`make test` and `make test-all` keep their durations in `.durations`, one file each. `budgets.toml` holds what the tests
of a folder may take, and a run of a whole suite that takes half as much again fails. It may take longer where a loop of
Python takes longer while the suite runs: a machine that is slow today fails no change.
"""

import sys
import time
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING
from xml.etree import ElementTree

if TYPE_CHECKING:
    import pytest

KEPT = Path(".durations")
SUITES = {"not slow": "quick", "slow": "slow"}
"""The two suites, by the marks that choose them."""
REST = "rest"
"""The budget of each folder that has none of its own, and of the files beside the folders."""
NUM_SHOWN = 15
NUM_STEPS = 100_000
STEPS_S = 0.0025
"""What they take beside two busy workers on the machine that the budgets were measured on."""
SAMPLE_EVERY_S = 10.0


class Budgets:
    """What the folders' tests take in this run, held against their budgets where all of a suite ran and is green."""

    def __init__(self) -> None:
        self.seconds = Counter[str]()
        self.exceeded: tuple[str, ...] = ()
        self._steps_s: list[float] = []
        self._sampled_s = -SAMPLE_EVERY_S

    def pytest_runtest_logreport(self, report: "pytest.TestReport") -> None:
        self.seconds[folder(report.nodeid.split("::")[0])] += report.duration
        if time.monotonic() > self._sampled_s + SAMPLE_EVERY_S:
            self._steps_s.append(steps_s())
            self._sampled_s = time.monotonic()

    def pytest_sessionfinish(self, session: "pytest.Session") -> None:
        config = session.config
        is_whole = config.args_source is config.ArgsSource.TESTPATHS and not config.option.keyword
        suite = SUITES.get(config.option.markexpr)
        if suite is None or not is_whole or session.exitstatus != 0:
            return
        budgets = tomllib.loads((config.rootpath / "test" / "budgets.toml").read_text())[suite]
        self.exceeded = tuple(exceeded(self.seconds, budgets, max(1.0, median(self._steps_s) / STEPS_S)))
        if self.exceeded:
            session.exitstatus = 1

    def pytest_terminal_summary(self, terminalreporter: "pytest.TerminalReporter") -> None:
        for line in self.exceeded:
            terminalreporter.write_line(line, red=True)


def folder(path: str) -> str:
    """The folder of `test` that a file is in."""
    parts = Path(path).parts
    return parts[1] if len(parts) > 2 else REST


def steps_s() -> float:
    """What a loop of `NUM_STEPS` steps takes on this machine now."""
    begun_s = time.perf_counter()
    for _ in range(NUM_STEPS):
        pass
    return time.perf_counter() - begun_s


def exceeded(seconds: Mapping[str, float], budgets: Mapping[str, float], slowness: float) -> Iterable[str]:
    """A line for each folder that took more than half as much again as its budget times `slowness`."""
    for name, took in sorted(seconds.items()):
        budget = budgets.get(name, budgets[REST]) * slowness
        if took > 1.5 * budget:
            yield (
                f"OVER BUDGET: test/{name} must take at most {budget:.0f} worker-seconds and half as much again, "
                f"got {took:.0f} (test/budgets.toml, on a machine {slowness:.1f} times as slow)"
            )


def slowest(report: str) -> Iterable[str]:
    """The folders, and the longest files and cases, of a run's junit file."""
    folders, files, cases = Counter[str](), Counter[str](), Counter[str]()
    for case in ElementTree.fromstring(report).iter("testcase"):  # noqa: S314
        seconds, file = float(case.attrib["time"]), case.attrib["classname"].replace(".", "/") + ".py"
        folders[folder(file)] += seconds
        files[file] += seconds
        cases[f"{file}::{case.attrib['name']}"] += seconds
    for what, seconds_of in (("folder", folders), ("file", files), ("case", cases)):
        yield f"{sum(seconds_of.values()):8.0f} s  in {len(seconds_of):,} {what}s, the longest:"
        yield from (f"{seconds:8.1f} s  {name}" for name, seconds in seconds_of.most_common(NUM_SHOWN))


def main(kept: Path = KEPT) -> int:
    """Print what was kept of the last run of each suite."""
    files = [path for suite in SUITES.values() if (path := kept / f"{suite}.xml").exists()]
    if not files:
        print(f"no run is kept in {kept}: `make test` and `make test-all` keep theirs", file=sys.stderr)
        return 2
    for path in files:
        print(f"{path.stem}:", *slowest(path.read_text()), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
