"""The report counts finished requests and speaks at most once in an interval."""

from marconi.engine.reports.stats import HitReport
from marconi.engine.reports.status import Use

POOLS = {"KV tokens": Use(100, 90, 0), "state slots": Use(4, 1, 2)}


def test_a_line_is_due_once_an_interval_and_sums_since_the_start() -> None:
    report = HitReport(60.0, started_s=1000.0)
    report.count(num_prompt_tokens=100, num_cached_tokens=0)
    assert report.due(1059.9, lambda: POOLS) is None
    report.count(num_prompt_tokens=300, num_cached_tokens=100)
    assert report.due(1060.0, lambda: POOLS) == (
        "2 requests, 100 of 400 prompt tokens from the cache (25.0%); held: 10 of 100 KV tokens, 3 of 4 state slots"
    )
    assert report.due(1061.0, lambda: POOLS) is None
    assert report.due(1120.0, lambda: POOLS) is not None


def test_an_interval_of_zero_never_speaks_and_never_asks() -> None:
    def unasked() -> dict[str, Use]:
        raise AssertionError("no pool is needed")

    assert HitReport(0.0, started_s=0.0).due(1e9, unasked) is None


def test_no_request_is_no_division() -> None:
    line = HitReport(1.0, started_s=0.0).due(2.0, lambda: POOLS)
    assert line is not None
    assert "(0.0%)" in line
