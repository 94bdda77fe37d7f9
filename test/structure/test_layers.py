"""The order of the layers: a package imports only packages below it, and only what serves imports SGLang.

The product, `marconi`, imports none of the packages beside it.
"""

import ast
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

from structure.test_circles import arrows, sources

PYTHON = Path(__file__).parents[2] / "python"
KERNELS = Path(__file__).parents[2] / "sgl-kernel-ext" / "sgl_kernel_ext"
LAYERS = (
    *("process", "record", "chat", "extensions", "page", "model", "tree", "policy", "lifecycle", "replay", "plan"),
    *("view", "events", "router", "engine", "check", "validate", "cli"),
)
ALLOWED = {layer: set(LAYERS[: index + 1]) for index, layer in enumerate(LAYERS)}
# What a worker publishes is of its tree alone, and a router knows neither the policies behind it nor their replay.
ALLOWED["events"] = {"tree", "events"}
ALLOWED["router"] = {"process", "record", "chat", "page", "model", "events", "router"}
# One server each: against its replay, and before it starts.
ALLOWED["validate"] -= {"router"}
ALLOWED["check"] -= {"router"}
BESIDE = {
    "marconi_cpu": set(LAYERS),
    "marconi_lab": set(LAYERS) - {"engine", "validate"},
    "marconi_ray": ALLOWED["router"],
}
"""The packages beside the product, which do not know each other."""
ALLOWED |= BESIDE
SERVING = {"engine", "check", "marconi_cpu"}
"""What may import SGLang and torch."""
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
        if (parts[0] in heavy and layer not in SERVING) or parts[0] in BESIDE.keys() - {layer}:
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
    """The modules of a server."""
    return [name for name in graph if name.startswith("marconi.engine.")]


def test_a_server_loads_nothing_by_which_the_laboratory_is_found() -> None:
    graph = arrows(sources("python", "marconi"))
    start = served(graph)
    assert {"marconi.engine.plugin.entry", "marconi.engine.cache.radix_cache"} <= set(start)
    assert not {"marconi.extensions", "marconi.replay.catalog"} & reached(start, graph)


def test_a_catalogue_behind_another_file_is_found() -> None:
    """The control: the file between imports it, the server's own does not."""
    graph = {
        "marconi.engine.cache.radix_cache": {"marconi.policy.new"},
        "marconi.policy.new": {"marconi.replay.catalog"},
        "marconi.replay.catalog": set[str](),
    }
    assert "marconi.replay.catalog" in reached(served(graph), graph)


@pytest.mark.parametrize("layer", ALLOWED)
def test_a_layer_imports_only_layers_below_it(layer: str) -> None:
    folder = PYTHON / layer if layer in BESIDE else PYTHON / "marconi" / layer
    files = sorted(folder.rglob("*.py")) or [folder.with_suffix(".py")]
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
        ("router", "from marconi_lab.fleet import task"),
        ("router", "def f():\n    from marconi_ray import application"),
        ("replay", "import marconi.engine.cache.radix_cache"),
        ("engine", "from marconi_cpu import launchers"),
        ("engine", "from marconi_lab.catalog import POLICIES"),
        ("policy", "from marconi_lab.eviction.joint_lru import JointLru"),
        ("replay", "def f():\n    import marconi_lab.fleet"),
        ("cli", "def f():\n    from marconi_cpu import command"),
        ("marconi_cpu", "from marconi_lab import traffic"),
        ("marconi_lab", "from marconi_cpu import tiny_model"),
        ("marconi_ray", "from marconi import replay"),
        ("marconi_lab", "import torch"),
        ("marconi_lab", "from marconi.engine.cache.radix_cache import MarconiRadixCache"),
        ("replay", "from marconi.router.index import Chain"),
        ("replay", "from marconi.view.frame import Frame"),
        ("view", "from marconi.events.hashes import HashSpace"),
        ("policy", "from marconi.events.tree_log import TreeLog"),
        ("validate", "from marconi.router.index import Chain"),
        ("engine", "from marconi.validate.server import Server"),
    ],
)
def test_a_forbidden_import_is_found(layer: str, source: str) -> None:
    assert violations(layer, source)


def test_in_the_product_only_a_server_and_the_command_may_import_both_the_replay_and_the_router() -> None:
    source = "from marconi.router.dispatch import Dispatcher\nfrom marconi.replay import serial"
    assert [layer for layer in LAYERS if not violations(layer, source)] == ["engine", "cli"]


def test_only_what_tokenizes_may_import_transformers() -> None:
    source = "from transformers import AutoTokenizer"
    assert not violations("chat", source, "chat")
    assert violations("router", source, "prompts")
    assert violations("chat", "import torch", "chat")
