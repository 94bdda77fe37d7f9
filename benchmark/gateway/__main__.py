"""`python benchmark/gateway`: makes the folder a package of a name of its own; another is called `gateway` too."""

import importlib
import importlib.util
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
NAME = "benchmark_gateway"


def load() -> None:
    """Import the folder as `NAME`."""
    spec = importlib.util.spec_from_file_location(
        NAME, FOLDER / "__init__.py", submodule_search_locations=[str(FOLDER)]
    )
    assert spec is not None
    assert spec.loader is not None
    sys.modules[NAME] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


if __name__ == "__main__":
    load()
    sys.exit(importlib.import_module(f"{NAME}.command").main())
