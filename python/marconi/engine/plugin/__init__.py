"""The plugin: what a process of SGLang's takes on, from its start to its cache."""
