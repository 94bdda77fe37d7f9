"""`python benchmark/figures`: the package that this folder is."""

import sys
from importlib import import_module
from pathlib import Path

if __name__ == "__main__":
    # As every other benchmark has it: the folder above, in place of this one.
    sys.path[0] = str(Path(__file__).parents[1])
    sys.exit(import_module("figures.command").main())
