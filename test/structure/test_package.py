"""What is built names releases and nothing of the machine that built it, and shows no link that leads nowhere."""

import os
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import marconi
import sgl_kernel_ext

ROOT = Path(__file__).parents[2]
PROJECTS = ("pyproject.toml", "sgl-kernel-ext/pyproject.toml")


def requirements(path: str) -> list[str]:
    project = tomllib.loads((ROOT / path).read_text(encoding="utf-8"))["project"]
    return [
        *project["dependencies"],
        *(each for extra in project.get("optional-dependencies", {}).values() for each in extra),
    ]


def test_the_server_needs_the_kernels_of_its_own_version() -> None:
    assert f"sgl-kernel-ext=={marconi.__version__}" in requirements("pyproject.toml")
    assert marconi.__version__ == sgl_kernel_ext.__version__


@pytest.mark.parametrize("path", PROJECTS)
def test_no_requirement_is_a_place_on_a_machine(path: str) -> None:
    assert [each for each in requirements(path) if re.search(r"@|file:|\.\./", each)] == []


def built(path: str, out: Path) -> dict[str, dict[str, bytes]]:
    """The files of the wheel and the sdist of a project, by their names in it, of each archive by its own name."""
    uv = shutil.which("uv") or ROOT / ".uv" / "bin" / "uv"
    if not Path(uv).is_file():
        pytest.skip("uv is neither on the path nor in .uv: make setup")
    command = [str(uv), "build", "--offline", "--python", sys.executable, "--out-dir", str(out), str(ROOT / path)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "UV_NO_CONFIG": "1"})
    if "found in the cache" in done.stderr or "network was disabled" in done.stderr:
        pytest.skip("hatchling is not in uv's cache: make setup")
    assert done.returncode == 0, done.stderr
    files: dict[str, dict[str, bytes]] = {}
    for archive in out.glob("*.whl"):
        with zipfile.ZipFile(archive) as wheel:
            files[archive.name] = {name: wheel.read(name) for name in wheel.namelist()}
    for archive in out.glob("*.tar.gz"):
        with tarfile.open(archive) as sdist:
            members = [(each.name.partition("/")[2], sdist.extractfile(each)) for each in sdist if each.isfile()]
            files[archive.name] = {name: content.read() for name, content in members if content is not None}
    return files


def links(text: str) -> list[str]:
    """Where links of a page lead that are no addresses."""
    return re.findall(r"\]\((?![a-z]+:)([^)\s]+)\)", text)


@pytest.mark.parametrize("path", [".", "sgl-kernel-ext"])
def test_what_is_built_holds_its_package_and_nothing_of_this_machine(path: str, tmp_path: Path) -> None:
    archives = built(path, tmp_path)
    assert sorted(name.partition("-0")[0].replace("-", "_") for name in archives) == (
        ["sglang_marconi"] * 2 if path == "." else ["sgl_kernel_ext"] * 2
    )
    for files in archives.values():
        described = [text.decode() for name, text in files.items() if name.endswith(("/METADATA", "PKG-INFO"))]
        assert len(described) == 1
        assert "file:" not in described[0]
        assert "\nAuthor: The sglang-marconi maintainers\n" in described[0]
        assert [name for name, content in files.items() if str(ROOT).encode() in content] == []
        tops = {name.partition("/")[0] for name in files}
        assert not tops & {"test", "benchmark", "docs", "sgl-kernel-ext"}
        assert path != "." or links(described[0]) == []


class Hook:
    """Stands for hatchling's class, which a build alone has."""


@pytest.fixture
def long_description_of(monkeypatch: pytest.MonkeyPatch) -> Mapping[str, Any]:
    """The names of `long_description.py`."""
    interface = ModuleType("hatchling.metadata.plugin.interface")
    interface.MetadataHookInterface = Hook  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, interface.__name__, interface)
    return runpy.run_path(str(ROOT / "python" / "long_description.py"))


def test_the_long_description_leads_to_the_repository_or_nowhere(long_description_of: Mapping[str, Any]) -> None:
    long_description = long_description_of["long_description"]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(links(readme)) > 20
    assert links(long_description(readme, None)) == []
    assert links(long_description(readme, "https://host/us")) == []
    text = "![A picture](docs/a.svg) by [us](docs/b.md#c) on [SGLang](https://host/sglang)"
    assert long_description(text, None) == " by us on [SGLang](https://host/sglang)"
    assert long_description(text, "https://host/us") == (
        "![A picture](https://host/us/raw/HEAD/docs/a.svg) by [us](https://host/us/blob/HEAD/docs/b.md#c) on "
        "[SGLang](https://host/sglang)"
    )
