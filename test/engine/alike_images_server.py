"""SGLang's server with a fault: all images have one key, whatever they show, while a file exists that the test names.

A negative control of the tests of images, with the fault of `broken_state_server.py` beside it. Started in place of
`-m sglang.launch_server`; the spawned scheduler imports this file too.
"""

import os
import runpy
from pathlib import Path
from typing import Any

import breaking
from sglang.srt.managers.schedule_batch import MultimodalDataItem

ALIKE = Path(os.environ["MARCONI_TEST_ALIKE_FILE"])
set_pad_value = MultimodalDataItem.set_pad_value


def set_one_value(item: Any) -> None:
    """As SGLang does, or from a digest that is the same for all."""
    set_pad_value(item)
    if ALIKE.exists():
        breaking.tell(1)
        item.set_identity(bytes(32))


MultimodalDataItem.set_pad_value = set_one_value
runpy.run_path(str(Path(__file__).with_name("broken_state_server.py")))

if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=False)
