"""Everything that touches SGLang: plugin, flags, cache backend, CPU platform, demo.

Only this package imports `sglang`. It holds no policy decision; every change of upstream stands in
`upstream.py` and, for readers, in `UPSTREAM.md`.
"""
