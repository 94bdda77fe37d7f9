"""The benchmarks as modules; they are scripts in a folder of their own, one of them a folder itself."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).parents[2] / "benchmark"


def load(name: str) -> ModuleType:
    """The script `benchmark/NAME.py`, or `benchmark/NAME` with what stands in it, imported anew."""
    folder = FOLDER / name
    path, inside = (folder / "__init__.py", [str(folder)]) if folder.is_dir() else (FOLDER / f"{name}.py", None)
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", path, submodule_search_locations=inside)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
