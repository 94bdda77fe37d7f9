"""What waiting prompts share, found in the index as by comparing all of them; and who waits for whom."""

import random

from hypothesis import strategies as st

from marconi.policy.request import Request, pack
from marconi.policy.waiting import MIN_SAVED_TOKENS, WaitingPrompts
from marconi.tree import RadixTree

from .random_runs import Extent, extents, random_ids, sources


def request(ids: list[int], namespace: int = 0) -> Request:
    return Request(pack(ids), len(ids), 0, len(ids), 0.0, namespace=namespace)


def num_common(left: Request, right: Request) -> int:
    ids = zip(left.path[::4], right.path[::4], strict=False)
    return next((index for index, (a, b) in enumerate(ids) if a != b), min(len(left.path), len(right.path)) // 4)


def shared_by_hand(key: int, waiting: dict[int, Request], num_cached_tokens: int, unit: int) -> list[int]:
    """Every depth at which another one that waits leaves the prompt, or ends on it."""
    mine = waiting[key]
    depths = {
        num_common(mine, other) // unit * unit
        for name, other in waiting.items()
        if name != key and other.namespace == mine.namespace
    }
    return sorted((depth for depth in depths if depth > num_cached_tokens), reverse=True)


def run(unit: int, rng: random.Random, num_steps: int) -> int:
    index, waiting = WaitingPrompts(unit, unit), {}
    for step in range(num_steps):
        if waiting and rng.randrange(20) < 9:
            key = rng.choice(list(waiting))
            index.remove(key)
            del waiting[key]
        else:
            prompt = random_ids(rng, unit * rng.randint(0, 8) + rng.randrange(unit), 2)
            waiting[step] = request(prompt, rng.randrange(2))
            index.add(step, waiting[step])
        index.check_invariants()
        assert index.keys() == waiting.keys()
        for key in rng.sample(list(waiting), min(3, len(waiting))):
            for num_cached in (0, 2, 4):
                by_hand = shared_by_hand(key, waiting, num_cached, unit)
                assert index.shared(key, num_cached) == by_hand
                assert index.is_shared(key, num_cached) is bool(by_hand)
    return num_steps


@extents
def test_what_is_shared_is_what_comparing_all_finds(extent: Extent) -> None:
    assert extent.draw(run, (1, 4), rng=sources, num_steps=st.integers(30, 120)) > 300


def test_an_index_that_forgets_a_node_is_caught() -> None:
    """The negative control of the comparison above."""
    original = WaitingPrompts._depths_above
    WaitingPrompts._depths_above = lambda self, node, num: list(original(self, node, num))[1:]  # type: ignore[method-assign]
    try:
        run(1, random.Random(1), 300)  # noqa: S311 - a workload, not a secret
    except AssertionError:
        return
    finally:
        WaitingPrompts._depths_above = original  # type: ignore[method-assign]
    raise AssertionError("a depth was left out and nothing was said")


def test_who_comes_beyond_the_index_is_taken_in_when_others_have_gone() -> None:
    index = WaitingPrompts(max_tokens=100)
    index.add("a", request(list(range(60))))
    assert not index.is_full
    index.add("b", request(list(range(100, 160))))
    assert index.is_full
    assert index.is_shared("c", 0), "who is left out of a full index may share anything"
    index.remove("a")
    assert not index.is_full
    assert not index.is_shared("c", 0)


def waits(index: WaitingPrompts, ids: list[int], tree: RadixTree | None = None, namespace: int = 0) -> bool:
    mine = request(ids, namespace)
    return index.waits(mine, (tree or RadixTree()).match(mine.path, len(ids) - 1))


def test_a_request_waits_for_a_state_on_its_path_and_for_no_other() -> None:
    index, shared = WaitingPrompts(), list(range(100))
    index.expect("first", request([*shared, 500, 501]), [100, 101])
    assert waits(index, [*shared, 700, 701])
    assert not waits(index, [*shared[:99], 700, 701]), "it leaves the path before the state"
    assert not waits(index, [*shared, 700, 701], namespace=1)
    index.arrived("first", 100)
    assert not waits(index, [*shared, 700, 701]), "the state is there, or will not come"


def test_a_repeat_waits_for_the_state_before_its_last_token() -> None:
    index, prompt = WaitingPrompts(), list(range(100))
    index.expect("first", request(prompt), [99])
    assert waits(index, prompt)
    index.expect_nothing("first")
    assert not waits(index, prompt)


def test_nobody_waits_for_little() -> None:
    index, shared = WaitingPrompts(), list(range(MIN_SAVED_TOKENS))
    index.expect("first", request([*shared, 500]), [len(shared)])
    assert waits(index, [*shared, 700])
    assert not waits(index, [*shared, *range(700, 1000)]), "an eighth of what it has to compute is more than that"
    assert not waits(index, shared), "a state after the last token of a prompt serves it nothing"
    tree = RadixTree()
    tree.insert(pack(shared), [1])
    assert not waits(index, [*shared, 700], tree), "it has one token of them already"
