"""SGLang's server of one role, prefill or decode, whose memory goes to the other by `loopback_transfer.py`.

Started in place of `-m sglang.launch_server`, and imported by the spawned scheduler as well.
"""

import runpy
import sys
from pathlib import Path
from typing import Any

import torch
from sglang.srt.distributed.device_communicators import mooncake_transfer_engine

sys.path.insert(0, str(Path(__file__).parent))
import loopback_transfer


class Event:
    """One of a device that has done everything when a call returns; SGLang asks CUDA for it, whatever the device."""

    def record(self, _stream: Any = None) -> None:
        """It has come."""

    def synchronize(self) -> None:
        """It has come."""


if not torch.cuda.is_available():
    torch.cuda.Event = Event  # type: ignore[assignment, misc]
sys.modules["sglang.srt.disaggregation.mooncake"] = loopback_transfer
# No engine of Mooncake's is started where there is one.
mooncake_transfer_engine._mooncake_transfer_engine = object()

if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=False)
