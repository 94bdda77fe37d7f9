"""`marconi check`: whether a command line of SGLang's would be served with this cache, without a device or a server.

`line` reads the flags by SGLang's own parser, `model` knows what would be loaded from its configuration alone,
`machine` is the one that would serve, `answer` finds every reason against it, in the lists that a server asks
(`engine/support.py`) and from SGLang itself, `weights` and `pools` count what weights, KV and states would take, and
`report` shows it.
"""
