"""Ask stock SGLang what a server of this project's answered wrongly, with prefill graphs and without.

`python -m engine.stock_answers`, on a GPU, reads the prompts that `test_half_precision.py` left in the folder named by
`MARCONI_RED_ANSWERS` and judges stock's answers by the same model. Exit status 0 where there was something to ask.
"""

import json
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from marconi_cpu import tiny_model
from marconi_cpu.demo.server_process import ServerProcess

from .client import generate
from .exact_model import ExactModel
from .scenarios import Exchange
from .test_half_precision import MAX_MEDIAN_ERROR, RED_ANSWERS, WIDE, write_wide

WITHOUT_GRAPHS = ("--cuda-graph-backend-prefill", "disabled")


def verdict(with_graphs: float, without_graphs: float) -> str:
    """Whose the error is, by stock's median errors."""
    if without_graphs > MAX_MEDIAN_ERROR:
        return "stock differs from the model too, without prefill graphs: not this project's alone"
    if with_graphs > MAX_MEDIAN_ERROR:
        return "stock differs too, with prefill graphs alone: sgl-project/sglang#37606"
    return "stock agrees with the model: the error is this project's"


def write_model(document: Mapping[str, Any], path: Path) -> None:
    """The model that `document` was asked of."""
    if document["model"] == WIDE:
        write_wide(path)
    else:
        tiny_model.write(tiny_model.Family(document["model"]), path)


def median_error(document: Mapping[str, Any], model: Path, more: tuple[str, ...], log: Path) -> float:
    """Of stock's answers to the same prompts in the same order."""
    exact = ExactModel(model)
    with ServerProcess(model, [*document["args"], *more], log_path=log) as server:
        prompts = [tuple(prompt) for prompt in document["prompts"]]
        return median(exact.error(Exchange(prompt, generate(server.url, prompt))) for prompt in prompts)


def main() -> int:
    """Ask for the first file that was left: two servers."""
    folder = Path(os.environ[RED_ANSWERS])
    left = sorted(folder.glob("*.red.json"))
    if not left:
        print(f"no *.red.json in {folder}: no answer was wrong")
        return 1
    document = json.loads(left[0].read_text())
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "model"
        write_model(document, model)
        errors = [
            median_error(document, model, more, folder / f"stock-{name}.log")
            for name, more in (("graphs", ()), ("no-graphs", WITHOUT_GRAPHS))
        ]
    anew, reused = document["median_errors"]
    print(f"{document['case']}: median errors of this project's {anew:.3f} anew and {reused:.3f} reused,")
    print(f"of stock {errors[0]:.3f} with prefill graphs and {errors[1]:.3f} without")
    print(verdict(*errors))
    for each in left[1:]:
        print(f"not asked: {each.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
