"""`marconi demo`: one piece of work, done against stock SGLang and against this project, side by side.

`program` is the work, `endpoint` how it is timed, `comparison` what is said about it, `run` the order of events.
"""
