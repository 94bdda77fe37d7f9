"""The files of docs/examples ask for metrics that there are, by labels that they have, and give flags that are read."""

import argparse
import configparser
import json
import re
import shlex
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, NoReturn
from urllib.parse import urlsplit

import pytest

pytest.importorskip("sglang", reason="the server extra is not installed: pip install '.[server]'")

import prometheus_client
import yaml
from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase
from sglang.srt.server_args import ServerArgs

from marconi import cli
from marconi.engine.launch import flags
from marconi.engine.launch.policies import PolicyChoice
from marconi.engine.reports.metrics import CacheMetrics
from marconi.engine.reports.stats import HIT_KINDS, CacheStats
from marconi.engine.reports.status import Use
from marconi.events.address import TcpAddress
from marconi.model.learned_latency import LearnedLatency
from marconi.policy.causes import Cause
from marconi.router.gateway import stats
from marconi.router.gateway.connections import Connections
from marconi.router.gateway.gateway import Gateway
from marconi.router.gateway.settings import Settings
from router.gateway.stand_in import ByteReader
from structure.pages import PAGES

from . import promql

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
FILES = sorted(path for path in EXAMPLES.iterdir())
TARGET: Final = frozenset({"job", "instance"})
"""Labels that Prometheus gives to all that it scrapes."""
CACHE: Final = frozenset({"cache_type", "tp_rank", "pp_rank", "dp_rank"})
"""SGLang's labels of a cache (`radix_cache_metric_labels`), which all of a worker's metrics have."""
VALUES: Final[Mapping[str, frozenset[str]]] = {
    "cause": frozenset(Cause),
    "use": frozenset({"free", "cached", "in_use"}),
    "reason": frozenset({"kv", "states", "bytes"}),
    "hit": frozenset(HIT_KINDS),
    "job": frozenset({"marconi-workers", "marconi-router"}),
}
SERVER: Final = ("-m", "sglang.launch_server")
SIZE: Final = 7_777_777
COMMANDLESS: Final = (
    "Dockerfile",
    "Dockerfile.dockerignore",
    "grafana-marconi.json",
    "prometheus.yml",
    "prometheus-alerts.yml",
)
OF_OTHERS: Final = frozenset({"--broken-states", "--no-build-isolation", "--router-mode"})
"""Flags on pages that are pytest's here, uv's, and another router's."""


# Metrics


def worker_metrics(monkeypatch: pytest.MonkeyPatch) -> dict[str, frozenset[str]]:
    """The labels of each series of a worker, as it is scraped."""
    registry = CollectorRegistry()
    for kind in ("Gauge", "Counter", "Histogram"):
        monkeypatch.setattr(prometheus_client, kind, partial(getattr(prometheus_client, kind), registry=registry))
    CacheMetrics(dict.fromkeys(CACHE, ""))
    found = {}
    for name, metric in registry._names_to_collectors.items():
        if not name.endswith("_created") and (metric._type == "gauge" or name != metric._name):
            le = {"le"} if name.endswith("_bucket") else set()
            found[name] = frozenset(metric._labelnames) | TARGET | le
    return found


def router_metrics(monkeypatch: pytest.MonkeyPatch) -> dict[str, frozenset[str]]:
    """The labels of each metric of a router, as it is scraped."""
    settings = Settings()
    registry = CollectorRegistry()
    monkeypatch.setattr(stats, "CollectorRegistry", lambda: registry)
    gateway = Gateway(ByteReader(), LearnedLatency(float), settings)
    metrics = stats.Metrics(gateway, Connections(settings))
    labels = {
        each.describe()[0].name: frozenset(each._labelnames)
        for each in vars(metrics).values()
        if isinstance(each, MetricWrapperBase)
    }
    found: dict[str, frozenset[str]] = {}
    for family in registry.collect():
        own = labels.get(family.name, frozenset(getattr(family, "_labelnames", ()))) | TARGET
        endings = {"counter": ("_total",), "histogram": ("_sum", "_count", "_bucket")}.get(family.type, ("",))
        found |= {family.name + ending: own | ({"le"} if ending == "_bucket" else frozenset()) for ending in endings}
    return found


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> dict[str, frozenset[str]]:
    """The labels of every metric that an expression may name."""
    return worker_metrics(monkeypatch) | router_metrics(monkeypatch) | {"up": TARGET}


def rows(text: str) -> Iterator[tuple[str, frozenset[str], frozenset[str]]]:
    """Of each metric of a worker in the table of a page: its labels, and the values of the one that is spelled out."""
    table = text.partition("\n## Metrics\n")[2].partition("\n## ")[0]
    for row in re.findall(r"^\| (`marconi_.*)$", table.replace("| |", "|  |"), re.MULTILINE):
        names, labels, *_ = row.split(" | ")
        label, _, values = labels.partition(":")
        for name in re.findall(r"`(\w+)`", names):
            yield name, frozenset(re.findall(r"`(\w+)`", label)), frozenset(re.findall(r"`(\w+)`", values))


def mistaken(text: str, known: Mapping[str, frozenset[str]]) -> list[str]:
    """The metrics of which the table of a page has another label, or another value of it, than a worker."""
    found = []
    for name, labels, values in rows(text):
        own = known.get(name, known.get(f"{name}_bucket", frozenset())) - CACHE - TARGET
        if labels != own or (values and [values] != [VALUES[label] for label in labels]):
            found.append(name)
    return found


def test_the_page_on_metrics_has_every_label_of_a_worker(known: dict[str, frozenset[str]]) -> None:
    text = (EXAMPLES.parent / "metrics.md").read_text()
    assert len(list(rows(text))) > 30
    assert mistaken(text, known) == []
    assert mistaken(text.replace("`place`, `used`, `le`", "`place`, `le`"), known) == ["marconi_state_lifetime_seconds"]
    assert mistaken(text.replace("`reason`: `kv`,", "`reason`:"), known) == ["marconi_evictions_total"]


def wrong(text: str, known: Mapping[str, frozenset[str]]) -> list[str]:
    """All that an expression names and nothing has."""
    asked = promql.read(text)
    found = [f"no metric {each.metric}" for each in asked.selectors if each.metric not in known]
    for each in asked.selectors:
        labels = known.get(each.metric, frozenset())
        found += [f"{each.metric} has no {label}" for label in asked.grouped_by if label not in labels]
        for label, value in each.matchers:
            if label not in labels:
                found.append(f"{each.metric} has no {label}")
            elif label in VALUES and not set(value.split("|")) <= VALUES[label]:
                found.append(f"{label} is never {value}")
    return found


def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load((EXAMPLES / "prometheus-alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def board() -> dict[str, Any]:
    read: dict[str, Any] = json.loads((EXAMPLES / "grafana-marconi.json").read_text())
    return read


def expressions() -> Iterator[tuple[str, str]]:
    """Every PromQL expression of the examples, with its place; docs/operations.md and why-a-miss.md show more."""
    for rule in alerts():
        yield rule["alert"], rule["expr"]
    for panel in board()["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]
    for variable in board()["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["name"], variable["definition"]
    for path in PAGES:
        for text in re.findall(r"^ {4}((?:sum|min|max|rate)\b.*marconi_.*?)(?: {2,}#.*)?$", path.read_text(), re.M):
            yield path.name, text


@pytest.mark.parametrize(("place", "text"), expressions(), ids=lambda text: text[:40])
def test_an_expression_asks_for_metrics_by_labels_that_they_have(
    place: str, text: str, known: dict[str, frozenset[str]]
) -> None:
    assert not wrong(text, known), place


def test_a_metric_a_label_and_a_value_that_are_not_there_are_found(known: dict[str, frozenset[str]]) -> None:
    assert wrong("rate(marconi_missed_tokens[5m])", known) == ["no metric marconi_missed_tokens"]
    assert wrong('sum by (reason) (rate(marconi_requests_total{hit="none"}[5m]))', known)
    assert wrong('marconi_missed_tokens_total{cause=~"no_slot|no_slots"}', known) == ["cause is never no_slot|no_slots"]
    assert wrong('marconi_router_worker_up{use="free"} == 0', known) == ["marconi_router_worker_up has no use"]
    with pytest.raises(ValueError, match="a function must be"):
        wrong("ratio(marconi_nodes)", known)


def test_what_an_alert_says_names_labels_that_its_expression_keeps(known: dict[str, frozenset[str]]) -> None:
    for rule in alerts():
        asked = promql.read(rule["expr"])
        kept = asked.grouped_by or frozenset.intersection(*(known[each.metric] for each in asked.selectors))
        named = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
        assert named <= kept, rule["alert"]


def test_the_board_can_be_provisioned() -> None:
    """Each panel has a place of its own and takes its data from the variable, which any Prometheus fills."""
    panels = board()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24
    assert {panel["datasource"]["uid"] for panel in panels if panel["type"] != "row"} == {"${datasource}"}


def test_the_operations_page_says_what_to_do_at_every_alert() -> None:
    page = (EXAMPLES.parent / "operations.md").read_text()
    assert {rule["alert"] for rule in alerts()} == set(re.findall(r"^\| `(Marconi\w+)` \|", page, re.MULTILINE))


def described(page_tokens: int, joint: Use | None) -> str:
    """The line of a cache at its start, with the bytes of the page's model; sizes that depend on the card as dots."""
    cache = SimpleNamespace(
        choice=PolicyChoice(),
        costs=SimpleNamespace(kv_bytes_per_token=6144, state_bytes=49082368),
        flags=flags.Flags(),
        joint_bytes=joint,
        page_size=page_tokens,
        pools=SimpleNamespace(num_kv_tokens=SIZE, state_slots=SimpleNamespace(size=SIZE)),
    )
    stats = CacheStats.__new__(CacheStats)
    stats._cache = cache
    return stats.describe().replace(str(SIZE), "...")


def test_the_quick_start_shows_how_a_cache_describes_itself() -> None:
    page = (EXAMPLES.parent / "quick-start.md").read_text()
    assert f"    marconi: {described(1, Use(SIZE, SIZE, 0))}\n" in page
    assert f"    marconi: {described(1, None)}\n".replace("page 1,", "page ...,") in page


# Commands


class ServerParser(argparse.ArgumentParser):
    """The parser of `sglang.launch_server`, our flags among its own, which raises where it would end the process."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


@pytest.fixture(scope="module")
def server_parser() -> ServerParser:
    parser = ServerParser(allow_abbrev=False)
    ServerArgs.add_cli_args(parser)
    if "--marconi-eviction" not in parser._option_string_actions:
        flags.add_to(parser)
    return parser


@pytest.fixture(scope="module")
def options(server_parser: ServerParser) -> frozenset[str]:
    """Flags of `sglang.launch_server`, ours among them."""
    return frozenset(server_parser._option_string_actions)


def texts_of(value: Any) -> Iterator[list[str]]:
    """The commands in a YAML document: `command` with `args`, each a list of words."""
    if isinstance(value, dict):
        words = [*(value.get("command") or ()), *(value.get("args") or ())]
        if words:
            yield list(map(str, words))
        for each in value.values():
            yield from texts_of(each)
    elif isinstance(value, list):
        for each in value:
            yield from texts_of(each)


def unit(path: Path) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    parser.optionxform = str  # type: ignore[assignment, method-assign] - systemd's names have capitals
    parser.read_string(path.read_text().replace("\\\n", " "))
    return parser


def example_commands(path: Path) -> list[list[str]]:
    """The commands of a file, and those that its comments show."""
    text = path.read_text()
    shown = [
        shlex.split(line) for line in re.findall(r"^#\s+((?:marconi|python -m sglang\S*) .*)$", text, re.MULTILINE)
    ]
    if path.suffix == ".yml":
        return shown + [words for document in yaml.safe_load_all(text) for words in texts_of(document)]
    if path.suffix == ".service":
        return [*shown, shlex.split(unit(path)["Service"]["ExecStart"])]
    return shown


def read_by_its_program(words: list[str], server_parser: ServerParser) -> None:
    """Parse a command; `ValueError` or `SystemExit` where its program would refuse a flag or a value.

    On a page `...` stands for the flags that a reader has. Mooncake's programs are not installed.
    """
    if words[0].startswith("mooncake_"):
        return
    if Path(words[0]).name == "marconi":
        cli.parse(words[1:])
        return
    start = next((at for at, word in enumerate(words) if word.startswith("--") or word == "..."), len(words))
    given = [part for word in words[start:] for part in (("--model-path", "MODEL") if word == "..." else (word,))]
    args = server_parser.parse_args(given)
    for spec in flags.FLAGS:
        text = getattr(args, spec.option.removeprefix("--").replace("-", "_"))
        if text is not None and spec.field != "events_keys":  # a file that a reader has
            spec.read(text)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_file_is_well_formed_and_its_commands_are_read(path: Path, server_parser: ServerParser) -> None:
    found = example_commands(path)
    if path.suffix == ".json":
        json.loads(path.read_text())
    assert bool(found) != (path.name in COMMANDLESS)
    for words in found:
        read_by_its_program(words, server_parser)


def value_of(flag: str, words: list[str]) -> str:
    return words[words.index(flag) + 1]


def test_the_jobs_that_alerts_name_are_scraped() -> None:
    scraped = yaml.safe_load((EXAMPLES / "prometheus.yml").read_text())
    assert {each["job_name"] for each in scraped["scrape_configs"]} == VALUES["job"]
    assert all((EXAMPLES / name).is_file() for name in scraped["rule_files"])


@pytest.mark.parametrize(
    "names", [("compose.yml",), ("kubernetes.yml",), ("marconi.service", "marconi-router.service")]
)
def test_a_router_is_in_front_of_the_workers_beside_it(names: tuple[str, ...]) -> None:
    found = [words for name in names for words in example_commands(EXAMPLES / name)]
    (router,) = (words for words in found if "router" in words)
    workers = [words for words in found if "--radix-cache-backend" in words]
    assert {value_of("--model-path", words) for words in workers} == {value_of("--model", router)}
    ports = {urlsplit(url).port for url in value_of("--workers", router).split(",")}
    assert ports == {int(value_of("--port", words)) for words in workers}
    assert {"--marconi-events-keys" in words for words in workers} == {"--events-keys" in router}


def test_workers_that_other_hosts_reach_publish_with_keys() -> None:
    found = [words for path in FILES for words in example_commands(path) if "--marconi-events" in words]
    assert len(found) >= 3
    for words in found:
        address = TcpAddress.parse(value_of("--marconi-events", words))
        assert address.is_loopback != ("--marconi-events-keys" in words)


def page_commands() -> Iterator[tuple[str, list[str]]]:
    """The `launch_server` commands of all pages, indented or in a block of shell.

    Those of `recipes.md` abbreviate flags, as they were published: `test_recipes.py` has SGLang's parser read them.
    """
    for path in PAGES:
        if path.name == "recipes.md":
            continue
        text = path.read_text(encoding="utf-8").replace("\\\n", "")
        for line in re.findall(
            r"^(?: {4}|\$ )?(?:\w+=\S+ )*((?:python -m sglang\.launch_server|sglang serve) [^#\n`]*)$", text, re.M
        ):
            yield path.name, shlex.split(re.sub(r"<[^>]*>", "MODEL", line))


def test_every_server_that_a_page_starts_is_started_by_flags_and_values_that_are_read(
    server_parser: ServerParser,
) -> None:
    found = list(page_commands())
    assert len(found) > 12
    for _, words in found:
        read_by_its_program(words, server_parser)


def marconi_flags(parser: argparse.ArgumentParser) -> Iterator[str]:
    """The flags of the `marconi` command, those of its subcommands among them."""
    for action in parser._actions:
        yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                yield from marconi_flags(each)


def named_flags(path: Path) -> set[str]:
    """The flags in the text of a page."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    spans = re.findall(r"`([^`]+)`", text)
    return {flag for span in spans for flag in re.findall(r"(?:^|[ (\"])(--[a-z0-9-]+[a-z0-9])(?![a-z0-9.-])", span)}


def test_a_flag_that_a_page_names_is_one(options: frozenset[str]) -> None:
    benchmarks = "".join(path.read_text() for path in (EXAMPLES.parents[1] / "benchmark").rglob("*.py"))
    read = options | set(marconi_flags(cli._parser())) | OF_OTHERS | set(re.findall(r'"(--[a-z0-9-]+)"', benchmarks))
    named = {path.name: named_flags(path) for path in PAGES}
    assert len(set().union(*named.values())) > 100
    assert {name: left for name, found in named.items() if (left := found - read)} == {}


def spelled(value: object) -> str:
    """A default as a page shows it."""
    if value is None:
        return "no"
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)


def misprinted(text: str) -> list[str]:
    """The flags of which the tables on serving have another environment variable, default or choices, or lack."""
    table = re.findall(r"^\| `(--marconi-[a-z-]+) ([^`]*)` \| `(MARCONI_\w+)` \| (.*?) \|", text, re.MULTILINE)
    shown = {option: (env, default.replace("`", ""), metavar) for option, metavar, env, default in table}
    alone = re.findall(r"^\| `(MARCONI_\w+)` \| `(\w+)` \|", text, re.MULTILINE)
    found = [option for option in shown if option not in {spec.option for spec in flags.FLAGS}]
    variables = {spec.env: spelled(getattr(flags.Flags(), spec.field)) for spec in flags.SPECS if not spec.is_flag}
    found += [name for name in {*variables, *dict(alone)} if dict(alone).get(name) != variables.get(name)]
    for spec in flags.FLAGS:
        env, default, metavar = shown.get(spec.option, ("", "", ""))
        is_default = re.match(re.escape(spelled(getattr(flags.Flags(), spec.field))) + r"(?:ne)?\b", default)
        if env != spec.env or not is_default or (metavar.startswith("{") and metavar != spec.metavar):
            found.append(spec.option)
    return found


def test_the_page_on_serving_lists_every_flag_with_its_environment_variable_and_default() -> None:
    text = (EXAMPLES.parent / "serving.md").read_text()
    assert misprinted(text) == []
    assert misprinted(text.replace("`10000000`", "`1000000`")) == ["--marconi-ghost-tokens"]
    assert misprinted(text.replace("{off,on,text}", "{off,on}")) == ["--marconi-explain"]
    assert misprinted(text.replace("`MARCONI_TIME` | `seconds`", "`MARCONI_TIME` | `requests`")) == ["MARCONI_TIME"]
    assert misprinted(text.replace("`--marconi-record", "`--marconi-keep")) == ["--marconi-keep", "--marconi-record"]


def test_a_flag_and_a_value_that_are_not_read_are_found(server_parser: ServerParser) -> None:
    started = ["python", *SERVER, "...", "--radix-cache-backend", "marconi"]
    read_by_its_program(started, server_parser)
    for words in (["--marconi-evict", "best"], ["--marconi-eviction", "newest"], ["--tp-size", "two"]):
        with pytest.raises(ValueError, match=rf"{words[0]}|got '{words[1]}'"):
            read_by_its_program([*started, *words], server_parser)
    with pytest.raises(SystemExit):
        read_by_its_program(["marconi", "router", "--worker", "http://127.0.0.1:1"], server_parser)
