"""Which positions of a request get a state, one rule a file behind the contract of `base.py`."""
