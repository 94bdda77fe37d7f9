"""A fault for negative controls: a tree that does not say what it changed."""

from typing import Any

import pytest

from marconi.tree import RadixTree


def keep_to_itself(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """Let `method` of every tree do its work, and note no node."""
    original = getattr(RadixTree, method)

    def unnoted(tree: RadixTree, *args: Any) -> Any:
        num_changed = len(tree._changed)
        found = original(tree, *args)
        del tree._changed[num_changed:]
        return found

    monkeypatch.setattr(RadixTree, method, unnoted)
