"""The index of a fleet: hits as defined, whatever is held, in whatever order it was told."""

from collections.abc import Iterable
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marconi.events.base import Cleared, Event, KvRemoved, KvStored, StateRemoved, StateStored
from marconi.router.index import Chain, FleetIndex, Hit

from .worlds import BLOCK_TOKENS, NAMESPACES, Prompts, Worker

seeds = st.integers(0, 1 << 32)


def assert_same(index: FleetIndex, workers: Iterable[Worker], prompts: Prompts) -> None:
    """Every hit of every worker is that of the definition, and what is known of it is what it holds."""
    workers = tuple(workers)
    for worker in workers:
        holding = index.holding(worker.name)
        assert holding.kv.keys() == worker.kv.keys()
        assert holding.states.keys() == worker.states.keys()
    for path in range(len(prompts.paths)):
        hits = index.hits(prompts.chain(path))
        expected = {worker.name: worker.hit(prompts, path) for worker in workers}
        assert hits == {name: hit for name, hit in expected.items() if hit != Hit(0, 0)}


@settings(max_examples=30)
@given(seeds)
def test_hits_are_those_of_the_definition_after_every_event(seed: int) -> None:
    rng = Random(seed)  # noqa: S311 - made-up traffic
    prompts = Prompts(rng, 8)
    workers = [Worker(f"w{number}") for number in range(rng.choice((1, 3)))]
    index = FleetIndex(BLOCK_TOKENS)
    for worker in workers:
        index.add_worker(worker.name)
    for step in range(30):
        worker = rng.choice(workers)
        index.apply(worker.name, worker.change(rng, prompts))
        if rng.random() < 0.2:
            index.sweep(rng.choice((1, 10, 1000)))
        if step % 5 == 4:
            index.check_invariants()
            assert_same(index, workers, prompts)


@settings(max_examples=60)
@given(seeds)
def test_blocks_stored_and_removed_in_runs_are_as_those_stored_and_removed_one_by_one(seed: int) -> None:
    rng = Random(seed)  # noqa: S311 - made-up traffic
    limit = rng.choice((40, 10_000))
    in_runs, singly = both = tuple(FleetIndex(BLOCK_TOKENS, max_entries_per_worker=limit) for _ in range(2))
    for index in both:
        index.add_worker("w0")
        index.add_worker("w1")
    paths: list[tuple[bytes, tuple[int, ...]]] = []
    for _ in range(25):
        space, before = rng.choice([(b"", ()), (b"tenant", ()), *paths])
        before = before[: rng.randint(0, len(before))]
        new = tuple(rng.randrange(1 << (8 if rng.random() < 0.3 else 60)) for _ in range(rng.choice((1, 4, 20, 140))))
        paths.append((space, before + new))
        events: list[Event] = [KvStored(new, before[-1] if before else None, space, BLOCK_TOKENS)]
        if rng.random() < 0.5:
            events.append(StateStored(new[-1], len(paths[-1][1]) * BLOCK_TOKENS, space))
        if rng.random() < 0.3:
            gone = rng.choice(paths)[1]
            events.append(KvRemoved(tuple(reversed(gone[rng.randrange(len(gone)) :]))))
        worker = rng.choice(("w0", "w1"))
        in_runs.apply(worker, events)
        singly.apply(worker, [each for event in events for each in one_by_one(event)])
        in_runs.check_invariants()
        for name in in_runs.workers:
            assert in_runs.holding(name).kv == singly.holding(name).kv
            assert in_runs.holding(name).states == singly.holding(name).states
        chain = Chain(*rng.choice(paths))
        assert in_runs.hits(chain) == singly.hits(chain)


def one_by_one(event: Event) -> list[Event]:
    match event:
        case KvStored(hashes, parent, namespace, num_tokens):
            parents = (parent, *hashes)
            return [
                KvStored((each,), before, namespace, num_tokens) for each, before in zip(hashes, parents, strict=False)
            ]
        case KvRemoved(hashes):
            return [KvRemoved((each,)) for each in hashes]
        case _:
            return [event]


@settings(max_examples=20)
@given(seeds)
def test_a_worker_is_answered_for_as_before_until_its_snapshot_is_loaded(seed: int) -> None:
    rng = Random(seed)  # noqa: S311 - made-up traffic
    prompts = Prompts(rng, 6)
    worker, other = Worker("w"), Worker("other")
    index = FleetIndex(BLOCK_TOKENS)
    for each in (worker, other):
        index.add_worker(each.name)
        for _ in range(8):
            index.apply(each.name, each.change(rng, prompts))
    before = Worker("w", kv=dict(worker.kv), states=dict(worker.states))
    for _ in range(6):
        worker.change(rng, prompts)
    events = worker.all(rng)
    checked = {rng.randrange(len(events) + 1) for _ in range(5)}
    for number, _ in enumerate(index.load("w", events)):
        if number in checked:
            index.check_invariants()
            assert_same(index, (before, other), prompts)
            index.apply("other", other.change(rng, prompts))
        index.sweep(rng.choice((1, 100)))
    assert_same(index, (worker, other), prompts)
    while index.sweep(rng.choice((1, 100, 1000))):
        pass
    index.check_invariants()
    assert_same(index, (worker, other), prompts)


@settings(max_examples=10)
@given(seeds)
def test_a_snapshot_that_is_given_up_leaves_everything_as_it_was(seed: int) -> None:
    rng = Random(seed)  # noqa: S311 - made-up traffic
    prompts = Prompts(rng, 4)
    worker = Worker("w")
    index = FleetIndex(BLOCK_TOKENS)
    index.add_worker("w")
    for _ in range(8):
        index.apply("w", worker.change(rng, prompts))
    while index.sweep(500):
        pass
    num_blocks = index.num_blocks
    loading = index.load("w", [stored(*range(1, 2_000)), StateStored(9, 36, b"")])
    for _ in range(rng.randrange(8)):
        next(loading)
    loading.close()
    assert_same(index, (worker,), prompts)
    while index.sweep(500):
        index.check_invariants()
    assert index.num_blocks == num_blocks


@settings(max_examples=8)
@given(seeds)
def test_what_does_not_fit_is_only_missed(seed: int) -> None:
    rng = Random(seed)  # noqa: S311 - made-up traffic
    prompts = Prompts(rng, 8)
    workers = [Worker(f"w{number}") for number in range(3)]
    index = FleetIndex(BLOCK_TOKENS, max_blocks=rng.choice((1, 3, 40, 200)), max_entries_per_worker=150)
    for worker in workers:
        index.add_worker(worker.name)
    for _ in range(30):
        worker = rng.choice(workers)
        events = worker.change(rng, prompts)
        if rng.random() < 0.2:
            for _ in index.load(worker.name, worker.all(rng)):
                index.sweep(10)
        else:
            index.apply(worker.name, events)
        index.check_invariants()
        for path in range(len(prompts.paths)):
            for name, hit in index.hits(prompts.chain(path)).items():
                truth = next(worker for worker in workers if worker.name == name).hit(prompts, path)
                assert hit.num_tokens <= truth.num_tokens
                assert hit.num_kv_tokens <= truth.num_kv_tokens


def stored(*hashes: int, after: int | None = None, namespace: bytes = b"") -> KvStored:
    return KvStored(hashes, after, namespace, BLOCK_TOKENS)


def index_of(*events: Event, **sizes: int) -> FleetIndex:
    index = FleetIndex(BLOCK_TOKENS, **sizes)
    index.add_worker("w")
    index.apply("w", events)
    return index


def hit(index: FleetIndex, *hashes: int, namespace: bytes = b"") -> int:
    return index.hits(Chain(namespace, hashes)).get("w", Hit(0, 0)).num_tokens


def test_a_hit_needs_the_state_and_all_kv_before_it() -> None:
    index = index_of(stored(1, 2, 3), StateStored(2, 8, b""))
    assert index.hits(Chain(b"", (1, 2, 3, 4))) == {"w": Hit(8, 12)}
    index.apply("w", [KvRemoved((1,))])
    assert index.hits(Chain(b"", (1, 2, 3, 4))) == {}
    index.apply("w", [stored(1)])
    assert index.hits(Chain(b"", (1, 2, 3, 4))) == {"w": Hit(8, 12)}
    index.apply("w", [StateRemoved(2)])
    assert index.hits(Chain(b"", (1, 2, 3, 4))) == {"w": Hit(0, 12)}


def test_tenants_never_hit_what_another_one_left_even_where_hashes_are_equal() -> None:
    index = index_of(stored(1, 2, namespace=NAMESPACES[1]), StateStored(2, 8, NAMESPACES[1]))
    assert hit(index, 1, 2, namespace=NAMESPACES[1]) == 8
    assert hit(index, 1, 2) == 0
    index.apply("w", [stored(1, 2), StateStored(2, 8, b"")])
    assert hit(index, 1, 2) == 0
    assert index.stats.num_conflicting == 3
    index.check_invariants()


def test_a_full_index_keeps_what_it_has_and_takes_more_when_workers_evict() -> None:
    first, second = (stored(1, 2, 3), StateStored(3, 12, b"")), (stored(11, 12, 13), StateStored(13, 12, b""))
    index = index_of(*first, *second, max_blocks=5)
    assert (hit(index, 1, 2, 3), hit(index, 11, 12, 13), index.stats.num_over_limit) == (12, 0, 1)
    assert index.hits(Chain(b"", (11, 12, 13))) == {"w": Hit(0, 8)}, "what fits is the beginning"
    index.add_worker("other")
    index.apply("other", first)
    assert index.hits(Chain(b"", (1, 2, 3)))["other"] == Hit(12, 12), "known blocks take no room"
    index.remove_worker("other")
    index.sweep(10)
    index.apply("w", [StateRemoved(3), KvRemoved((3, 2, 1))])
    for _ in index.load("w", second):
        pass
    assert hit(index, 11, 12, 13) == 12
    index.check_invariants()


def test_a_restart_is_one_step_and_its_remains_are_swept_in_pieces() -> None:
    index = index_of(stored(*range(1000)), StateStored(999, 4000, b""))
    index.clear("w")
    assert index.hits(Chain(b"", range(1000))) == {}
    assert index.num_retired_entries == 1001
    index.apply("w", [stored(0), StateStored(0, 4, b"")])
    assert hit(index, 0, 1) == 4
    assert index.sweep(300) == 300
    index.check_invariants()
    while index.sweep(300):
        pass
    assert (index.num_blocks, index.num_retired_entries) == (1, 0)
    index.remove_worker("w")
    index.sweep(10)
    assert (index.num_blocks, index.num_retired_entries, index.workers) == (0, 0, ())
    index.check_invariants()


@pytest.mark.parametrize(
    ("event", "counter"),
    [
        (KvStored((), None, b"", BLOCK_TOKENS), "num_malformed"),
        (KvStored((-1,), None, b"", BLOCK_TOKENS), "num_malformed"),
        (KvStored((1 << 64,), None, b"", BLOCK_TOKENS), "num_malformed"),
        (KvStored(("1",), None, b"", BLOCK_TOKENS), "num_malformed"),  # type: ignore[arg-type]
        (KvStored((9,), -1, b"", BLOCK_TOKENS), "num_malformed"),
        (KvStored((9,), None, b"", 2 * BLOCK_TOKENS), "num_malformed"),
        (KvStored((9,), None, b"", 0), "num_malformed"),
        (KvStored((8, 9), None, b"", 1), "num_malformed"),
        (StateStored(1, 0, b""), "num_malformed"),
        (StateStored(-1, 4, b""), "num_malformed"),
        ("stored", "num_malformed"),
        (KvStored((1,), None, b"x", BLOCK_TOKENS), "num_conflicting"),
        (StateStored(3, 12, b"x"), "num_conflicting"),
        (KvStored((100,), 2, b"", 1), "num_conflicting"),
        (KvStored((100,), 3, b"", 2), "num_conflicting"),
        (KvRemoved((77,)), "num_unknown_removals"),
        (StateRemoved(1), "num_unknown_removals"),
    ],
)
def test_what_cannot_be_is_dropped_and_counted(event: Event, counter: str) -> None:
    tail = KvStored((100,), 3, b"", 1)
    index = index_of(stored(1, 2, 3), tail, StateStored(3, 12, b""))
    index.apply("w", [event])
    assert getattr(index.stats, counter) >= 1
    index.check_invariants()
    assert hit(index, 1, 2, 3) == 12
    assert index.num_blocks == 4


@pytest.mark.parametrize(
    "event",
    [
        KvStored((9,), 9, b"", BLOCK_TOKENS),
        KvStored((1, 3), None, b"", BLOCK_TOKENS),
        KvStored((2,), None, b"", BLOCK_TOKENS),
        KvStored((1,), 3, b"", BLOCK_TOKENS),
        KvStored((4,), 100, b"", BLOCK_TOKENS),
    ],
)
def test_a_block_said_to_follow_another_one_than_it_does_changes_no_prompts_hit(event: Event) -> None:
    index = index_of(stored(1, 2, 3), KvStored((100,), 3, b"", 1), StateStored(3, 12, b""))
    index.apply("w", [event])
    index.check_invariants()
    assert index.hits(Chain(b"", (1, 2, 3))) == {"w": Hit(12, 12)}


def test_a_worker_holds_no_more_than_its_share() -> None:
    index = index_of(stored(1, 2), StateStored(2, 8, b""), stored(3, 4, after=2), max_entries_per_worker=4)
    assert index.stats.num_over_limit == 1
    assert index.hits(Chain(b"", (1, 2, 3, 4))) == {"w": Hit(8, 12)}
    index.apply("w", [StateStored(3, 12, b"")])
    assert index.stats.num_over_limit == 2
    index.check_invariants()


def test_cleared_in_the_middle_of_events_clears_what_was_before_it() -> None:
    index = index_of(stored(1, 2), StateStored(2, 8, b""), Cleared(), stored(1), StateStored(1, 4, b""))
    assert index.hits(Chain(b"", (1, 2))) == {"w": Hit(4, 4)}


@pytest.mark.parametrize("name", ["block_tokens", "max_blocks", "max_entries_per_worker"])
def test_a_size_below_1_is_refused_by_name(name: str) -> None:
    sizes = {"block_tokens": 1} | {name: 0}
    with pytest.raises(ValueError, match=f"{name} must be 1 or more, got 0"):
        FleetIndex(**sizes)


def test_a_worker_is_added_once() -> None:
    with pytest.raises(ValueError, match="'w'"):
        index_of().add_worker("w")
