"""A scheduler's queue as the cache follows it: who is in the index, and who is planned before its prefill begins."""

import random
from array import array
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from marconi.engine.cache.scheduler import WaitingRequests
from marconi.engine.launch.policies import PolicyChoice
from marconi.engine.reports.moments import Moments
from marconi.lifecycle import queue as waiting
from marconi.policy.admission.plan import Judicious
from marconi.policy.eviction.lru import SeparateLru
from marconi.policy.eviction.order import Order
from marconi.policy.hybrid_cache import HybridCache
from marconi.tree import RadixTree
from rig.clock import TraceClock
from rig.pools import COSTS, HostPools, marconi
from rig.queued import GROUP, NUM_TAKEN, SHARED_TOKENS, Queued

pytestmark = pytest.mark.usefixtures("sglang_configuration")
NUM_WAITING = 3 * NUM_TAKEN


def queued(num_waiting: int, num_shared_tokens: int) -> Queued:
    host: HostPools = Queued.host(NUM_WAITING + 8 * NUM_TAKEN)
    cache = marconi(host, PolicyChoice("best"), COSTS, TraceClock())
    return Queued(cache, host, num_waiting, num_shared_tokens)


def counted(owner: Any, name: str, counts: list[Any], of: Callable[[Any], Any]) -> None:
    """Note every call of a method of `owner`."""
    method = getattr(owner, name)

    def call(first: Any, *rest: Any) -> Any:
        counts.append(of(first))
        return method(first, *rest)

    setattr(owner, name, call)


def plans_of_one_pass(server: Queued) -> list[bytes]:
    plans: list[bytes] = []
    counted(server.cache.tree_core.hybrid, "plan", plans, lambda lease: lease.request.path)
    assert server.take()
    return plans


def test_a_request_that_shares_with_nobody_who_waits_is_planned_once() -> None:
    plans = plans_of_one_pass(queued(NUM_WAITING, 0))
    assert len(plans) == len(set(plans)) == NUM_TAKEN


def test_the_first_of_a_group_is_planned_when_it_is_taken_so_that_the_others_wait_for_it() -> None:
    server = queued(NUM_WAITING, SHARED_TOKENS)
    plans = plans_of_one_pass(server)
    assert len(set(plans)) == NUM_WAITING // GROUP, "one of each group is taken"
    assert len(plans) == 2 * NUM_WAITING // GROUP, "once where it is taken, and once where the prefill begins"
    server.take()
    assert server.cache.tree_core.hybrid.counters.num_hit_tokens == SHARED_TOKENS * NUM_TAKEN


def test_a_queue_keeps_its_length_and_a_pass_takes_eight_that_share_nothing() -> None:
    server = queued(NUM_WAITING, 0)
    assert [server.take() for _ in range(4)] == [NUM_TAKEN] * 4
    assert len(server.waiting) == NUM_WAITING
    server.cache.sanity_check()


def core() -> Any:
    from marconi.engine.cache.tree_core import IDS_PER_TOKEN, path_of
    from marconi.policy.request import Request

    def request_of(ids: "array[int]", _extra_key: None, _cache_salt: None) -> Request:
        return Request(path_of(ids, len(ids)), len(ids), 0, len(ids), 0.0)

    hybrid = HybridCache(RadixTree(ids_per_unit=IDS_PER_TOKEN), Judicious(), Order(SeparateLru()))
    return SimpleNamespace(request_of=request_of, hybrid=hybrid)


class Waits:
    """What the index reads of a request."""

    extra_key = cache_salt = None
    sampling_params = SimpleNamespace(custom_params=None)

    def __init__(self, ids: list[int], answer: list[int]) -> None:
        self.origin_input_ids, self.output_ids = array("q", ids), array("q", answer)


@pytest.mark.parametrize("max_tokens", [10**6, 60])
def test_whatever_comes_and_goes_in_whichever_order_the_index_has_the_first_that_fit(
    max_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who is in the index stays there; who is left out is taken in when there is room."""
    made = waiting.WaitingPrompts
    monkeypatch.setattr(waiting, "WaitingPrompts", lambda *sizes: made(*sizes, max_tokens=max_tokens))
    rng = random.Random(3)  # noqa: S311 - a workload, not a secret
    requests = WaitingRequests(core(), Moments(lambda: 0.0))
    queue: list[Any] = []
    held: dict[Any, int] = {}
    num_left_out = 0
    for step in range(400):
        queue = [req for req in queue if rng.random() < 0.7]
        for number in range(rng.randrange(5)):
            answer = [1] * rng.randrange(3)
            queue.append(Waits([10 * step + number, *[0] * rng.randrange(20)], answer))
        if rng.random() < 0.3:
            rng.shuffle(queue)
        requests.note(queue)
        held = {req: size for req, size in held.items() if req in queue}
        if held or len(queue) > 1:
            for req in queue:
                if sum(held.values()) < max_tokens and req not in held:
                    held[req] = len(req.origin_input_ids) + len(req.output_ids)
        assert requests._prompts.keys() == held.keys()
        requests.check_invariants()
        assert requests._prompts.keys() <= {*queue}
        num_left_out += len(queue) > len(held) > 1
    assert (num_left_out > 10) is (max_tokens == 60)
