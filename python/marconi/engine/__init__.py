"""The cache in a server of SGLang: plugin, flags, cache backend, `marconi check`.

It holds no policy decision; every change of upstream stands in `upstream.toml` and, for readers, in `UPSTREAM.md`. Only
`marconi_cpu` and `marconi_cpu.demo` import `sglang` besides, and this package imports neither.
"""
