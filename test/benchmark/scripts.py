"""The benchmarks as modules; they are scripts in a folder of their own, not a package."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).parents[2] / "benchmark"


def load(name: str) -> ModuleType:
    """The script `benchmark/NAME.py`, imported anew."""
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
