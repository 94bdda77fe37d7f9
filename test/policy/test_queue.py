"""The victim queue: always the least, whatever was moved, in amortised O(log n) and memory linear in what it holds."""

import math
import random
from dataclasses import dataclass

import pytest

from marconi.policy.eviction.order import VictimQueue


@dataclass(eq=False, slots=True)
class Numbered:
    """As much of a node as a queue looks at."""

    serial: int


def nodes(count: int) -> list[Numbered]:
    return [Numbered(serial) for serial in range(count)]


def test_an_empty_queue_has_no_first() -> None:
    queue = VictimQueue()
    assert queue.first() is None
    assert queue.first_entry() is None
    assert len(queue) == 0


def test_the_least_key_is_first_and_equal_keys_go_by_age() -> None:
    a, b, c = nodes(3)
    queue = VictimQueue()
    queue.put(c, 1.0)
    queue.put(b, 1.0)
    queue.put(a, 2.0)
    assert queue.first_entry() == (1.0, 1, b)
    queue.discard(b)
    assert queue.first() is c


def test_a_node_that_moves_is_held_once_under_its_new_key() -> None:
    a, b = nodes(2)
    queue = VictimQueue()
    queue.put(a, 1.0)
    queue.put(b, 2.0)
    queue.put(a, 3.0)
    assert (queue.first(), len(queue)) == (b, 2)
    queue.put(a, 1.0)
    assert (queue.first(), set(queue)) == (a, {a, b})


def test_a_node_that_was_discarded_is_gone_until_it_is_put_again() -> None:
    (a,) = nodes(1)
    queue = VictimQueue()
    queue.discard(a)
    queue.put(a, 1.0)
    queue.discard(a)
    assert a not in queue
    assert queue.first() is None
    queue.put(a, 1.0)
    assert a in queue
    assert queue.first() is a


def test_the_first_stays_until_it_is_discarded() -> None:
    a, b = nodes(2)
    queue = VictimQueue()
    queue.put(a, (1.0, 2.0))
    queue.put(b, (1.0, 3.0))
    assert queue.first() is queue.first() is a


@pytest.mark.parametrize("seed", range(2))
def test_random_operations_agree_with_a_sorted_list(seed: int) -> None:
    rng = random.Random(seed)  # noqa: S311 - a workload, not a secret
    queue = VictimQueue()
    known = nodes(30)
    keys: dict[Numbered, float] = {}
    for _ in range(5_000):
        node = rng.choice(known)
        if rng.random() < 0.7:
            keys[node] = float(rng.randrange(10))
            queue.put(node, keys[node])
        else:
            keys.pop(node, None)
            queue.discard(node)
        assert queue.first() is min(keys, key=lambda held: (keys[held], held.serial), default=None)
        assert len(queue) == len(keys)


class CountedKey(float):
    """A key that counts how often it is compared."""

    num_comparisons = 0

    def __lt__(self, other: float) -> bool:
        CountedKey.num_comparisons += 1
        return float.__lt__(self, other)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("count", [100, 2_000, pytest.param(40_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("moves", ["to the back", "to the front", "anywhere"])
def test_an_operation_costs_a_logarithm_of_comparisons_whatever_moves(count: int, moves: str) -> None:
    rng = random.Random(1)  # noqa: S311 - a workload, not a secret
    queue, held = VictimQueue(), nodes(count)
    CountedKey.num_comparisons = 0
    num_operations = 0
    for node in held:
        queue.put(node, CountedKey(rng.random()))
        num_operations += 1
    for step in range(1, 3 * min(count, 10_000)):
        key = {"to the back": float(step), "to the front": -float(step), "anywhere": rng.random()}[moves]
        queue.put(rng.choice(held), CountedKey(key))
        first = queue.first()
        assert first is not None
        if step % 3 == 0:
            queue.discard(first)
            queue.put(first, CountedKey(key))
            num_operations += 2
        num_operations += 2
    while (first := queue.first()) is not None:
        queue.discard(first)
        num_operations += 2
    assert CountedKey.num_comparisons / num_operations < 2 * math.log2(count) + 4


def test_forgotten_entries_take_no_more_room_than_those_that_are_held() -> None:
    queue, held = VictimQueue(), nodes(100)
    for step in range(10_000):
        queue.put(held[step % 100], float(step))
        assert len(queue._run) + len(queue._heap) <= 64 + 2 * len(queue)
