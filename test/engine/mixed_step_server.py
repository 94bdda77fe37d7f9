"""SGLang's server with a line in the log for each prefill that decoding requests ride with.

Started in place of `-m sglang.launch_server`; the spawned scheduler imports this file too, and so gets the hook. With
`SHIFTED` in the environment the states that such a prefill keeps are written a token too early, which is the fault of a
negative control.
"""

import os
import runpy
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from marconi.engine.cache.scheduler import PLAN

SHIFTED = "TEST_SHIFTED_PLAN"
LINE = "a prefill keeps {} states and decodes {} requests"


def note(_result: None, batch: Any, running_batch: Any) -> None:
    checkpoints = getattr(batch, PLAN, None) or ()
    print(LINE.format(len(checkpoints), running_batch.batch_size()), flush=True)
    if SHIFTED in os.environ:
        # In the servers' folder, which the tests that import this file do not import from.
        import breaking

        early = [each for each in checkpoints if each.depth - 1 > batch.prefix_lens[each.row]]
        for each in early:
            each.depth -= 1
        breaking.tell(len(early))


HookRegistry.register("sglang.srt.managers.schedule_batch.ScheduleBatch.mix_with_running", note, HookType.AFTER)

if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=False)
