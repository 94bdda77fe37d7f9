"""SGLang's server of the matrix: hooks raise where a file says so, and states break while another file exists.

It makes the changes of `faulty_server.py` and `broken_state_server.py`, and of those that `MARCONI_TEST_BESIDE` names.
Started in place of `-m sglang.launch_server`; the spawned scheduler imports this file too.
"""

import os
import runpy
from pathlib import Path

for name in ("broken_state_server.py", *os.environ.get("MARCONI_TEST_BESIDE", "").split()):
    runpy.run_path(str(Path(__file__).with_name(name)))
runpy.run_path(str(Path(__file__).with_name("faulty_server.py")))

if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=False)
