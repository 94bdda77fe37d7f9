"""What goes first, one rule a file behind the contract of `base.py`."""
