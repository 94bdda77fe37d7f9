"""A divergence shows the tokens on both sides, of its own name space alone, as a list of all prompts has them."""

import random

import pytest

from marconi.policy.divergence import MAX_TOKENS, divergence_of
from marconi.policy.request import Request, pack, unpack
from marconi.tree import RadixTree


def request(ids: list[int], namespace: int = 0) -> Request:
    return Request(pack(ids), len(ids), 0, len(ids), 0.0, namespace=namespace)


def num_common(left: list[int], right: list[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


def test_both_sides_of_a_divergence_within_a_span_and_at_its_end() -> None:
    tree = RadixTree(max_ghosts=9)
    tree.insert(pack(range(100)), [100])
    tree.insert(pack([*range(100), *range(300, 303)]), [103])
    within = divergence_of(request([*range(60), *range(500, 540)]), tree)
    assert within is not None
    assert within.position == 60
    shown = [unpack(side) for side in (within.before, within.prompt, within.known)]
    assert shown == [[*range(44, 60)], [*range(500, 516)], [*range(60, 76)]]
    tree.insert(pack([*range(100), *range(400, 402)]), [102])
    at_end = divergence_of(request([*range(100), 7, 8, 9]), tree)
    assert at_end is not None
    assert unpack(at_end.prompt) == [7, 8]
    assert unpack(at_end.known) == [400, 401], "the newest edge"


@pytest.mark.parametrize(
    "ids",
    [[*range(100)], [*range(99)], [*range(120)], [*range(99), 7], [7, *range(1, 100)], [0], []],
    ids=["known", "a part", "extends it", "at its last token", "shares nothing", "a token", "empty"],
)
def test_a_prompt_that_does_not_drift_apart_shows_nothing(ids: list[int]) -> None:
    tree = RadixTree(max_ghosts=9)
    tree.insert(pack(range(100)), [100])
    assert divergence_of(request(ids), tree) is None


def test_another_name_space_is_never_shown() -> None:
    tree = RadixTree(max_ghosts=9)
    tree.insert(pack(range(100)), [100], 1)
    prompt = [*range(60), *range(500, 540)]
    assert divergence_of(request(prompt, 2), tree) is None
    assert divergence_of(request(prompt, 1), tree) is not None


@pytest.mark.parametrize("page", [1, 4])
def test_random_prompts_show_what_a_list_of_all_prompts_has_there(page: int) -> None:
    """The newest of several edges, but of a page that is shared in part the one that shares most."""
    chance = random.Random(page)  # noqa: S311 - no secret
    tree, known = RadixTree(page, 10**6, page), {0: list[list[int]](), 1: list[list[int]]()}
    num_shown = 0
    for _ in range(600):
        namespace = chance.randrange(2)
        base = chance.choice(known[namespace]) if known[namespace] and chance.random() < 0.8 else []
        ids = base[: chance.randint(0, len(base))] + [chance.randrange(1, 4) for _ in range(chance.randint(1, 30))]
        shared = max((num_common(ids, each) for each in known[namespace]), default=0)
        usable = (len(ids) - 1) // page * page
        found = divergence_of(request(ids, namespace), tree)
        if found is not None:
            num_shown += 1
            assert shared // page == found.position // page
            assert found.position <= shared < usable
            assert unpack(found.before) == ids[max(found.position - MAX_TOKENS, 0) : found.position]
            assert unpack(found.prompt) == ids[found.position : usable][:MAX_TOKENS]
            onwards = unpack(found.known)
            assert onwards[0] != ids[found.position]
            whole = ids[: found.position] + onwards
            assert any(each[: len(whole)] == whole for each in known[namespace])
        else:
            seen = ids[: shared // page * page]
            beyond = [each for each in known[namespace] if each[: len(seen)] == seen and len(each) > len(seen)]
            assert not seen or shared >= usable or not beyond
        end = len(ids) // page * page
        if end:
            tree.insert(pack(ids[:end]), [end], namespace)
            known[namespace].append(ids[:end])
    assert num_shown > 100
