"""`python benchmark/kernels`: load the folder as a package whose name no other package has."""

import importlib
import importlib.util
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
NAME = "benchmark_kernels"


def load() -> None:
    """Import the folder as `NAME`, and find `sgl_kernel_ext` in the checkout where it is not installed."""
    spec = importlib.util.spec_from_file_location(
        NAME, FOLDER / "__init__.py", submodule_search_locations=[str(FOLDER)]
    )
    assert spec is not None
    assert spec.loader is not None
    sys.modules[NAME] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[NAME])
    if importlib.util.find_spec("sgl_kernel_ext") is None:
        sys.path.append(str(FOLDER.parents[1] / "sgl-kernel-ext"))


if __name__ == "__main__":
    # Python looks here first for what a program imports; packages are called as files here are (`cuda`).
    sys.path[:] = [path for path in sys.path if Path(path).resolve() != FOLDER.resolve()]
    load()
    sys.exit(importlib.import_module(f"{NAME}.command").main())
