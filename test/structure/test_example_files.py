"""The files of docs/examples have the shapes that their programs read, and name only what they define.

The keys are those of the Compose specification, of Kubernetes' API, of Prometheus' configuration and rules, and of
Grafana's dashboards, as far as the examples use them: a new one is added here once it has been looked up.
"""

import copy
import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, TypeAlias

import pytest

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed: pip install '.[server]'")

EXAMPLES: Final = Path(__file__).parents[2] / "docs" / "examples"
Document: TypeAlias = Any

HOST: Final = re.compile(r"https?://([\w.-]+):\d")
DURATION: Final = re.compile(r"(\d+(ms|[smhdwy]))+")
SERVICE: Final = frozenset(
    {
        *("command", "deploy", "environment", "healthcheck", "image", "ipc", "networks", "ports", "restart"),
        *("secrets", "stop_grace_period", "volumes"),
    }
)
HEALTH: Final = frozenset({"test", "interval", "timeout", "retries", "start_period"})
KINDS: Final = {
    "Service": "v1",
    "StatefulSet": "apps/v1",
    "Deployment": "apps/v1",
    "NetworkPolicy": "networking.k8s.io/v1",
}
PROBES: Final = ("startupProbe", "readinessProbe", "livenessProbe")
RULE: Final = frozenset(["alert", "expr", "for", "labels", "annotations"])
SCRAPE: Final = frozenset(["job_name", "authorization", "static_configs"])


def read(name: str) -> Document:
    """The file's document; that of Kubernetes is a list."""
    text = (EXAMPLES / name).read_text(encoding="utf-8")
    if name.endswith(".json"):
        return json.loads(text)
    documents = list(yaml.safe_load_all(text))
    return documents if name == "kubernetes.yml" else documents[0]


def unknown(place: str, given: Document, keys: frozenset[str]) -> Iterator[str]:
    yield from (f"{place} has no {key}" for key in sorted(set(given) - keys))


def undefined(place: str, named: Document, defined: Document) -> Iterator[str]:
    yield from (f"{place} names {name}, which is not defined" for name in sorted(set(named) - set(defined)))


def no_duration(place: str, text: Document) -> Iterator[str]:
    if not DURATION.fullmatch(str(text)):
        yield f"{place} must be a duration, got {text}"


def wrong_compose(compose: Document) -> Iterator[str]:
    parts = {key: each for key, each in compose.items() if not key.startswith("x-")}
    yield from unknown("the file", parts, frozenset({"services", "networks", "volumes", "secrets"}))
    for name, service in compose["services"].items():
        yield from unknown(name, service, SERVICE)
        if not all(isinstance(word, str) for word in (service["image"], *service["command"])):
            yield f"{name}: a word of a command must be a text"
        for part in ("networks", "secrets"):
            yield from undefined(name, service[part], compose[part])
        words = " ".join(service["command"])
        yield from undefined(name, re.findall(r"/run/secrets/([\w-]+)", words), service["secrets"])
        yield from undefined(name, HOST.findall(words), compose["services"])
        yield from no_duration(f"{name}: stop_grace_period", service["stop_grace_period"])
        health = service.get("healthcheck", {})
        yield from unknown(f"{name}: healthcheck", health, HEALTH)
        for key in health.keys() & {"interval", "timeout", "start_period"}:
            yield from no_duration(f"{name}: {key}", health[key])
        if health and health["test"][0] not in ("CMD", "CMD-SHELL"):
            yield f"{name}: a test must begin with CMD"


def wrong_kubernetes(documents: Document) -> Iterator[str]:
    pods: dict[str, set[int]] = {}
    hosts = {
        f"{each['metadata']['name']}-{number}.{each['spec']['serviceName']}"
        for each in documents
        if each["kind"] == "StatefulSet"
        for number in range(each["spec"]["replicas"])
    }
    for each in documents:
        place = f"{each['kind']} {each['metadata']['name']}"
        if KINDS.get(each["kind"]) != each["apiVersion"]:
            yield f"{place} must be of {KINDS.get(each['kind'])}, got {each['apiVersion']}"
        if each["kind"] in ("StatefulSet", "Deployment"):
            pod = each["spec"]["template"]
            labels = pod["metadata"]["labels"]
            if each["spec"]["selector"]["matchLabels"] != labels:
                yield f"{place} selects other pods than its own"
            pods[json.dumps(labels)] = {
                port["containerPort"] for container in pod["spec"]["containers"] for port in container["ports"]
            }
            yield from wrong_pod(place, pod["spec"], hosts)
    headless = {each["metadata"]["name"] for each in documents if each["spec"].get("clusterIP") == "None"}
    for each in documents:
        place = f"{each['kind']} {each['metadata']['name']}"
        match each["kind"], each["spec"]:
            case "Service", {"selector": labels, "ports": ports}:
                yield from undefined(place, (port["port"] for port in ports), pods.get(json.dumps(labels), ()))
            case "StatefulSet", {"serviceName": name}:
                yield from undefined(place, [name], headless)
            case "NetworkPolicy", {"podSelector": {"matchLabels": labels}, "ingress": rules}:
                for rule in rules:
                    admitted = pods.get(json.dumps(labels), ())
                    yield from undefined(place, (port["port"] for port in rule["ports"]), admitted)
                    peers = (peer["podSelector"]["matchLabels"] for peer in rule["from"] if "podSelector" in peer)
                    yield from undefined(place, map(json.dumps, peers), pods)


def wrong_pod(place: str, spec: Document, hosts: set[str]) -> Iterator[str]:
    volumes = {volume["name"] for volume in spec["volumes"]}
    for container in spec["containers"]:
        if not all(isinstance(word, str) for word in (*container["command"], *container["args"])):
            yield f"{place}: a word of a command must be a text"
        yield from undefined(place, HOST.findall(" ".join(container["args"])), hosts)
        ports = {port["name"] for port in container["ports"]}
        probes = [container[name] for name in PROBES if name in container]
        asked = (probe.get("httpGet") or probe["tcpSocket"] for probe in probes)
        yield from undefined(f"{place}: a probe", (each["port"] for each in asked), ports)
        yield from undefined(f"{place}: a mount", (mount["name"] for mount in container["volumeMounts"]), volumes)


def wrong_prometheus(config: Document) -> Iterator[str]:
    yield from unknown("the file", config, frozenset({"global", "rule_files", "scrape_configs"}))
    yield from no_duration("scrape_interval", config["global"]["scrape_interval"])
    for job in config["scrape_configs"]:
        yield from unknown(job["job_name"], job, SCRAPE)
        for target in (target for each in job["static_configs"] for target in each["targets"]):
            if not re.fullmatch(r"[\w.-]+:\d+", target):
                yield f"a target must be host:port, got {target}"


def wrong_alerts(config: Document) -> Iterator[str]:
    yield from unknown("the file", config, frozenset({"groups"}))
    rules = [rule for group in config["groups"] for rule in group["rules"]]
    for group in config["groups"]:
        yield from unknown("a group", group, frozenset({"name", "rules"}))
    names = [rule["alert"] for rule in rules]
    yield from (f"{name} is there twice" for name in set(names) if names.count(name) > 1)
    for rule in rules:
        yield from unknown(rule["alert"], rule, RULE)
        yield from no_duration(f"{rule['alert']}: for", rule.get("for", "0s"))
        if rule["labels"].keys() != {"severity"} or rule["labels"]["severity"] not in ("info", "warning", "critical"):
            yield f"{rule['alert']} must have a severity, got {rule['labels']}"
        summary = rule["annotations"]["summary"]
        filled = re.sub(r"\{\{ \$(labels\.\w+|value)( \| humanizePercentage)? \}\}", "", summary)
        if not rule["annotations"].keys() <= {"summary", "runbook_url"} or re.search(r"[{}$]", filled):
            yield f"{rule['alert']}: a template that nothing fills, {filled}"


def wrong_board(board: Document) -> Iterator[str]:
    for key in ("uid", "title", "schemaVersion", "time", "templating", "panels"):
        if key not in board:
            yield f"the board has no {key}"
    variables = {each["name"] for each in board["templating"]["list"]}
    for panel in board["panels"]:
        if panel["type"] not in ("row", "timeseries"):
            yield f"{panel['title']}: a panel must be a row or a timeseries, got {panel['type']}"
        targets = panel.get("targets", [])
        references = [target["refId"] for target in targets]
        if (panel["type"] == "row") == bool(targets) or len(set(references)) < len(references):
            yield f"{panel['title']}: queries must be told apart, got {references}"
        used = re.findall(r"\$\{?(\w+)", json.dumps(panel))
        yield from undefined(panel["title"], (each for each in used if not each.startswith("__")), variables)


CHECKS: Final[dict[str, Callable[[Document], Iterator[str]]]] = {
    "compose.yml": wrong_compose,
    "compose.mooncake.yml": wrong_compose,
    "kubernetes.yml": wrong_kubernetes,
    "prometheus.yml": wrong_prometheus,
    "prometheus-alerts.yml": wrong_alerts,
    "grafana-marconi.json": wrong_board,
}


@pytest.mark.parametrize("name", CHECKS)
def test_a_file_has_the_shape_that_its_program_reads(name: str) -> None:
    assert list(CHECKS[name](read(name))) == []


BREAKS: Final[list[tuple[str, tuple[str | int, ...], Any, str]]] = [
    ("compose.yml", ("services", "router", "restarts"), "always", "router has no restarts"),
    ("compose.yml", ("services", "router", "secrets"), ["keys"], "router names keys"),
    ("compose.yml", ("services", "worker-1", "stop_grace_period"), 180, "must be a duration, got 180"),
    ("compose.yml", ("services", "router", "command", 8), 30000, "must be a text"),
    ("compose.yml", ("services", "router", "command", 3), "http://worker-3:30000", "names worker-3"),
    ("kubernetes.yml", (1, "spec", "replicas"), 1, "names marconi-worker-1.marconi-worker"),
    ("kubernetes.yml", (1, "apiVersion"), "v1", "must be of apps/v1, got v1"),
    ("kubernetes.yml", (1, "spec", "selector", "matchLabels", "app"), "other", "selects other pods"),
    ("kubernetes.yml", (1, "spec", "serviceName"), "marconi-router", "names marconi-router"),
    ("kubernetes.yml", (2, "spec", "ports", 0, "port"), 80, "names 80"),
    ("kubernetes.yml", (1, "spec", "template", "spec", "volumes"), [], "a mount names fleet"),
    ("prometheus.yml", ("scrape_configs", 0, "static_configs", 0, "targets"), ["http://a:1"], "must be host:port"),
    ("prometheus.yml", ("scrape_configs", 0, "bearer"), "x", "has no bearer"),
    ("prometheus-alerts.yml", ("groups", 0, "rules", 0, "for"), "two minutes", "must be a duration"),
    ("prometheus-alerts.yml", ("groups", 0, "rules", 0, "alert"), "MarconiHookFaults", "is there twice"),
    ("prometheus-alerts.yml", ("groups", 0, "rules", 0, "labels"), {}, "must have a severity"),
    ("prometheus-alerts.yml", ("groups", 0, "rules", 0, "annotations", "summary"), "{{ labels.x }}", "nothing fills"),
    ("grafana-marconi.json", ("panels", 1, "type"), "graph", "a row or a timeseries, got graph"),
    ("grafana-marconi.json", ("templating", "list"), [], "names datasource"),
]


@pytest.mark.parametrize(("name", "path", "value", "message"), BREAKS)
def test_a_file_that_its_program_would_refuse_is_found(
    name: str, path: tuple[str | int, ...], value: Any, message: str
) -> None:
    document = copy.deepcopy(read(name))
    part = document
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = value
    assert any(message in line for line in CHECKS[name](document))


def complaints(unit: Path) -> list[str]:
    """What systemd says of a unit, but that the program is not installed here."""
    words = ["systemd-analyze", "verify", str(unit)]
    said = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False).stderr.splitlines()
    return [line for line in said if unit.name in line and "is not executable" not in line]


@pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed: apt-get install systemd"
)
def test_systemd_takes_the_units_and_complains_of_a_name_that_it_does_not_know(tmp_path: Path) -> None:
    for unit in EXAMPLES.glob("*.service"):
        assert complaints(unit) == []
        broken = tmp_path / unit.name
        broken.write_text(unit.read_text().replace("TimeoutStopSec=", "TimeoutStops="))
        assert any("TimeoutStops" in line for line in complaints(broken))
