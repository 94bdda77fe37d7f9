"""`marconi demo`: ordinary traffic with scarce memory, sent to stock SGLang and to this project, side by side.

`traffic` is what is asked, `program` in which order, `client`, `endpoint` and `stream` how, `size` how long and in how
much memory; `comparison` is what is said about it, `run` the order of events.
`tiny_model` writes the small models (`marconi tiny-model`).
"""
