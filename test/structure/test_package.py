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
from functools import partial
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


def uv() -> str:
    """The program that builds and installs."""
    found = shutil.which("uv") or ROOT / ".uv" / "bin" / "uv"
    if not Path(found).is_file():
        pytest.skip("NEEDS uv, neither on the path nor in .uv (make setup): this test did not run")
    return str(found)


def built(path: str, out: Path) -> dict[str, dict[str, bytes]]:
    """The files of the wheel and the sdist of a project, by their names in it, of each archive by its own name."""
    command = [uv(), "build", "--offline", "--python", sys.executable, "--out-dir", str(out), str(ROOT / path)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "UV_NO_CONFIG": "1"})
    if "found in the cache" in done.stderr or "network was disabled" in done.stderr:
        pytest.skip("NEEDS hatchling in uv's cache (make setup): this test did not run")
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
        places = [str(place).encode() for place in (ROOT, tmp_path, sys.prefix, "file://")]
        assert [name for name, content in files.items() if any(place in content for place in places)] == []
        tops = {name.partition("/")[0] for name in files}
        assert not tops & {"test", "benchmark", "docs", "sgl-kernel-ext"}
        assert links(described[0]) == []


def package_files(folder: Path) -> set[str]:
    """The files of a package, by their names in a wheel; what Python compiled is none."""
    found = (each for each in folder.rglob("*") if each.is_file() and each.suffix != ".pyc")
    return {str(each.relative_to(folder.parent)) for each in found}


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """The programs of an environment that holds the wheels, and of what they require only what `marconi` does."""
    for path in (".", "sgl-kernel-ext"):
        built(path, tmp_path / "dist")
    run = partial(subprocess.run, capture_output=True, text=True, env={**os.environ, "UV_NO_CONFIG": "1"})
    folder = tmp_path / "environment"
    done = run([uv(), "venv", "--offline", "--python", sys.executable, str(folder)])
    assert done.returncode == 0, done.stderr
    install = [uv(), "pip", "install", "--python", str(folder / "bin" / "python")]
    kernels, project = (
        str(next((tmp_path / "dist").glob(f"{name}-*.whl"))) for name in ("sgl_kernel_ext", "sglang_marconi")
    )
    done = run([*install, "--offline", "--no-deps", kernels])
    assert done.returncode == 0, done.stderr
    for way in (["--offline"], []):
        done = run([*install, *way, "--constraint", str(ROOT / "requirements.lock"), project])
        if done.returncode == 0:
            return folder / "bin"
    pytest.skip(
        f"NEEDS what the wheel requires, in uv's cache or an index: this test did not run: {done.stderr[-300:]}"
    )


@pytest.mark.slow
def test_the_wheels_work_in_an_empty_environment(installed: Path, tmp_path: Path) -> None:
    """Far from any checkout: all files are there, what needs no server runs, what needs an extra names it."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "SGLANG_"))}

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [str(installed / words[0]), *words[1:]]
        return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=300)

    (packages,) = (installed.parent / "lib").glob("python*/site-packages")
    ours = [ROOT / "python" / name for name in ("marconi", "marconi_cpu", "marconi_lab", "marconi_ray")]
    for package in (*ours, ROOT / "sgl-kernel-ext" / "sgl_kernel_ext"):
        assert package_files(packages / package.name) == package_files(package)
    where = run("python", "-c", "import marconi, sgl_kernel_ext; print(marconi.__file__, sgl_kernel_ext.__file__)")
    assert where.stdout.split() == [str(packages / name / "__init__.py") for name in ("marconi", "sgl_kernel_ext")]
    assert run("marconi", "--version").stdout == f"sglang-marconi {marconi.__version__}\n"
    trace = ("generate:chat-short", "--max-sessions", "2", "--model", "nemotron-h-8b", "--memory", "1GB")
    for words, shown in (
        (("replay", *trace, "--policy", "lru,best"), r"^  best +[\d.]+ %"),
        (("plan", *trace), r"^Would it help\? Yes"),
        (("convert", *trace[:3], "-o", "trace.jsonl.gz"), r"^trace\.jsonl\.gz: \d+ requests"),
        (("replay", "trace.jsonl.gz", *trace[3:]), r"^  best +[\d.]+ %"),
        (("view", *trace, "--html", "tree.html"), ""),
        (("replay", "--list-policies"), "belady"),
    ):
        done = run("marconi", *words)
        assert done.returncode == 0, done.stderr
        assert re.search(shown, done.stdout, re.MULTILINE), done.stdout
    assert "<script" in (tmp_path / "tree.html").read_text(encoding="utf-8")
    for words, extra in (
        (("check", "--model-path", "MODEL"), "server"),
        (("demo",), "server"),
        (("tiny-model", "--family", "gdn", "--out", "model"), "server"),
        (("router", "--workers", "http://127.0.0.1:1", "--model", "MODEL"), "router"),
    ):
        done = run("marconi", *words)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
        assert f"pip install '.[{extra}]'" in done.stderr


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
    assert len(links(readme)) > 15
    assert links(long_description(readme, None)) == []
    assert links(long_description(readme, "https://host/us")) == []
    text = "![A picture](docs/a.svg) by [us](docs/b.md#c) on [SGLang](https://host/sglang)"
    assert long_description(text, None) == " by us on [SGLang](https://host/sglang)"
    assert long_description(text, "https://host/us") == (
        "![A picture](https://host/us/raw/HEAD/docs/a.svg) by [us](https://host/us/blob/HEAD/docs/b.md#c) on "
        "[SGLang](https://host/sglang)"
    )
