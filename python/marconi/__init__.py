"""Prefix caching for hybrid language models, as an extension of SGLang."""

__version__ = "0.1.0"
