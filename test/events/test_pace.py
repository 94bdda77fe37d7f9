"""Paced work rests, and loses nothing."""

import pytest

from marconi.events import publisher


class Time:
    """Passes on demand."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.rests: list[float] = []

    def perf_counter(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.rests.append(self.now_s)
        self.now_s += seconds


def test_a_rest_comes_after_every_slice_of_work_and_none_before(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Time()
    monkeypatch.setattr(publisher, "time", clock)
    found = []
    for item in publisher.paced(range(6)):
        clock.now_s += 0.4 * publisher.WORK_S
        found.append(item)
    assert found == list(range(6))
    # Three items fill a slice.
    first = 1.2 * publisher.WORK_S
    assert clock.rests == pytest.approx([first, 2 * first + publisher.REST_S])
