"""docs/metrics.md lists every metric that a router exports, docs/router.md every flag, and no page names others.

Nor does one ask for routes that are not there.
"""

import argparse
import asyncio
import json
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Final
from urllib.parse import urlsplit

import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase

from marconi import cli
from marconi.model.learned_latency import LearnedLatency
from marconi.router.description import worker_url
from marconi.router.gateway import app, stats
from marconi.router.gateway.connections import Connections, running
from marconi.router.gateway.gateway import Gateway
from marconi.router.gateway.settings import LIMITS, Settings
from structure.pages import PAGES, page, shell

from .stand_in import ByteReader

ENDINGS: Final = ("_sum", "_count", "_bucket")


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> dict[str, frozenset[str]]:
    """The metrics of a router that may ask workers for tokens, as a page names them, with their labels."""
    registry, settings = CollectorRegistry(), Settings()
    monkeypatch.setattr(stats, "CollectorRegistry", lambda: registry)
    gateway = Gateway(ByteReader(), LearnedLatency(float), settings)
    monkeypatch.setattr(gateway, "remote", SimpleNamespace(num_asked=0, num_failed=0))
    metrics = stats.Metrics(gateway, Connections(settings))
    labels = {
        each.describe()[0].name: frozenset(each._labelnames)
        for each in vars(metrics).values()
        if isinstance(each, MetricWrapperBase)
    }
    found = {}
    for family in registry.collect():
        name = f"{family.name}_total" if family.type == "counter" else family.name
        own = labels.get(family.name, frozenset(getattr(family, "_labelnames", ())))
        found[name] = own | ({"le"} if family.type == "histogram" else frozenset())
    return found


def listed(text: str) -> dict[str, frozenset[str]]:
    """The metrics in the table of a page, each with its labels."""
    table = text.partition("## Metrics of the router\n")[2].partition("\n## ")[0]
    rows = [row.split(" | ") for row in re.findall(r"^\| (`marconi_.*)$", table.replace("| |", "|  |"), re.MULTILINE)]
    return {name: frozenset(re.findall(r"`(\w+)`", row[1])) for row in rows for name in re.findall(r"`(\w+)`", row[0])}


def misnamed(text: str, exported: Mapping[str, frozenset[str]]) -> set[str]:
    """The names of a page that begin like a metric of the router and are none."""
    series = {name + ending for name, labels in exported.items() if "le" in labels for ending in ENDINGS}
    return set(re.findall(r"\bmarconi_router_\w+", text)) - exported.keys() - series


def test_the_page_on_metrics_lists_every_metric_of_a_router(exported: dict[str, frozenset[str]]) -> None:
    assert len(exported) > 40
    assert listed(page("docs/metrics.md").read_text(encoding="utf-8")) == exported


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_a_page_names_metrics_that_a_router_exports(path: Path, exported: dict[str, frozenset[str]]) -> None:
    assert not misnamed(path.read_text(encoding="utf-8"), exported)


def test_a_metric_that_is_not_listed_or_not_exported_is_found(exported: dict[str, frozenset[str]]) -> None:
    text = page("docs/metrics.md").read_text(encoding="utf-8")
    row = "| `marconi_router_index_blocks` | | blocks of KV that any worker holds |\n"
    assert listed(text.replace(row, "")).keys() ^ exported.keys() == {"marconi_router_index_blocks"}
    assert listed(text.replace("| `fate` |", "| `end` |")) != exported
    assert misnamed("`marconi_router_index_block`", exported) == {"marconi_router_index_block"}


# Flags


def flags() -> dict[str, str]:
    """The flags of `marconi router`, with their defaults; empty where a flag has none of its own."""
    (commands,) = (
        each.choices for each in cli._parser()._actions if isinstance(each, argparse._SubParsersAction) and each.choices
    )
    limits = {f"--{name.replace('_', '-')}": f"{limit.default:.0f}" for name, limit in LIMITS.items()}
    found = {}
    for action in commands["router"]._actions:
        (flag,) = (each for each in action.option_strings if each.startswith("--"))
        default = "required" if action.required else limits.get(flag, action.default)
        found[flag] = str(default) if default else ""
    del found["--help"]
    return found


def test_the_page_on_the_router_lists_every_flag_with_its_default() -> None:
    table = page("docs/router.md").read_text(encoding="utf-8").partition("## Flags\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(--[a-z0-9-]+) \S+` \| (.*?) \|", table, re.MULTILINE)
    expected = flags()
    assert [flag for flag, _ in rows] == list(expected)
    assert {flag: shown.strip("`") for flag, shown in rows if expected[flag]} == {
        flag: default for flag, default in expected.items() if default
    }


# Routes


def asked() -> Iterator[tuple[str, str, str]]:
    """The method, path and body of each `curl` of a page that asks a router."""
    for path in PAGES:
        for command in shell(path):
            words = shlex.split(command, comments=True)
            if words[:1] == ["curl"] and re.search(r"/router\b", command):
                (url,) = (word for word in words if word.startswith("http://"))
                method, body = (
                    words[words.index(flag) + 1] if flag in words else default
                    for flag, default in (("-X", "GET"), ("--json", "{}"))
                )
                yield method, urlsplit(url).path, body


def test_every_request_to_a_router_that_a_page_shows_has_a_route_and_a_body_that_it_reads() -> None:
    async def made() -> web.Application:
        gateway = Gateway(ByteReader(), LearnedLatency(float), Settings())
        application = app.application(gateway, ())
        async with running(application, 0.1):
            return application

    routes = {
        (route.method, route.resource.canonical) for route in asyncio.run(made()).router.routes() if route.resource
    }
    found = list(asked())
    assert len(found) >= 5
    for method, path, body in found:
        assert (method, path) in routes
        assert method == "GET" or worker_url(json.loads(body)["url"])
