"""Which positions get a state elsewhere, one rule a file behind the contract of `policy/admission/base.py`."""
