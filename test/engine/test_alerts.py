"""Each alert of docs/examples fires where its trouble is a little worse than its threshold, and only there."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final, TypeAlias

import pytest

pytest.importorskip("sglang", reason="the server extra is not installed: pip install '.[server]'")

from . import promql
from .alerting import NAME, Firing, Labels, Series, Store, firings, increase, parse, seconds
from .test_examples import alerts

SCRAPE_S: Final = 15.0
"""As docs/examples/prometheus.yml has it."""
EVALUATION_S: Final = 60.0
"""Prometheus' default."""
TROUBLE_S: Final = 26 * 3600.0
"""When trouble begins: yesterday's hit rate has a whole day by then."""
END_S: Final = TROUBLE_S + 90 * 60
TIMES_S: Final = tuple(TROUBLE_S + EVALUATION_S * minute for minute in range(-30, 90))

ILL, WELL = "127.0.0.1:30001", "127.0.0.1:30002"
"""The worker in trouble, and the other."""
ROUTER: Final = "127.0.0.1:30000"
IS_COUNTED: Final = re.compile(r"_(?:total|sum)$")

Values: TypeAlias = Mapping[str, float]
"""What series have: a counter its growth a second, a gauge its value; by metric, and its cause behind `/`."""

HEALTHY: Final[Values] = {
    "up": 1,
    "marconi_planning_alive": 1,
    "marconi_hook_faults_total": 0,
    "marconi_prompt_tokens_total": 10_000,
    "marconi_hit_tokens_total": 6_000,
    "marconi_missed_tokens_total/first_seen": 3_000,
    "marconi_missed_tokens_total/no_slot": 200,
    "marconi_missed_tokens_total/evicted_for_states": 200,
    "marconi_missed_tokens_total/evicted_for_kv": 400,
    "marconi_missed_tokens_total/evicted_for_bytes": 200,
    "marconi_eviction_wait_seconds_sum": 0.001,
    "marconi_store_errors_total": 0,
    "marconi_store_damaged_total": 0,
    "marconi_store_written_bytes_total": 20e6,
    "marconi_store_read_bytes_total": 40e6,
    "marconi_events_alive": 1,
    "marconi_events_published_total": 50,
    "marconi_events_waiting": 20,
}
HEALTHY_ROUTER: Final[Values] = {
    "up": 1,
    "marconi_router_connections_refused_total": 0,
    "marconi_router_worker_up": 1,
    "marconi_router_cached_tokens_total": 5_800,
    "marconi_router_expected_tokens_total": 6_000,
}


@dataclass(frozen=True, slots=True)
class Case:
    """An alert, and what changes when trouble begins."""

    alert: str
    fires: Values
    silent: tuple[Values, ...] = ()
    """Changes that are not enough."""
    starts_anew: bool = field(default=False, kw_only=True)
    """Whether counters begin at 0 with the trouble."""
    labels: Mapping[str, str] = field(default_factory=lambda: {"instance": ILL, "dp_rank": "0"}, kw_only=True)
    """Labels of the alert that fires."""


OF_THE_ROUTER: Final = {"instance": ROUTER, "worker": f"http://{ILL}"}
CASES: Final = (
    Case("MarconiWorkerGone", {"up": 0}, labels={"instance": ILL, "job": "marconi-workers"}),
    Case("MarconiPlanningStopped", {"marconi_planning_alive": 0}),
    Case("MarconiHookFaults", {"marconi_hook_faults_total": 1 / 600}),
    Case(
        "MarconiHitRateCollapse",
        {"marconi_prompt_tokens_total": 110, "marconi_hit_tokens_total": 110 * 0.29},
        (
            {"marconi_prompt_tokens_total": 110, "marconi_hit_tokens_total": 110 * 0.31},
            {"marconi_prompt_tokens_total": 90, "marconi_hit_tokens_total": 90 * 0.29},
            {"marconi_prompt_tokens_total": 0, "marconi_hit_tokens_total": 0},
        ),
    ),
    Case(
        "MarconiSlotShortage",
        {"marconi_missed_tokens_total/no_slot": 600, "marconi_missed_tokens_total/evicted_for_states": 500},
        (
            {"marconi_missed_tokens_total/no_slot": 500, "marconi_missed_tokens_total/evicted_for_states": 400},
            {"marconi_missed_tokens_total/evicted_for_kv": 9_000},
        ),
    ),
    Case(
        "MarconiMemoryShortage",
        {"marconi_missed_tokens_total/evicted_for_kv": 1_100, "marconi_missed_tokens_total/evicted_for_bytes": 1_100},
        (
            {"marconi_missed_tokens_total/evicted_for_kv": 900, "marconi_missed_tokens_total/evicted_for_bytes": 900},
            {"marconi_missed_tokens_total/first_seen": 9_000},
        ),
    ),
    Case(
        "MarconiHostTierWaits",
        {"marconi_eviction_wait_seconds_sum": 0.022},
        ({"marconi_eviction_wait_seconds_sum": 0.018},),
    ),
    Case("MarconiStoreFails", {"marconi_store_damaged_total": 1 / 600}),
    Case(
        "MarconiStoreOnlyWritten",
        {"marconi_store_written_bytes_total": 14e6, "marconi_store_read_bytes_total": 2.6e6},
        (
            {"marconi_store_written_bytes_total": 14e6, "marconi_store_read_bytes_total": 3e6},
            {"marconi_store_written_bytes_total": 9e6, "marconi_store_read_bytes_total": 0},
        ),
    ),
    Case(
        "MarconiEventsDead",
        {"marconi_events_alive": 0, "marconi_events_published_total": 0.001},
        ({"marconi_events_alive": 0, "marconi_events_published_total": 0},),
        starts_anew=True,
    ),
    Case("MarconiEventsLag", {"marconi_events_waiting": 110_000}, ({"marconi_events_waiting": 90_000},)),
    Case("MarconiRouterGone", {"up": 0}, labels={"instance": ROUTER, "job": "marconi-router"}),
    Case("MarconiRouterWorkerDown", {"marconi_router_worker_up": 0}, labels=OF_THE_ROUTER),
    Case(
        "MarconiRouterHitsMissing",
        {"marconi_router_cached_tokens_total": 110 * 0.78, "marconi_router_expected_tokens_total": 110},
        (
            {"marconi_router_cached_tokens_total": 110 * 0.82, "marconi_router_expected_tokens_total": 110},
            {"marconi_router_cached_tokens_total": 90 * 0.5, "marconi_router_expected_tokens_total": 90},
        ),
        labels=OF_THE_ROUTER,
    ),
    Case(
        "MarconiRouterRefusesConnections",
        {"marconi_router_connections_refused_total": 0.1},
        labels={"instance": ROUTER},
    ),
)
RULES: Final = {rule["alert"]: rule for rule in alerts()}
LASTING: Final = [
    case
    for case in CASES
    if RULES[case.alert].get("for") and not re.search(r"rate|increase", RULES[case.alert]["expr"])
]
"""Alerts of gauges, which end with their trouble."""


def labels_of(key: str, **more: str) -> Labels:
    metric, _, cause = key.partition("/")
    return frozenset({NAME: metric, **({"cause": cause} if cause else {}), **more}.items())


def fleet(case: Case | None = None, values: Values | None = None) -> Iterator[tuple[Labels, float, float]]:
    """All series of two workers and a router, before trouble and in it; one worker, or the router, gets `values`."""
    changed = values or {}
    is_of_router = case is not None and case.labels["instance"] == ROUTER
    for instance in (ILL, WELL):
        is_ill = instance == ILL and not is_of_router
        for key, value in HEALTHY.items():
            rank = {} if key == "up" else {"dp_rank": "0", "cache_type": "marconi", "tp_rank": "0", "pp_rank": "0"}
            labels = labels_of(key, job="marconi-workers", instance=instance, **rank)
            yield labels, value, changed.get(key, value) if is_ill else value
        for key, value in HEALTHY_ROUTER.items():
            if "_worker_up" in key or "_tokens_" in key:
                labels = labels_of(key, job="marconi-router", instance=ROUTER, worker=f"http://{instance}")
                yield labels, value, changed.get(key, value) if instance == ILL and is_of_router else value
    for key in ("up", "marconi_router_connections_refused_total"):
        value = HEALTHY_ROUTER[key]
        labels = labels_of(key, job="marconi-router", instance=ROUTER)
        yield labels, value, changed.get(key, value) if is_of_router else value


def series(metric: str, before: float, after: float, end_s: float, *, starts_anew: bool) -> Series:
    """Scraped values; trouble ends at `end_s`."""
    found = Series()
    count = 0.0
    for number in range(int(END_S / SCRAPE_S) + 1):
        now_s = number * SCRAPE_S
        value = after if TROUBLE_S <= now_s < end_s else before
        if IS_COUNTED.search(metric):
            count = 0.0 if starts_anew and now_s == TROUBLE_S else count + value * SCRAPE_S
            value = count
        found.times_s.append(now_s)
        found.values.append(value)
    return found


@cache
def _store(alert: str, number: int, end_s: float) -> Store:
    """The series that an alert asks for: of its case's `fires` at -1, of `silent` from 0 on, healthy ones at -2."""
    case = next(each for each in CASES if each.alert == alert)
    values = {} if number == -2 else case.fires if number == -1 else case.silent[number]
    asked = {each.metric for each in promql.read(RULES[alert]["expr"]).selectors}
    return {
        labels: series(metric, before, after, end_s, starts_anew=case.starts_anew and bool(values))
        for labels, before, after in fleet(case, values)
        if (metric := dict(labels)[NAME]) in asked
    }


FIRES, IS_HEALTHY = -1, -2


def fired(case: Case, number: int, expression: str | None = None, end_s: float = END_S) -> list[Firing]:
    rule: dict[str, Any] = RULES[case.alert]
    for_s = seconds(rule["for"]) if "for" in rule else 0.0
    return firings(expression or rule["expr"], for_s, _store(case.alert, number, end_s), TIMES_S)


def is_held(case: Case, expression: str | None = None) -> bool:
    """Whether an alert fires where it should and nowhere else."""
    return (
        [{*case.labels.items()} <= {*each.labels.items()} for each in fired(case, FIRES, expression)] == [True]
        and not fired(case, IS_HEALTHY, expression)
        and not any(fired(case, number, expression) for number in range(len(case.silent)))
    )


def test_every_alert_has_a_case() -> None:
    assert [case.alert for case in CASES] == list(RULES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.alert)
def test_an_alert_fires_in_trouble_and_is_silent_without(case: Case) -> None:
    assert is_held(case)
    (firing,) = fired(case, FIRES)
    rule = RULES[case.alert]
    assert firing.at_s >= TROUBLE_S + (seconds(rule["for"]) if "for" in rule else 0.0)
    assert {*re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"])} <= firing.labels.keys()


@pytest.mark.parametrize("case", LASTING, ids=lambda case: case.alert)
def test_an_alert_is_silent_if_the_trouble_ends_sooner_than_it_waits(case: Case) -> None:
    for_s = seconds(RULES[case.alert]["for"])
    assert not fired(case, FIRES, end_s=TROUBLE_S + for_s)
    assert fired(case, FIRES, end_s=TROUBLE_S + for_s + 2 * EVALUATION_S)


def mutants(expression: str) -> Iterator[str]:
    """The expression with each of its numbers smaller, and larger."""
    for match in re.finditer(r"(?<=[<>=] )[0-9.]+", expression):
        number = float(match.group())
        for other in (f"{number * 0.5:f}", f"{number * 1.5:f}") if number else ("(0 - 1)", "10"):
            yield expression[: match.start()] + other + expression[match.end() :]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.alert)
def test_another_threshold_is_found(case: Case) -> None:
    others = list(mutants(RULES[case.alert]["expr"]))
    assert others
    assert not [each for each in others if is_held(case, each)]


# The evaluator


def counter(*values: float, every_s: float = 300.0) -> Series:
    return Series([every_s * number for number in range(len(values))], list(values))


FOO, BAR = [10.0 * number for number in range(11)], [18.0 * number for number in (*range(6), *range(6))]
DINGS, BUMMS = [10 + value for value in FOO], [1 + value for value in FOO]


@pytest.mark.parametrize(
    ("values", "minutes", "expected"),
    [
        (FOO, 50, 100),
        (FOO, 100, 100),
        (BAR, 50, 160),
        (BAR, 100, 162),
        (DINGS, 50, 100),
        (DINGS, 100, 105),
        (BUMMS, 100, 101),
    ],
)
def test_growth_is_what_prometheus_says(values: list[float], minutes: int, expected: float) -> None:
    """Its own cases: promql/promqltest/testdata/functions.test, "Tests for increase()", at 50 minutes."""
    end_s = 50 * 60.0
    start_s = end_s - minutes * 60.0
    found = increase(*counter(*values).within(start_s, end_s), start_s, end_s)
    assert found == pytest.approx(expected)


def at(text: str, store: Store, now_s: float = 600.0) -> dict[tuple[tuple[str, str], ...], float]:
    found = parse(text, store)(now_s)
    assert isinstance(found, dict)
    return {tuple(sorted(each for each in labels if each[0] != NAME)): value for labels, value in found.items()}


def test_the_language_of_alerts() -> None:
    store = {
        labels_of("asked", of="a", on="1"): counter(0, 300, 600),
        labels_of("asked", of="a", on="2"): counter(0, 600, 1200),
        labels_of("asked", of="b", on="1"): counter(0, 3, 6),
        labels_of("held", of="a", on="1"): counter(5, 5, 5),
        labels_of("held", of="b", on="1"): counter(1, 1),
    }
    a, b = (("of", "a"),), (("of", "b"),)
    assert at("sum by (of) (rate(asked[15m]))", store) == pytest.approx({a: 2.0, b: 0.0066667}, rel=1e-3)
    assert at('sum by (of) (asked{of=~"b|c"})', store) == {b: 6}
    assert at("asked > 2 * 300 and held", store) == {}
    assert at("asked >= 2 * 300 and held", store) == {(*a, ("on", "1")): 600}
    assert at("held / held == 1 or asked == 1200", store) == {(*a, ("on", "1")): 1, (*a, ("on", "2")): 1200}
    assert at("held == 1", store, 599.0) == {(*b, ("on", "1")): 1}
    assert at("held == 1", store, 601.0) == {}
    assert at("increase(asked[10m] offset 1h)", store, 4200.0) == at("increase(asked[10m])", store)
    for wrong in ("rate(asked[15m]", "asked 1", "max(asked)", "asked > bool 1"):
        with pytest.raises(ValueError, match=r"must be|no metric|more than one"):
            at(wrong, store)
