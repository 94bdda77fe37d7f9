"""The life of a request between the policies and whoever runs it: a server's cache and the replay alike.

    pools      what memory there is, and whether a slot may be taken                         (`pools.py`)
    queue      requests that wait                                                               (`queue.py`)
    running    a running request, and which of its planned states get a slot                 (`running.py`)

The server adds SGLang's allocators and tensors, the replay counts.
"""
