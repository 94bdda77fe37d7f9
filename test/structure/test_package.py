"""What is built names releases: both distributions have one version, and no requirement is a place on a machine."""

import re
import tomllib
from pathlib import Path

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
