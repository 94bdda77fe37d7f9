"""`marconi demo`: ordinary traffic in short memory, sent to stock SGLang and to this project, side by side.

`traffic` is what is asked, `program` in which order, `client` and `endpoint` how, `size` how long and in how much
memory; `template` is the small models' chat template, `comparison` what is said about it, `run` the order of events.
`tiny_model` writes the small models (`marconi tiny-model`).
"""
