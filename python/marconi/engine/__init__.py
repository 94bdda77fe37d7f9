"""The cache in a server of SGLang, in rooms: a folder is one, and the files beside this one belong to all of them.

    launch         flags and refusals, and how memory and requests are divided             before a process serves
    plugin         hooks, the factory of the cache, the ledger of changes                  in every process
    cache          the cache that a scheduler sees; its queue, ranks and ends of requests
    joint  int8    one pool, and checkpoints in int8
    host           a host tier
    prefill        states inside a prefill
    events         the tree's log, published for routers
    http  guards   routes, requests and answers; what is refused for the scheduler's sake
    reports        status, metrics, explanations, the record, the page

It holds no policy decision; every change of upstream stands in `plugin/upstream.toml` and, for readers, in
`UPSTREAM.md`. Only `marconi.check` and `marconi_cpu` import `sglang` besides, and this package imports neither.
"""
