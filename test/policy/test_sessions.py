"""Sessions that clients close: their own states are evicted first of their name space, and nobody else's."""

import random
from collections.abc import Iterable

import pytest

from marconi.policy import sessions
from marconi.policy.base import Need
from marconi.policy.request import Lease, Request, pack
from marconi.policy.sessions import Sessions
from marconi.tree import Node

from .test_retention import OURS, THEIRS, Served


class Named(Served):
    """Requests come in sessions."""

    def __init__(self) -> None:
        super().__init__()
        self.named = self.sessions = Sessions()

    def serve(self, name: str | None, ids: Iterable[int], number: int | None = None, namespace: int = OURS) -> Node:
        """A request of the session of that name, or of that number, leaves a state after `ids`."""
        path = [*ids]
        request = Request(pack(path), len(path), 0, len(path), self.now_s, namespace=namespace)
        lease = Lease(request, self.match(request))
        self.begin(lease, self.now_s)
        if name is not None:
            number = self.named.opened(name)
        end = self.leave(namespace, path)
        for node in self.named.ended(end, lease.match.checkpoint.depth, number):
            self.demote(node)
        return end

    def close(self, name: str) -> int:
        """The session of that name ends; returns how many states are demoted."""
        return sum(map(self.demote, self.named.closed(name)))


def test_a_closed_session_is_evicted_before_others_of_its_name_space_and_of_no_other() -> None:
    served = Named()
    theirs, other = served.serve("t", [1], namespace=THEIRS), served.serve("a", [2])
    first, second = served.serve("b", [3]), served.serve("b", [3, 4])
    assert served.close("b") == 2
    assert served.victims(4) == [theirs, second, first, other]


def test_an_open_session_and_one_that_nobody_named_are_evicted_as_ever() -> None:
    served = Named()
    nodes = [served.serve(name, [index]) for index, name in enumerate(("a", None, "b"))]
    assert served.close("c") == 0
    assert served.victims(3) == nodes
    assert not served.retention


@pytest.mark.parametrize("sharer", ["b", None])
def test_what_others_run_through_outlasts_the_session_that_left_it(sharer: str | None) -> None:
    served = Named()
    upper, lower = served.serve("a", [1, 2]), served.serve("a", [1, 2, 3])
    tail = served.serve(sharer, [1, 2, 9])
    assert served.close("a") == 1
    assert served.victims(1) == [lower]
    # Even where nothing of theirs is held any longer, the state has served others.
    served.evict_node(tail, Need.STATE, served.now_s)
    assert served.retention is not None
    assert upper not in served.retention.demoted(served.tree.root(OURS))


def test_what_a_session_resumed_from_is_not_its_own() -> None:
    served = Named()
    served.leave(OURS, [1, 2])
    served.serve("a", [1, 2, 3])
    assert served.close("a") == 1


def test_a_state_stays_above_what_others_hold() -> None:
    """The other's path was there before the state above it, and its request never ran through that."""
    served = Named()
    served.serve("b", [1, 2, 3, 4])
    served.serve("a", [1, 2])
    assert served.close("a") == 0
    assert served.close("b") == 1


def test_what_a_request_leaves_after_its_session_was_closed_is_demoted_at_once() -> None:
    served = Named()
    number = served.named.opened("a")
    other = served.serve("b", [1])
    assert served.close("a") == 0
    late = served.serve(None, [2], number)
    assert served.named.opened("a") != number
    again = served.serve("a", [3])
    assert served.victims(3) == [late, other, again]


def test_what_a_running_request_of_another_session_uses_is_not_demoted() -> None:
    served = Named()
    upper, lower = served.serve("a", [1, 2]), served.serve("a", [1, 2, 3])
    request = Request(pack([1, 2, 3, 4]), 4, 0, 4, served.now_s, namespace=OURS)
    lease = Lease(request, served.match(request))
    served.begin(lease, served.now_s)
    served.lock(lower)
    assert served.close("a") == 0, "neither what it uses nor what is above it"
    served.move_lock(lower, end := served.leave(OURS, [1, 2, 3, 4]))
    assert not served.named.ended(end, 3, served.named.opened("b"))
    served.unlock(end)
    assert served.close("b") == 1
    assert served.victims(3) == [end, upper, lower]


def test_what_a_request_of_a_closed_session_uses_is_demoted_at_its_end() -> None:
    served = Named()
    node, number = served.serve("a", [1]), served.named.opened("a")
    served.lock(node)
    assert served.close("a") == 0
    served.move_lock(node, end := served.leave(OURS, [1, 2]))
    assert served.named.ended(end, 1, number) == [end, node]


def test_what_was_evicted_is_nobodys() -> None:
    served = Named()
    served.serve("a", [1])
    served.serve("b", [2])
    assert len(served.victims(1)) == 1
    assert served.close("a") == 0
    again = served.serve(None, [1])
    assert served.close("b") == 1
    assert served.victims(2)[-1] is again


def test_sessions_go_on_over_a_flush() -> None:
    served, flushed = Named(), Named()
    number = flushed.named.opened("a")
    flushed.serve("a", [1])
    served.succeed(flushed, 0.0)
    assert served.named.opened("a") == number
    assert served.close("a") == 0, "nothing is held"


def test_the_session_that_has_been_silent_longest_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MAX_OPEN", 2)
    served = Named()
    for index, name in enumerate(("a", "b", "a", "c")):
        served.serve(name, [index])
    assert [served.close(name) for name in ("b", "a", "c")] == [0, 2, 1]


@pytest.mark.parametrize("seed", range(3))
def test_sessions_and_wishes_know_only_what_is_held(seed: int) -> None:
    rng = random.Random(seed)  # noqa: S311 - a workload, not a secret
    served, locked, num_demoted = Named(), list[Node](), 0
    for _ in range(300):
        held = [node for node in served.tree.nodes() if node.has_state]
        match rng.randrange(6):
            case 0 if held:
                served.evict(rng.choice([Need.KV, Need.STATE]), served.now_s)
            case 1:
                num_demoted += served.close(rng.choice("abcd"))
            case 2 if held:
                served.retain(rng.choice(held), served.now_s + rng.choice([3.0, 50.0]), served.now_s)
            case 3 if held:
                locked.append(rng.choice(held))
                served.lock(locked[-1])
            case 4 if locked:
                served.unlock(locked.pop())
            case _:
                ids = [rng.randrange(2) for _ in range(rng.randint(1, 6))]
                served.serve(rng.choice(["a", "b", "c", "d", None]), ids, namespace=rng.randrange(2))
        served.check_invariants()
        if rng.random() < 0.01:
            flushed, served, locked = served, Named(), []
            served.succeed(flushed, 0.0)
            assert flushed.sessions is not None
            served.named = flushed.sessions
            served.check_invariants()
    assert num_demoted
