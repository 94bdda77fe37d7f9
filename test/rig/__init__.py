"""A server's caches without a model: SGLang's own pools and cache classes on the host's memory, driven by a trace.

`pools.py` builds a cache, stock or ours, as a scheduler would; `driver.py` serves the requests of a trace from it one
after the other, through the functions that SGLang's scheduler calls.
`soak.py` keeps several random requests in flight (`workload.py`, `scheduler.py`) and accounts for all memory
(`balance.py`) and for what every pass reads (`forward.py`, `contents.py`).
What is left out is the forward pass: KV and states are indices, and what they hold is nowhere computed.
"""

import os

from marconi.engine.cpu_platform import PLATFORM

# Before SGLang is imported: its `extra_buffer` wants a platform that keeps states, which on a CPU is ours alone.
os.environ.setdefault("SGLANG_PLATFORM", PLATFORM)
