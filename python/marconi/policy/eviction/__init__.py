"""Eviction: one rule a file behind the contract of `base.py`."""
