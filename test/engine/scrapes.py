"""Which queries of the examples and the pages find series in what live servers answer to Prometheus.

A metric that not every server has is looked for where it is: `ON_THE_HOST` behind a host tier, `OF_A_STORE` behind
that, `OF_ONE_POOL` where KV and states share a pool, `AFTER_A_FAILURE` at a router that has lost a worker.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeAlias

from prometheus_client.parser import text_string_to_metric_families

from . import promql
from .client import HTTP
from .test_examples import TARGET, expressions

Series: TypeAlias = Mapping[str, Sequence[Mapping[str, str]]]
"""The labels of every series, by metric."""

ON_THE_HOST: Final = frozenset(
    {
        "marconi_eviction_wait_seconds_bucket",
        "marconi_eviction_wait_seconds_sum",
        "marconi_host_copied_total",
        "marconi_host_dropped_total",
        "marconi_host_kv_tokens",
        "marconi_host_loads_total",
        "marconi_host_state_slots",
    }
)
OF_A_STORE: Final = frozenset(
    {
        "marconi_store_damaged_total",
        "marconi_store_errors_total",
        "marconi_store_read_bytes_total",
        "marconi_store_written_bytes_total",
    }
)
OF_ONE_POOL: Final = frozenset({"marconi_joint_bytes"})
AFTER_A_FAILURE: Final = frozenset({"marconi_router_failed_attempts_total"})
OF_PROMETHEUS: Final = frozenset({"up"})
NOT_EVERYWHERE: Final = ON_THE_HOST | OF_A_STORE | OF_ONE_POOL | AFTER_A_FAILURE | OF_PROMETHEUS


def scraped(*urls: str) -> Series:
    """The series of these servers."""
    found: dict[str, list[Mapping[str, str]]] = {}
    for url in urls:
        answer = HTTP.get(f"{url}/metrics", timeout=60.0, follow_redirects=True).raise_for_status()
        for family in text_string_to_metric_families(answer.text):
            for sample in family.samples:
                found.setdefault(sample.name, []).append(sample.labels)
    return found


def unanswered(text: str, series: Series, is_asked: Callable[[str], bool]) -> list[str]:
    """The selectors of an expression, of metrics that are asked for, that match no series with its labels."""
    asked = promql.read(text)
    return [
        f"{each.metric} {dict(each.matchers)} by {sorted(asked.grouped_by)}"
        for each in asked.selectors
        if is_asked(each.metric)
        and not any(_matches(each, asked.grouped_by, labels) for labels in series.get(each.metric, ()))
    ]


def all_unanswered(series: Series, is_asked: Callable[[str], bool]) -> dict[str, list[str]]:
    """Those of all queries, by their places; a metric of `NOT_EVERYWHERE` that no query names is one too many."""
    named = {each.metric for _, text in expressions() for each in promql.read(text).selectors}
    assert named >= NOT_EVERYWHERE, NOT_EVERYWHERE - named
    found = {f"{place}: {text}": unanswered(text, series, is_asked) for place, text in expressions()}
    return {query: missing for query, missing in found.items() if missing}


def _matches(selector: promql.Selector, grouped_by: frozenset[str], labels: Mapping[str, str]) -> bool:
    """Whether a series has the labels; a board fills in variables, and Prometheus the labels of a target."""
    return grouped_by <= labels.keys() | TARGET and all(
        label in TARGET or re.fullmatch(pattern, labels.get(label, "")) for label, pattern in selector.matchers
    )
