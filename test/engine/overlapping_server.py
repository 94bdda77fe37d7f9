"""SGLang's server that schedules a step while the one before it runs, with speculative decoding on a CPU as well.

SGLang turns that off there. A step has ended here when its call returns, so the next one has moved all states on before
the result of one is looked at: the order of a device's work, at its latest. Started in place of
`-m sglang.launch_server`; the spawned scheduler imports this file too.
"""

import runpy

from sglang.srt.arg_groups import speculative_hook
from sglang.srt.managers import overlap_utils
from torch import Tensor


def gather_spec_extras(indices: Tensor, *buffers: Tensor | None) -> tuple[Tensor | None, ...]:
    """Rows of each buffer, by torch."""
    return tuple(None if buffer is None else buffer[indices.long()] for buffer in buffers)


speculative_hook._disable_overlap_schedule_for_cpu = lambda _: None
overlap_utils.gather_spec_extras = gather_spec_extras

if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=False)
