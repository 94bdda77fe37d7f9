import sys

from sglang_platform import choose

# In pytest's process alone: the programs of this folder are told their platform, or, for a card, none.
if "conftest" in sys.modules:
    choose()
