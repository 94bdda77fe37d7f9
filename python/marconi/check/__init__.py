"""`marconi check`: whether a command line of SGLang's would be served with this cache, without a device or a server.

`question` refuses what is wrong before SGLang is imported, by the flags that its source has `declared`. After that,
`line` reads the flags by SGLang's own parser, `machine` is the one that would serve, of which SGLang meets a
`stand_in`, `answer` finds every reason against it, in the lists that a server asks (`engine/launch/support.py`) and
from SGLang itself, `pools` counts what KV and states would take, and `report` shows it. What would be loaded, and its
weights, `engine/launch` knows.
"""
