"""States on trial: the second prompt with a shared beginning hits, and nothing else pays for it."""

import itertools
from dataclasses import replace
from typing import Final

import pytest

from marconi.policy.admission import trials
from marconi.policy.admission.trials import CHUNK_TOKENS, MAX_TRIALS, Trials
from marconi.policy.base import Need
from rig.pools import Division

from .test_before_a_state import PLENTIFUL, SCARCE, Client, ours

pytestmark = pytest.mark.usefixtures("sglang_configuration")

HOST: Final = replace(PLENTIFUL, host_ratio=2.0)
FULL_HOST: Final = replace(PLENTIFUL, num_kv_tokens=4_000, num_state_slots=40, host_ratio=2.0)


def second(client: Client, num_shared_tokens: int) -> int:
    """Tokens that the second of two prompts hits, which share so many."""
    shared = client.tokens(num_shared_tokens)
    client.send(shared + client.tokens(100))
    return client.send(shared + client.tokens(100))[0]


def num_on_trial(client: Client) -> int:
    return int(client.replay.cache.tree_core.hybrid.order.num_on_trial)


@pytest.mark.parametrize("memory", Division)
@pytest.mark.parametrize("num_shared_tokens", [130, 700, 1000])
def test_the_second_prompt_hits_up_to_a_chunk_before_it_parts(memory: Division, num_shared_tokens: int) -> None:
    client = Client(ours(replace(PLENTIFUL, memory=memory)))
    assert second(client, num_shared_tokens) == num_shared_tokens // CHUNK_TOKENS * CHUNK_TOKENS


def test_above_a_host_tier_it_hits_as_well() -> None:
    assert second(Client(ours(HOST)), 700) == 640


def test_control_without_trials_it_misses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trials, "num_allowed", 0)
    assert second(Client(ours(PLENTIFUL)), 700) == 0


@pytest.mark.parametrize("memory", Division)
def test_where_memory_is_taken_none_are_left_and_nothing_is_evicted_for_one(memory: Division) -> None:
    client = Client(ours(replace(SCARCE, memory=memory)))
    for _ in range(20):
        client.send(client.tokens(500))
    hybrid = client.replay.cache.tree_core.hybrid
    num_evicted = sum(hybrid.counters.num_evictions.values())
    assert num_evicted
    num_before = num_on_trial(client)
    client.send(client.tokens(1000))
    assert num_on_trial(client) <= num_before


@pytest.mark.parametrize("num_shared_tokens", [700, 704])
def test_they_are_evicted_before_every_other_state_unless_prompts_part_at_one(num_shared_tokens: int) -> None:
    """A prompt that parts from another beyond a state on trial leaves one of its own there, and needs it no more."""
    client = Client(ours(replace(PLENTIFUL, num_state_slots=40)))
    shared = client.tokens(num_shared_tokens)
    for _ in range(2):
        client.send(shared + client.tokens(100))
    kept = [depth for depth in client.states if depth % CHUNK_TOKENS]
    assert num_on_trial(client) >= 10
    while num_on_trial(client):
        client.send(client.tokens(200))
    assert {num_shared_tokens} <= set(client.states)
    assert not [depth for depth in client.states if depth % CHUNK_TOKENS == 0 and depth != num_shared_tokens]
    assert len({*kept} - set(client.states)) <= 1
    client.replay.cache.tree_core.hybrid.check_invariants()


def test_one_that_is_retained_is_on_trial_no_more() -> None:
    client = Client(ours(PLENTIFUL))
    client.send(client.tokens(500))
    hybrid = client.replay.cache.tree_core.hybrid
    node = hybrid.order.victim(Need.STATE, 9.0)
    assert node.on_trial
    assert hybrid.retain(node, 100.0, 9.0)
    assert hybrid.order.victim(Need.STATE, 9.0) is not node
    hybrid.check_invariants()


def test_prompts_that_share_nothing_stop_leaving_them() -> None:
    """At 15 a prompt and a quarter of one back for each other state, the allowance of 48 is spent by the fifth."""
    client = Client(ours(PLENTIFUL))
    counts = []
    for _ in range(12):
        client.send(client.tokens(1100))
        counts.append(num_on_trial(client))
    left = [after - before for before, after in zip([0, *counts], counts, strict=False)]
    assert left[0] > 5
    assert max(left[5:]) <= 2


def test_a_prompt_that_continues_a_conversation_leaves_none() -> None:
    client = Client(ours(PLENTIFUL))
    _, path = client.send(client.tokens(300))
    before = num_on_trial(client)
    client.send(path + client.tokens(600))
    assert before > 0
    assert num_on_trial(client) == before


def test_none_is_left_above_a_host_that_is_half_full_and_none_takes_the_place_of_a_copy() -> None:
    client = Client(ours(FULL_HOST))
    tier = client.replay.cache.tree_core.tier
    while tier.is_half_free:
        client.send(client.tokens(300))
    before, copies = num_on_trial(client), tier.copies.num_states
    client.send(client.tokens(600))
    assert num_on_trial(client) <= before
    assert tier.copies.num_states >= copies


def test_the_allowance_is_earned_by_those_that_are_used() -> None:
    allowance = Trials()
    assert allowance.num_allowed == MAX_TRIALS
    allowance.left(48, 0)
    assert allowance.num_allowed == 0
    allowance.resumed()
    assert allowance.num_allowed == 8
    for _ in range(20):
        allowance.evicted()
    assert allowance.num_allowed == 0
    allowance.left(0, 4 * 20)
    assert allowance.num_allowed == 8


def test_a_prompt_of_any_length_spreads_them_evenly() -> None:
    for num_tokens in range(0, 5000, 37):
        depths = trials.trial_depths(0, num_tokens, MAX_TRIALS)
        assert len(depths) <= MAX_TRIALS
        assert all(depth % CHUNK_TOKENS == 0 and 0 < depth < num_tokens for depth in depths)
        places = [0, *sorted(depths), num_tokens]
        longest = max(after - before for before, after in itertools.pairwise(places))
        assert longest <= max(3 * CHUNK_TOKENS, num_tokens / MAX_TRIALS + CHUNK_TOKENS)
