"""Eviction rules of the field, one a file behind the contract of `policy/base.py`."""
