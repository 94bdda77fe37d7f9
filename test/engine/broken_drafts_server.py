"""SGLang's server with a fault in the state that a request leaves which ends while drafts are accepted.

The file that `MARCONI_TEST_FAULT_FILE` names says which, at any time: `too-far`, that of the draft behind the right
one, or `rejected`, that of a step's last draft; where it said `late` at the start, the working slot, in which the next
step has begun. With `OVERLAP` scheduling overlaps as in `overlapping_server.py`. The negative control of speculative
decoding; started in place of `-m sglang.launch_server`, and imported by the spawned scheduler as well.
"""

import os
import runpy
from pathlib import Path
from typing import Any

import breaking
import torch

from marconi.engine.cache import speculation

SCATTER, SOURCE_OF = speculation._scatter, speculation.EndStateSource.of


def fault() -> str:
    return Path(os.environ["MARCONI_TEST_FAULT_FILE"]).read_text(encoding="utf-8")


def scatter(pool: Any, slots: torch.Tensor, nodes: torch.Tensor, rows: torch.Tensor) -> None:
    last = pool.get_speculative_mamba2_params_all_layers().intermediate_ssm.shape[2] - 1
    wrong = (nodes + 1).clamp(max=last) if fault() == "too-far" else torch.full_like(nodes, last)
    wrong = torch.where(nodes >= 0, wrong, nodes)
    breaking.tell(int((wrong != nodes).sum()))
    SCATTER(pool, slots, wrong, rows)


def working(cls: Any, *given: Any) -> Any:
    breaking.tell(int(SOURCE_OF(*given) is not cls.WORKING))
    return cls.WORKING


if fault() == "late":
    speculation.EndStateSource.of = classmethod(working)  # type: ignore[method-assign, assignment]
else:
    speculation._scatter = scatter
if os.environ.get("OVERLAP"):
    runpy.run_path(str(Path(__file__).with_name("overlapping_server.py")))

if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=False)
