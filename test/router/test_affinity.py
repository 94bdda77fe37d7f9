"""What a router remembers of whom it gave a prefix to: who served it last, and how warm each worker is."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marconi.router.affinity import STEP_BLOCKS, Affinity, Served
from marconi.router.index import Chain

BLOCK = 16


def affinity(*workers: str, **options: float) -> Affinity:
    made = Affinity(BLOCK, **options)  # type: ignore[arg-type]
    for worker in workers:
        made.add_worker(worker)
    return made


def chain(*hashes: int, namespace: bytes = b"") -> Chain:
    return Chain(namespace, hashes)


def home(known: Affinity, *hashes: int, namespace: bytes = b"") -> tuple[str, int] | None:
    """Who served the longest known beginning of a prompt last, and its tokens."""
    seen = known.seen(chain(*hashes, namespace=namespace))
    return None if seen is None else seen[:2]


def test_the_home_of_a_prompt_is_who_served_its_longest_known_beginning_last() -> None:
    known = affinity("a", "b")
    known.serve("a", chain(*range(300)), 0.0)
    assert home(known, *range(300), 7, 8) == ("a", (300 - 300 % STEP_BLOCKS) * BLOCK)
    assert home(known, *range(40), *range(900, 980)) == ("a", 32 * BLOCK), "powers of two below the first step"
    known.serve("b", chain(*range(4)), 1.0)
    assert home(known, 0, 1, 2, 3, 99) == ("b", 4 * BLOCK)
    assert home(known, *range(300)) == ("a", (300 - 300 % STEP_BLOCKS) * BLOCK)
    assert home(known, 55) is None
    assert home(known, *range(300), namespace=b"other") is None


def test_what_was_served_is_known_to_go_on_from_a_beginning_or_to_end_near_it() -> None:
    known = affinity("a", "b")
    known.serve("a", chain(*range(40), *range(900, 980)), 0.0)
    seen = known.seen(chain(*range(40), 1_000))
    assert seen is not None
    assert (seen.num_tokens, seen.num_prompt_tokens) == (32 * BLOCK, 120 * BLOCK)
    known.serve("b", chain(*range(40)), 1.0)
    seen = known.seen(chain(*range(40), 1_000))
    assert seen is not None
    assert seen.num_prompt_tokens == 40 * BLOCK, "of the last one that had it"


def test_a_conversation_that_goes_on_is_warm_on_one_worker_and_one_that_ended_fades() -> None:
    known = affinity("a", "b", half_life_s=10.0)
    known.serve("a", chain(1, 2, 3, 4), 0.0)
    assert known.warm_tokens("a", 0.0) == 4 * BLOCK
    assert known.warm_tokens("a", 10.0) == 2 * BLOCK
    known.serve("a", chain(1, 2, 3, 4), 10.0)
    assert known.warm_tokens("a", 10.0) == pytest.approx(4 * BLOCK)
    known.serve("b", chain(1, 2, 3, 4), 20.0)
    assert known.warm_tokens("a", 20.0) == pytest.approx(0)
    assert known.warm_tokens("b", 20.0) == 4 * BLOCK


def test_a_worker_that_goes_is_nobodys_home() -> None:
    known = affinity("a", "b")
    known.serve("a", chain(1, 2), 0.0)
    known.remove_worker("a")
    assert home(known, 1, 2) is None
    known.serve("b", chain(1, 2), 1.0)
    assert home(known, 1, 2) == ("b", 2 * BLOCK)


def test_what_is_taken_back_leaves_all_as_it_was_before_whoever_it_was_taken_from() -> None:
    known = affinity("a", "b", half_life_s=10.0)
    known.serve("a", chain(1, 2, 3, 4), 0.0)
    refused = known.serve("b", chain(1, 2, 3, 4, *range(100, 200)), 5.0)
    assert home(known, 1, 2, 3, 4) == ("b", 4 * BLOCK)
    known.take_back(refused, 10.0)
    assert home(known, 1, 2, 3, 4, *range(100, 200)) == ("a", 4 * BLOCK)
    assert known.warm_tokens("a", 10.0) == pytest.approx(2 * BLOCK)
    assert known.warm_tokens("b", 10.0) == pytest.approx(0)


def test_two_that_were_refused_leave_nothing_whichever_is_taken_back_first() -> None:
    for order in (0, 1), (1, 0):
        known = affinity("a")
        refused = [known.serve("a", chain(1, 2, 3), 0.0) for _ in range(2)]
        for index in order:
            known.take_back(refused[index], 0.0)
        assert len(known) == 0
        assert known.warm_tokens("a", 0.0) == 0


def test_places_are_bounded_and_the_longest_unused_go() -> None:
    known = affinity("a", max_places=3)
    for first in range(10):
        known.serve("a", chain(first), float(first))
    assert len(known) == 3
    assert [first for first in range(10) if home(known, first)] == [7, 8, 9]


def test_a_group_is_where_one_of_it_was_served_last_in_its_own_name_space() -> None:
    known = affinity("a", "b", max_places=3)
    assert known.served_akin(chain(), b"group") is None
    known.serve("a", chain(), 0.0, b"group")
    known.serve("b", chain(namespace=b"other"), 0.0, b"group")
    assert known.served_akin(chain(7), b"group") == "a", "whatever the prompt"
    assert known.served_akin(chain(7), None) is None
    refused = known.serve("b", chain(7), 1.0, b"group")
    known.take_back(refused, 1.0)
    assert known.served_akin(chain(), b"group") == "a"
    known.remove_worker("a")
    assert known.served_akin(chain(), b"group") is None
    for number in range(3):
        known.serve("b", chain(), 2.0, b"%d" % number)
    assert (len(known), known.served_akin(chain(namespace=b"other"), b"group")) == (3, None), "the oldest go"


@settings(max_examples=50)
@given(
    served=st.lists(
        st.tuples(
            st.sampled_from("abc"),
            st.lists(st.integers(0, 2), min_size=1, max_size=6),
            st.floats(0, 30),
            st.integers(0, 5),
            st.sampled_from([None, b"x", b"y"]),
        )
    )
)
def test_warmth_is_the_sum_over_places_whatever_was_served_and_taken_back(
    served: list[tuple[str, list[int], float, int, bytes | None]],
) -> None:
    known, now_s = affinity("a", "b", "c", half_life_s=10.0), 0.0
    given: list[Served] = []
    for worker, path, gap_s, back, group in served:
        now_s += gap_s
        # Hashes are chained: each stands for all before it.
        hashes = (int("1" + "".join(map(str, path[: end + 1]))) for end in range(len(path)))
        given.append(known.serve(worker, chain(*hashes), now_s, group))
        known.check_invariants(now_s)
        if back < len(given):
            known.take_back(given.pop(back), now_s)
            known.check_invariants(now_s)
    for each in given:
        known.take_back(each, now_s)
    assert len(known) == 0


@pytest.mark.parametrize("name", ["half_life_s", "max_places"])
def test_bounds_of_nothing_are_named(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be above 0, got 0"):
        affinity(**{name: 0})
