"""SGLang's server that gives requests up every 25 steps, as `SGLANG_TEST_RETRACT` has it, read when SGLang is imported.

Started in place of `-m sglang.launch_server`; the spawned scheduler imports this file too, and so retracts.
"""

import runpy

from sglang.srt.managers import scheduler

scheduler.TEST_RETRACT = True
scheduler.TEST_RETRACT_INTERVAL = 25

if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=False)
