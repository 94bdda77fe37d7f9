"""SGLang's server of the matrix: hooks raise where a file says so, and states break while another file exists.

It makes the changes of `faulty_server.py`, those of `broken_state_server.py` where a file to look for is named, and
those that `MARCONI_TEST_BESIDE` names. Of ranks with a cache each, prompts that begin alike go to one, whatever load
the ranks have told by then. Started in place of `-m sglang.launch_server`; the spawned scheduler imports this file too.
"""

import os
import runpy
from pathlib import Path
from typing import Any

import breaking
from sglang.srt.managers.data_parallel_controller import DataParallelController

route = DataParallelController.maybe_external_dp_rank_routing


def route_by_prompt(controller: Any, req: Any) -> Any:
    """To the rank that its first token names, unless it names one itself."""
    if req.routed_dp_rank is None and req.input_ids:
        req.routed_dp_rank = req.input_ids[0] % len(controller.workers)
    return route(controller, req)


DataParallelController.maybe_external_dp_rank_routing = route_by_prompt
BROKEN = ["broken_state_server.py"] if breaking.SWITCH in os.environ else []
for name in (*BROKEN, *os.environ.get("MARCONI_TEST_BESIDE", "").split(), "faulty_server.py"):
    runpy.run_path(str(Path(__file__).with_name(name)))

if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=False)
