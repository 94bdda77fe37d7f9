"""`kv_hints` in our cache on SGLang's pools and requests: read, obeyed, answered, and no loss to other tenants."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang", reason="the server extra is not installed: pip install '.[server]'")

from marconi.engine.cache.scheduler import notes_of
from marconi.engine.http.details import on_get_cached_tokens_details
from marconi.engine.http.hints import KV_HINTS, around_wait_one_response
from marconi.engine.launch.policies import PolicyChoice
from marconi.policy.request import Request
from marconi.tree import Node
from rig.clock import TraceClock
from rig.driver import HostReplay
from rig.pools import COSTS, Strategy, marconi

from .host_replays import Setting, agents

pytestmark = pytest.mark.usefixtures("sglang_configuration")

GREEDY, NUM_TENANTS = 1, 3
SETTING = Setting(1, Strategy.EXTRA_BUFFER, 16_000, 40)
MAX_LOSS = 0.02
"""Of the others' hit rate."""


def envelope(*actions: tuple[str, dict[str, Any]]) -> Any:
    from sglang.srt.managers.kv_hints import decode_kv_hints_envelope

    return decode_kv_hints_envelope(
        {
            "protocol_version": "0.1",
            "message_id": "m",
            "actions": [
                {"action_id": str(index), "action_type": name, "action_version": "1.0", "payload": payload}
                for index, (name, payload) in enumerate(actions)
            ],
        }
    )


class Hinting(HostReplay):
    """One tenant's requests come with hints."""

    def __init__(self, choice: PolicyChoice, hints: Any) -> None:
        clock = TraceClock()
        super().__init__(marconi(SETTING.host, choice, COSTS, clock, None), SETTING.host, 1, clock)
        self.last: Any = None
        self._hints = hints

    def _req(self, request: Request) -> Any:
        self.last = super()._req(request)
        if request.namespace == GREEDY:
            self.last.kv_hints = self._hints
        return self.last


def tenants() -> list[Request]:
    """Sessions of three tenants that know nothing of each other."""
    requests = [
        replace(request, namespace=tenant)
        for tenant in range(1, NUM_TENANTS + 1)
        for request in agents(seed=tenant, num_sessions=40)
    ]
    return sorted(requests, key=lambda request: request.arrival_s)


def rate_of_others(replay: HostReplay, requests: Sequence[Request]) -> float:
    num_hit_tokens = num_tokens = 0
    for request in requests:
        hits = replay.serve(request)
        if hits is not None and request.namespace != GREEDY:
            num_hit_tokens += hits
            num_tokens += request.num_prompt_tokens
    replay.check_invariants()
    return num_hit_tokens / num_tokens


@pytest.mark.parametrize("eviction", ["best", "lru"])
def test_a_tenant_that_retains_all_it_leaves_costs_the_others_nothing(eviction: str) -> None:
    requests = tenants()
    without = rate_of_others(Hinting(PolicyChoice(eviction), None), requests)
    greedy = Hinting(PolicyChoice(eviction), envelope(("retain", {"seconds": 1e9}), ("pin", {})))
    beside = rate_of_others(greedy, requests)
    assert greedy.cache.tree_core.hybrid.retention
    assert sum(greedy.cache.tree_core.hybrid.counters.num_evictions.values()) > 100
    assert beside > without - MAX_LOSS


def test_a_tenant_whose_wishes_others_pay_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """If all tenants were one, the states of the others would be evicted in place of those that one retains."""
    everybody, requests = Node(b"", None, 0, 0), tenants()
    without = rate_of_others(Hinting(PolicyChoice("best"), None), requests)
    monkeypatch.setattr("marconi.policy.hybrid_cache.root_of", lambda _: everybody)
    greedy = Hinting(PolicyChoice("best"), envelope(("retain", {})))
    assert rate_of_others(greedy, requests) < without - MAX_LOSS


def test_an_answer_says_what_became_of_each_action() -> None:
    replay = Hinting(PolicyChoice("best"), envelope(("retain", {}), ("prefetch", {}), ("kv.fetch", {})))
    request = next(request for request in tenants() if request.namespace == GREEDY)
    replay.serve(request)
    told = on_get_cached_tokens_details(None, None, replay.last)[KV_HINTS]
    assert [each["result"] for each in json.loads(told)] == ["accepted", "rejected", "rejected"]

    async def wait(*_: Any) -> AsyncIterator[dict[str, Any]]:
        yield {"meta_info": {"prompt_tokens": 9, "cached_tokens_details": {"device": 0, "host": 0, KV_HINTS: told}}}

    async def answers() -> list[Any]:
        manager: Any = SimpleNamespace(disaggregation_mode=SimpleNamespace(value="null"))
        obj = SimpleNamespace(sampling_params={}, kv_hints=replay.last.kv_hints)
        return [answer async for answer in around_wait_one_response(wait, manager, obj)]

    (answer,) = asyncio.run(answers())
    meta = answer["meta_info"]
    assert [each["action_id"] for each in meta[KV_HINTS]] == ["0", "1", "2"]
    assert meta["cached_tokens_details"] == {"device": 0, "host": 0}


def test_a_request_that_leaves_nothing_leaves_no_name_space() -> None:
    clock, host = TraceClock(), replace(SETTING, page_tokens=16).host
    replay = HostReplay(marconi(host, PolicyChoice("best"), COSTS, clock), host, 1, clock)
    replay.serve(Request(b"\1\0\0\0" * 5, 3, 2, 5, 1.0, namespace=7))
    assert not replay.cache.tree_core.hybrid.tree.roots


def test_a_request_that_is_served_uncached_is_told() -> None:
    replay = Hinting(PolicyChoice("best"), envelope(("retain", {})))
    replay.clock.now_s = 1.0
    req = replay._req(Request(b"\1\0\0\0" * 40, 30, 10, 40, 1.0, namespace=GREEDY))
    req.kv_hints = envelope(("retain", {}))
    replay.cache._obey(req, None)
    answers = notes_of(req).kv_hints
    assert answers is not None
    (answer,) = answers
    assert answer["reason"] == "the request is served without the cache"
