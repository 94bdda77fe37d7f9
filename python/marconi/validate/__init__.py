"""A replay held against a running server: the same requests, and the cached tokens of both, request by request.

    command      the subcommand `marconi validate`
    prompts      a trace's requests in token ids that the model knows
    server       what the server says of itself, and its answers
    prediction   the replay of what the server was sent and answered, on pools of the same size
    comparison   where both part, as a table, a sentence and rows

The replay knows nothing of what the server had cached: prompts as they were sent, the answers, and when, by
the clock of the server's cache.
"""
