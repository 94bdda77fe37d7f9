"""The order of the layers: a package imports only packages below it, and only what serves imports SGLang."""

import ast
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

from structure.test_circles import arrows, sources

PYTHON = Path(__file__).parents[2] / "python"
KERNELS = Path(__file__).parents[2] / "sgl-kernel-ext" / "sgl_kernel_ext"
LAYERS = (
    *("process", "chat", "model", "tree", "policy", "lifecycle", "baselines", "replay", "view"),
    *("events", "router", "fleet", "engine", "validate", "cpu", "demo", "cli"),
)
ALLOWED = {layer: set(LAYERS[: index + 1]) for index, layer in enumerate(LAYERS)}
# What a worker publishes is of its tree alone, and a router knows neither the policies behind it nor their replay.
ALLOWED["events"] = {"tree", "events"}
ALLOWED["router"] = {"process", "chat", "model", "events", "router"}
# It holds one server against its replay.
ALLOWED["validate"] -= {"router", "fleet"}
SERVING = {"engine", "cpu", "demo"}
"""What may import SGLang and torch."""
# What a server offers is in `policy`: it loads nothing of what it is compared with.
for serving in SERVING:
    ALLOWED[serving].discard("baselines")
HEAVY = {"sglang", "torch", "triton", "transformers", "sgl_kernel_ext"}
# The tokenizers of transformers need no torch.
TOKENIZERS = ("chat", "chat")


def imports(source: str) -> Iterator[str]:
    """Every module that `source` imports, at whatever depth of it."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def violations(layer: str, source: str, package: str = "") -> list[str]:
    """The imports of `source`, a file of `layer` in `package` of it, that the order forbids."""
    wrong = []
    heavy = HEAVY - ({"transformers"} if (layer, package) == TOKENIZERS else set())
    for name in imports(source):
        parts = name.split(".")
        if parts[0] == "marconi" and len(parts) > 1 and parts[1] in LAYERS and parts[1] not in ALLOWED[layer]:
            wrong.append(name)
        if parts[0] in heavy and layer not in SERVING:
            wrong.append(name)
    return wrong


def test_every_package_belongs_to_a_layer() -> None:
    entries = (path for path in (PYTHON / "marconi").iterdir() if path.is_dir() or path.suffix == ".py")
    found = {path.stem for path in entries if not path.name.startswith("_")}
    assert found <= set(LAYERS), f"name the layer of {found - set(LAYERS)}"


def reached(start: Iterable[str], graph: Mapping[str, set[str]]) -> set[str]:
    """Modules that are loaded with those of `start`, packages above them included."""
    found: set[str] = set()
    ahead = [*start]
    while ahead:
        name = ahead.pop()
        if name in graph and name not in found:
            found.add(name)
            ahead += [*graph[name], name.rpartition(".")[0]]
    return found


def served(graph: Mapping[str, set[str]]) -> list[str]:
    """What runs in a server; `marconi check` is a command of its own, and prints and writes as the replay does."""
    layers = tuple(f"marconi.{layer}." for layer in SERVING)
    return [name for name in graph if name.startswith(layers) and not name.startswith("marconi.engine.check")]


def baselines(names: set[str]) -> list[str]:
    """Those of `names` that belong to `marconi.baselines`."""
    return sorted(name for name in names if name.split(".")[1:2] == ["baselines"])


def test_what_a_server_loads_reaches_no_baseline() -> None:
    graph = arrows(sources("python", "marconi"))
    start = served(graph)
    assert {"marconi.engine.plugin", "marconi.engine.cache", "marconi.cpu.platform"} <= set(start)
    assert baselines(reached(start, graph)) == []


def test_a_baseline_behind_another_file_is_found() -> None:
    """The control: the file between imports it, the server's own does not."""
    graph = {
        "marconi.engine.cache": {"marconi.policy.new"},
        "marconi.policy.new": {"marconi.baselines.traffic"},
        "marconi.baselines.traffic": set[str](),
    }
    assert baselines(reached(served(graph), graph)) == ["marconi.baselines.traffic"]


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_imports_only_layers_below_it(layer: str) -> None:
    files = sorted((PYTHON / "marconi" / layer).rglob("*.py")) or [PYTHON / "marconi" / f"{layer}.py"]
    wrong = {
        str(path.relative_to(PYTHON)): found
        for path in files
        if path.is_file() and (found := violations(layer, path.read_text(encoding="utf-8"), path.parent.name))
    }
    assert not wrong


def test_kernels_stand_alone() -> None:
    wrong = {
        str(path): name
        for path in KERNELS.rglob("*.py")
        for name in imports(path.read_text(encoding="utf-8"))
        if name.split(".")[0] not in {"torch", "triton", "sgl_kernel_ext"} and not _is_standard(name)
    }
    assert not wrong


def _is_standard(name: str) -> bool:
    import sys

    return name.split(".")[0] in sys.stdlib_module_names


@pytest.mark.parametrize(
    ("layer", "source"),
    [
        ("policy", "import sglang.srt"),
        ("tree", "from marconi.policy import eviction"),
        ("model", "def f():\n    import torch"),
        ("events", "from marconi.router.index import Chain"),
        ("router", "from marconi import replay"),
        ("router", "from marconi.fleet import task"),
        ("replay", "import marconi.engine.cache"),
        ("engine", "from marconi.cpu import launchers"),
        ("engine", "from marconi.baselines.catalog import POLICIES"),
        ("cpu", "from marconi import baselines"),
        ("demo", "def f():\n    from marconi.baselines import traffic"),
        ("policy", "from marconi.baselines.eviction.joint_lru import JointLru"),
        ("baselines", "from marconi.replay import serial"),
        ("engine", "from marconi.demo import tiny_model"),
        ("replay", "from marconi.router.index import Chain"),
        ("replay", "from marconi import fleet"),
        ("replay", "from marconi.view.frame import Frame"),
        ("view", "from marconi.events.hashes import HashSpace"),
        ("policy", "from marconi.events.tree_log import TreeLog"),
        ("validate", "from marconi.router.index import Chain"),
        ("engine", "from marconi.validate.server import Server"),
    ],
)
def test_a_forbidden_import_is_found(layer: str, source: str) -> None:
    assert violations(layer, source)


def test_only_the_simulated_fleet_imports_both_the_replay_and_the_router() -> None:
    source = "from marconi.router.dispatch import Dispatcher\nfrom marconi.replay import serial"
    assert [layer for layer in LAYERS if not violations(layer, source)] == ["fleet", "engine", "cpu", "demo", "cli"]


def test_only_what_tokenizes_may_import_transformers() -> None:
    source = "from transformers import AutoTokenizer"
    assert not violations("chat", source, "chat")
    assert violations("router", source, "prompts")
    assert violations("chat", "import torch", "chat")
