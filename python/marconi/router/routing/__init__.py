"""Where a request goes: one rule a file, behind the contract of `base.py`."""
