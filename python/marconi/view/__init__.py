"""The picture of a tree: snapshots of it as columns (`snapshot.py`), frames of a replay, and a page that draws them.

`snapshot.py` and `frame.py` know nothing of a replay, so that a server can take frames, too.
"""
