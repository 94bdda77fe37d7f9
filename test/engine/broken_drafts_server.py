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

from marconi.engine.cache import scheduler, speculation

LEAVE, COPY, SOURCE_OF = speculation._leave, scheduler.copy_state, speculation.EndStateSource.of


def fault() -> str:
    return Path(os.environ["MARCONI_TEST_FAULT_FILE"]).read_text(encoding="utf-8")


def wrong(nodes: torch.Tensor, num_nodes: int) -> torch.Tensor:
    last = num_nodes - 1
    found = (nodes + 1).clamp(max=last) if fault() == "too-far" else torch.full_like(nodes, last)
    found = torch.where(nodes >= 0, found, nodes)
    breaking.tell(int((found != nodes).sum()))
    return found


def leave(step: speculation.VerifyStep, *given: Any) -> torch.Tensor:
    return wrong(LEAVE(step, *given), step.num_nodes)


def copy(pool: Any, row: int, node: int, slot: torch.Tensor) -> None:
    num_nodes = pool.get_speculative_mamba2_params_all_layers().intermediate_ssm.shape[2]
    COPY(pool, row, int(wrong(torch.tensor(node), num_nodes)), slot)


def working(cls: Any, *given: Any) -> Any:
    breaking.tell(int(SOURCE_OF(*given) is not cls.WORKING))
    return cls.WORKING


if fault() == "late":
    speculation.EndStateSource.of = classmethod(working)  # type: ignore[method-assign, assignment]
else:
    speculation._leave, scheduler.copy_state = leave, copy
if os.environ.get("OVERLAP"):
    runpy.run_path(str(Path(__file__).with_name("overlapping_server.py")))

if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=False)
