"""Where prompts are left by what goes on from them: counted, aged, for each name space, and turned into places."""

import random
from dataclasses import replace

import pytest

from marconi.policy.admission.plan import Judicious
from marconi.policy.eviction.lru import SeparateLru
from marconi.policy.eviction.order import Order
from marconi.policy.forecast.turns import (
    COLD_REQUESTS,
    MAX_DISTANCE,
    MAX_NAMESPACES,
    WINDOW,
    Turns,
)
from marconi.policy.hybrid_cache import HybridCache
from marconi.policy.request import Lease, Request, pack
from marconi.tree import RadixTree

THINK = [900, 901]
"""The end of a prompt that no later turn repeats."""


class Chats:
    """A server's tree and its clients."""

    def __init__(self, page: int = 1) -> None:
        self.hybrid = HybridCache(RadixTree(page, max_ghosts=50, ids_per_unit=page), Judicious(page), tiers())
        self.now_s = 0.0

    def serve(self, prompt: list[int], answer: list[int], namespace: int = 0, known: int | None = None) -> int:
        """Serve a request; the tokens that it found."""
        self.now_s += 1.0
        page = self.hybrid.tree.unit_tokens
        num_known = len(prompt) // page * page
        request = Request(pack(prompt), len(prompt), 0, num_known, self.now_s, namespace=namespace)
        lease = Lease(request, self.hybrid.match(request))
        if lease.match.source is not None:
            self.hybrid.lock(lease.match.source)
        self.hybrid.begin(lease, self.now_s)
        plan = self.hybrid.plan(lease, known_distance=known)
        if plan.depths:
            self.hybrid.insert(lease, plan.depths, self.now_s, trials=plan.trials)
        processed = [*prompt, *answer[:-1]]
        end = len(processed) // page * page
        if end > max([lease.match.checkpoint.depth, *plan.depths]):
            whole = replace(request, path=pack(processed), num_output_tokens=len(answer), num_known_tokens=end)
            self.hybrid.insert(Lease(whole, lease.match), [end], self.now_s)
        if lease.match.source is not None:
            self.hybrid.unlock(lease.match.source)
        self.hybrid.check_invariants()
        return lease.match.checkpoint.depth

    def lease(self, namespace: int = 0, num_tokens: int = 100) -> Lease:
        """A prompt that nobody has seen."""
        request = Request(pack([5] * num_tokens), num_tokens, 0, num_tokens, self.now_s, namespace=namespace)
        return Lease(request, self.hybrid.match(request))

    def places(self, namespace: int = 0, num_tokens: int = 100) -> list[int]:
        """Where it would leave its states, before its end."""
        return self.hybrid.turns.next_turn(self.lease(namespace, num_tokens))

    def shares(self, *distances: int) -> list[float]:
        """Of the states at `distances` before the end of such a prompt, falling, in what goes on from it."""
        end = self.hybrid.turns.prompt_end(self.lease())
        depths = [end.num_prompt_tokens - distance for distance in distances]
        return [self.hybrid.turns.share(end, *pair) for pair in zip(depths, [*depths[1:], None], strict=True)]


def tiers() -> Order:
    return Order(SeparateLru())


def texts(seed: int) -> random.Random:
    return random.Random(seed)  # noqa: S311 - a workload, not a secret


def words(rng: random.Random, num_tokens: int) -> list[int]:
    return [rng.randrange(10, 800) for _ in range(num_tokens)]


def chat(
    chats: Chats,
    rng: random.Random,
    num_turns: int,
    namespace: int = 0,
    known: int | None = None,
    num_tokens: int = 30,
) -> list[int]:
    """A chat whose thinking is dropped; of each turn but the first the tokens that it lacked of what could be."""
    history: list[int] = []
    lost = []
    for turn in range(num_turns):
        kept = len(history)
        history += words(rng, num_tokens)
        thinking, answer = words(rng, 20), words(rng, 10)
        hit = chats.serve([*history, *THINK], [*thinking, *answer], namespace, known)
        if turn:
            lost.append(kept - len(answer) - hit)
        history += answer
    return lost


def test_until_something_is_seen_a_state_waits_one_token_before_the_end() -> None:
    assert Chats().places() == [1]


def test_on_a_server_that_has_seen_little_a_long_prompt_has_a_state_further_back_as_well() -> None:
    chats, rng = Chats(), texts(1)
    assert chats.places(num_tokens=127) == [1]
    assert sorted(chats.places(num_tokens=128)) == [1, 16]
    assert sorted(chats.places(num_tokens=512)) == [1, 16, 64]
    for _ in range(COLD_REQUESTS + 1):
        chats.serve(words(rng, 20), [1, 2])
    assert chats.places(num_tokens=512) == [1]


def test_a_chat_whose_thinking_is_dropped_is_served_in_full_from_the_third_turn_on() -> None:
    """At its second turn nobody knew yet where prompts are left."""
    chats = Chats()
    first, *others = chat(chats, texts(1), 8)
    assert first > 0
    assert others == [0] * 6
    assert chat(Chats(), texts(1), 8, num_tokens=150) == [16 - len(THINK), *[0] * 6]


def test_a_template_that_tells_is_served_in_full_from_the_second_turn_on() -> None:
    assert chat(Chats(), texts(1), 8, known=len(THINK)) == [0] * 7


def test_where_prompts_are_left_often_a_state_has_the_greater_share() -> None:
    chats = Chats()
    chat(chats, texts(1), 2)
    assert sorted(chats.places()) == [1, 2], "seen once"
    before, at, _, end = chats.shares(3, 2, 1, 0)
    assert (before, at > end) == (0.0, False)
    chat(chats, texts(3), 6)
    assert chats.places() == [2], "seen often"
    _, at, _, end = chats.shares(3, 2, 1, 0)
    assert at > 3 * end


def test_the_shares_of_the_states_of_a_prompt_are_parts_of_one() -> None:
    """What lies beyond the deepest is its own, and what is further back than the first has no state."""
    chats = Chats()
    chat(chats, texts(1), 6)
    assert sum(chats.shares(64, 16, 2, 1, 0)) == pytest.approx(1.0)
    assert sum(chats.shares(2, 1)) == pytest.approx(chats.shares(2)[0]), "what is evicted leaves its share above"
    assert chats.shares(16, 0)[0] == pytest.approx(sum(chats.shares(16, 2, 1, 0)[:3]))


def test_a_chat_that_keeps_its_answers_goes_on_from_their_ends() -> None:
    chats, rng = Chats(), texts(1)
    prompt = words(rng, 40)
    for _ in range(12):
        answer = words(rng, 10)
        hit = chats.serve(prompt, answer)
        prompt += [*answer, *words(rng, 30)]
    assert hit == len(prompt) - 30 - 1 - 40, "all that was processed the turn before"
    assert chats.shares(1, 0)[1] > 2 * chats.shares(1, 0)[0]


def test_repeats_are_served_one_token_before_the_end() -> None:
    chats, rng = Chats(), texts(1)
    for _ in range(10):
        prompt = words(rng, 40)
        assert [chats.serve(prompt, words(rng, 5)) for _ in range(3)][1:] == [39, 39]


def test_each_name_space_learns_for_itself_and_a_new_one_from_all() -> None:
    chats, rng = Chats(), texts(1)
    for _ in range(20):
        chat(chats, rng, 2, namespace=1)
        prompt = words(rng, 40)
        chats.serve(prompt, [1, 2], namespace=2)
        chats.serve(prompt, [1, 2], namespace=2)
    assert chats.places(1) == [2]
    assert chats.places(2) == [1]
    assert sorted(chats.places(3)) == [1, 2], "half of all do the one, half the other"


def test_what_was_long_ago_counts_no_more() -> None:
    chats, rng = Chats(), texts(1)
    for _ in range(WINDOW):
        chat(chats, rng, 2)
    assert chats.places() == [2]
    for _ in range(WINDOW):
        prompt = words(rng, 40)
        chats.serve(prompt, [1])
        chats.serve(prompt, [1])
    assert chats.places() == [1]


def test_a_shared_beginning_is_no_next_turn() -> None:
    """Many short questions under one system prompt: each leaves it as far before its end as the question is long."""
    chats, rng = Chats(), texts(1)
    system = words(rng, 100)
    for _ in range(30):
        chats.serve([*system, *words(rng, 20)], words(rng, 5))
    assert sorted(chats.places()) == [1, 20], "the first who left it may have gone on from there"


def test_a_place_too_far_before_the_end_is_not_counted() -> None:
    chats, rng = Chats(), texts(1)
    for _ in range(10):
        document = words(rng, 200)
        for _ in range(2):
            chats.serve([*document, *words(rng, MAX_DISTANCE + 1)], words(rng, 5))
    assert chats.places() == Chats().places()


@pytest.mark.parametrize("page", [4, 16])
def test_with_pages_the_place_is_a_pages_end_and_no_page_is_lost(page: int) -> None:
    chats, rng = Chats(page), texts(1)
    for _ in range(4):
        lost = chat(chats, rng, 6)
    assert all(each < page for each in lost)


def test_an_agents_steps_within_a_turn_do_not_hide_what_the_turn_after_needs() -> None:
    """Steps go on from answers, thinking and all; the next turn leaves the turn's first prompt before its thinking."""
    chats, rng = Chats(), texts(1)
    history: list[int] = []
    for turn in range(6):
        before = len(history)
        history += words(rng, 30)
        prompt = [*history, *THINK]
        answer = words(rng, 20)
        hit = chats.serve(prompt, answer)
        assert turn < 2 or hit == before - 15
        for _ in range(3):
            prompt += [*answer, *words(rng, 10), *THINK]
            answer = words(rng, 20)
            hit = chats.serve(prompt, answer)
            assert hit == len(prompt) - 13
        history += words(rng, 15)


def test_no_more_name_spaces_are_kept_than_there_is_room_for() -> None:
    turns = Turns()
    hybrid = HybridCache(RadixTree(), Judicious(), tiers())
    for namespace in range(MAX_NAMESPACES + 10):
        request = Request(pack([1, 2, 3, 4]), 4, 0, 4, 0.0, namespace=namespace)
        lease = Lease(request, hybrid.match(request))
        turns.note(hybrid.insert(lease, [3], 0.0), lease)
        turns.arrived(Lease(request, hybrid.match(request)))
    assert len(turns._of) == MAX_NAMESPACES
