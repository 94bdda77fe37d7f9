"""The policy that `docs/add-a-policy.md` adds, once on offer, is served by the real cache, as the replay of it says."""

from types import MappingProxyType
from typing import Any

import pytest

from marconi.engine.launch.policies import PolicyChoice
from marconi.policy import catalog
from marconi.replay.catalog import ReplayPolicy
from rig.pools import Strategy
from structure.pages import blocks, page

from .host_replays import Setting, agents, on_marconi, replayed, serve

pytestmark = pytest.mark.usefixtures("sglang_configuration")


def test_the_policy_of_the_page_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    setting, requests = Setting(1, Strategy.EXTRA_BUFFER, 4000, 9), agents(seed=3)
    choice = PolicyChoice("largest")
    rule, entry, *_ = (block.text for block in blocks(page("docs/add-a-policy.md")) if block.kind == "python")
    defined: dict[str, Any] = {"__name__": "largest"}
    exec(rule, defined)  # noqa: S102 - the page's own code
    added = eval(entry, {"ReplayPolicy": ReplayPolicy, **defined})  # noqa: S307
    with pytest.raises(ValueError, match=r"^a server's policy must be one of lru, marconi, tail, best, got 'largest'$"):
        replayed(setting, choice)
    monkeypatch.setattr(catalog, "SERVED", MappingProxyType({**catalog.SERVED, added.name: added}))

    hybrid = on_marconi(setting, choice)
    hits = serve(hybrid, requests)
    assert sum(hybrid.cache.status().evictions.values()) > 0
    twin = replayed(setting, choice)
    assert hits == [twin.serve(request) for request in requests]
    other = replayed(setting, PolicyChoice("lru"))
    assert hits != [other.serve(request) for request in requests], "what goes first does not matter here"
