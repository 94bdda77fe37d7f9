"""A dispatcher weighs what each worker has and what is ahead of it, and forgets nothing and no one."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marconi.events.base import Batch, KvStored, StateStored, StoreReach, WorkerLoad
from marconi.events.hashes import HashSpace
from marconi.model.latency import LatencyModel
from marconi.router.dispatch import HELD_S, Dispatcher, Held, Prompt, Ticket, prompt_of
from marconi.router.index import Chain, FleetIndex
from marconi.router.load_report import LoadReport
from marconi.router.routing import ROUTINGS, Reason, routing_of
from marconi.router.sync import Fleet

BLOCK = 4
SPACE = HashSpace.of("m", None, None)


class Linear(LatencyModel):
    """A second for each token that is not cached."""

    def seconds(self, num_cached_tokens: int, num_prompt_tokens: int) -> float:
        assert 0 <= num_cached_tokens < num_prompt_tokens
        return float(num_prompt_tokens - num_cached_tokens)

    def smallest_cached_tokens(self, num_prompt_tokens: int, budget_s: float) -> int | None:
        raise AssertionError("not asked of a router's")


def dispatcher(*names: str, routing: str = "state-aware") -> Dispatcher:
    made = Dispatcher(Fleet(FleetIndex(BLOCK)), routing_of(routing, Linear()), Linear())
    for name in names:
        made.add_worker(name)
    return made


def prompt(*ids: int) -> Prompt:
    return prompt_of(ids, SPACE, BLOCK)


def test_a_request_goes_where_a_state_of_its_prompt_is() -> None:
    known = prompt(*range(9))
    for holder in ("a", "b", "c"):
        router = dispatcher("a", "b", "c")
        events = (
            KvStored(tuple(known.chain.hashes), None, SPACE.namespace, BLOCK),
            StateStored(known.chain.hashes[-1], 8, SPACE.namespace),
        )
        router.fleet.receive(Batch(holder, 1, 0, events), 0.0)
        ticket = router.dispatch(prompt(*range(8), 99, 100), 0.0)
        assert (ticket.worker, ticket.decision.worker.num_hit_tokens, ticket.prefill_s) == (holder, 8, 2.0)


def test_a_state_within_a_block_is_found_by_the_prompts_own_tail() -> None:
    router = dispatcher("a", "b")
    ids = tuple(range(12))
    whole = prompt(*ids)
    assert whole.chain.tail is not None
    part = whole.chain.tail(6)
    assert part is not None
    first = whole.chain.hashes[0]
    events = (
        KvStored((first,), None, SPACE.namespace, BLOCK),
        KvStored((part,), first, SPACE.namespace, 2),
        StateStored(part, 6, SPACE.namespace),
    )
    router.fleet.receive(Batch("b", 1, 0, events), 0.0)
    assert router.dispatch(whole, 0.0).decision.worker.num_hit_tokens == 6
    other = router.dispatch(prompt(*range(5), 77, 78, 79), 100.0)
    assert other.decision.worker.num_hit_tokens == 0, "the same block of KV, another partial one"


def test_what_any_worker_put_into_a_store_is_read_by_all_that_have_it() -> None:
    known, store = prompt(*range(40)), 7
    stored = known.chain.within(store)
    events = (
        KvStored(tuple(stored.hashes), None, stored.namespace, BLOCK),
        StateStored(stored.hashes[-1], 36, stored.namespace),
    )
    router = dispatcher("a", "b", "c")
    router.fleet.receive(Batch("a", 1, 0, events), 0.0)
    for name, reach in (("a", StoreReach(store, 0.1, 1.0)), ("b", StoreReach(store, 0.1, 1.0)), ("c", None)):
        router.fleet.sync(name).load_report = LoadReport(WorkerLoad(0, 0, 8, 0, store=reach), 0.0, 0.0, 1e6)
    first, second, third = (router.dispatch(known, 0.0, among=[name]) for name in "abc")
    assert [each.prefill_s for each in (first, second, third)] == [pytest.approx(3.6 + 1 + 4)] * 2 + [40.0]
    assert [each.decision.worker.num_stored_tokens for each in (first, second, third)] == [36, 36, 0]
    assert [each.num_cached_tokens for each in (first, second, third)] == [0, 0, 0], "none of it is on a device"


def test_a_tail_ends_in_a_block_of_the_prompt_before_its_last_token() -> None:
    tail = prompt(*range(10)).chain.tail
    assert tail is not None
    assert [depth for depth in range(15) if tail(depth) is not None] == [1, 2, 3, 5, 6, 7, 9]
    other = prompt(0, 1, 2, 3, 4, 5, 6, 9, 9, 9).chain.tail
    assert other is not None
    assert tail(6) == other(6)
    assert tail(9) != other(9)


def test_a_name_space_has_hashes_and_keys_of_its_own() -> None:
    ids = range(9)
    prompts = [
        prompt_of(ids, HashSpace.of("m", extra, salt), BLOCK) for extra in (None, "x") for salt in (None, "x", "y")
    ]
    assert len({each.key for each in prompts}) == len(prompts)
    assert len({(each.chain.namespace, tuple(each.chain.hashes)) for each in prompts}) == len(prompts)


@pytest.mark.parametrize(
    ("ids", "words"), [((), "0 tokens"), ((3, -1), "a token id must be 0 or more, got -1"), ((1 << 63,), "63 bits")]
)
def test_ids_that_cannot_be_are_refused_by_name(ids: tuple[int, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        prompt_of(ids, SPACE, BLOCK)


def test_the_next_turn_goes_to_the_same_worker_before_that_has_told_of_the_first() -> None:
    router = dispatcher("a", "b", "c", "d")
    ids = list(range(40))
    first = router.dispatch(prompt(*ids), 0.0)
    router.ended(first, 1.0)
    following = router.dispatch(prompt(*ids, *range(100, 110)), 2.0)
    assert following.worker == first.worker
    assert following.decision.worker.num_hit_tokens == 36
    expired = router.dispatch(prompt(*ids, 200), 2.0 + router.fleet.limits.guess_s)
    assert expired.decision.worker.num_hit_tokens == 0


def test_a_prompt_that_nobody_holds_any_more_goes_back_to_who_served_it_last() -> None:
    for holder in ("a", "b", "c"):
        router = dispatcher("a", "b", "c")
        first = router.dispatch(prompt(*range(40)), 0.0, among=(holder,))
        router.ended(first, 1.0)
        forgotten_s = 1.0 + router.fleet.limits.guess_s
        again = router.dispatch(prompt(*range(40), 7, 8), forgotten_s)
        assert (again.worker, again.decision.reason) == (holder, Reason.AFFINITY)
        other = router.dispatch(prompt(*range(100, 150)), forgotten_s)
        assert (other.worker != holder, other.decision.reason) == (True, Reason.COLD), "the others are less warm"


def test_work_ahead_is_what_was_not_answered_less_what_was_done() -> None:
    router = dispatcher("a")
    tickets = [router.dispatch(Prompt(Chain(b"", ()), 10, b"k"), 0.0) for _ in range(3)]
    assert router.work_ahead_s("a", 0.0) == 30.0
    assert router.work_ahead_s("a", 4.0) == 26.0
    assert router.work_ahead_s("a", 400.0) == 20.0, "never more than the first is counted as done"
    router.answered(tickets[0], 12.0)
    assert router.work_ahead_s("a", 12.0) == 20.0
    assert router.work_ahead_s("a", 13.0) == 19.0
    router.ended(tickets[2], 13.0)
    assert router.work_ahead_s("a", 13.0) == 9.0
    router.answered(tickets[1], 22.0)
    assert router.work_ahead_s("a", 23.0) == 0.0
    assert router.num_running("a") == 2


def held_s(router: Dispatcher, worker: str, now_s: float) -> float:
    """How long its requests are held, as the router knows it."""
    return router.load(worker, now_s).held.mean_s(now_s)


def test_a_full_worker_lets_the_next_wait_until_one_of_those_that_run_ends() -> None:
    """Two run at once. The third waits until one of them ends, and the fourth for the third as well."""
    router = dispatcher("a")

    def begin(now_s: float) -> Ticket:
        return router.dispatch(Prompt(Chain(b"", ()), 10, b"k"), now_s)

    first, second = begin(0.0), begin(0.0)
    router.answered(first, 10.0)
    router.answered(second, 20.0)
    router.ended(first, 60.0)
    router.answered(begin(60.0), 70.0)
    third = begin(70.0)
    assert router.work_ahead_s("a", 80.0) == 0.0, "its prefill should be done"
    assert router.work_ahead_s("a", 90.0) == held_s(router, "a", 90.0), "it is late, so it waits for room"
    router.ended(second, 100.0)
    router.answered(third, 110.0)
    one_s = held_s(router, "a", 110.0)
    assert router.work_ahead_s("a", 110.0) == max(one_s / 2, one_s - 40.0), "when a late one was answered two ran"
    router.answered(begin(110.0), 120.0)
    one_s = held_s(router, "a", 120.0)
    assert router.work_ahead_s("a", 120.0) == max(one_s / 3, one_s - 50.0), "three ran at once, and none was late"
    router.check_invariants()


def full(router: Dispatcher, worker: str, answered_s: tuple[float, ...]) -> list[Ticket]:
    """As many requests on a worker as it told to take, answered at these times."""
    router.fleet.sync(worker).load_report = LoadReport(WorkerLoad(0, 0, len(answered_s), 0), 0.0, 0.0, 1e6)
    tickets = [router.dispatch(Prompt(Chain(b"", ()), 1, b"k"), 0.0, among=(worker,)) for _ in answered_s]
    for ticket, at_s in zip(tickets, answered_s, strict=True):
        router.answered(ticket, at_s)
    return tickets


def test_requests_that_were_answered_together_end_together() -> None:
    """A worker of four that was filled at once has no room before one was held; one in its stride has after a part."""
    router = dispatcher("a", "b", "c")
    for number in range(100):
        (one,) = full(router, "c", (100.0 * number,))
        router.ended(one, 100.0 * (number + 1))
    now_s = 10_000.0
    full(router, "b", (now_s, now_s + 25, now_s + 50, now_s + 75))
    now_s += 75
    full(router, "a", (now_s, now_s, now_s, now_s))
    one_s = held_s(router, "a", now_s)
    assert one_s == pytest.approx(100.0, rel=0.1), "as long as requests are held elsewhere"
    assert router.work_ahead_s("a", now_s) == one_s
    one_s = held_s(router, "b", now_s)
    assert router.work_ahead_s("b", now_s) == max(one_s / 4, one_s - 75.0)
    overdue_s = now_s + 1_000
    in_turn_s = held_s(router, "b", overdue_s) / 4
    assert router.work_ahead_s("b", overdue_s) == in_turn_s, "an answer that is overdue may still be long"
    waiting = router.dispatch(Prompt(Chain(b"", ()), 1, b"k"), overdue_s, among=("b",))
    assert router.work_ahead_s("b", overdue_s) == 2 * in_turn_s, "the second end"
    router.ended(waiting, overdue_s)


def test_until_a_request_has_ended_a_worker_that_is_full_is_taken_to_be_busy_for_as_long_as_others_have_run() -> None:
    router = dispatcher("a")
    full(router, "a", (10.0, 10.0))
    assert router.work_ahead_s("a", 10.0) == HELD_S
    assert held_s(router, "a", 110.0) >= HELD_S + 2 * 100.0
    assert router.work_ahead_s("a", 110.0) == held_s(router, "a", 110.0) - 100.0


def test_how_long_requests_are_held_counts_those_that_still_run_while_a_fleet_fills() -> None:
    """Thirty begin at once and are held 1 to 30 s, 15.5 in the mean; those that have ended by then 2 s."""
    fleet = Held()
    workers = [Held(fleet) for _ in range(3)]
    for number in range(30):
        workers[number % 3].begin(0.0)
    for number in range(3):
        workers[number % 3].end(0.0, 1.0 + number, is_served=True)
    for each in (fleet, *workers):
        assert 15.5 <= each.mean_s(3.0) <= 2 * 15.5


def test_how_long_requests_are_held_is_their_mean_in_the_steady_state() -> None:
    for num_together in (1, 7):
        held = Held()
        for step in range(1_000):
            held.begin(float(step))
            if step >= num_together:
                held.end(float(step - num_together), float(step), is_served=True)
        assert held.mean_s(1_000.0) == pytest.approx(num_together, rel=0.15)


def test_control_a_worker_whose_answers_are_in_time_has_room() -> None:
    router = dispatcher("a")
    for number in range(20):
        ticket = router.dispatch(Prompt(Chain(b"", ()), 10, b"k"), 10.0 * number)
        router.answered(ticket, 10.0 * (number + 1))
    assert (router.num_running("a"), router.work_ahead_s("a", 200.0)) == (20, 0.0)


def test_a_request_that_its_worker_refused_is_as_if_it_had_not_been_dispatched() -> None:
    router = dispatcher("a", "b")
    long = prompt(*range(4000))
    refused = router.dispatch(long, 0.0, among=("a",))
    router.refused(refused, 1.0)
    assert (router.num_running("a"), router.work_ahead_s("a", 1.0), router.affinity.warm_tokens("a", 1.0)) == (0, 0, 0)
    assert (router.affinity.seen(long.chain), len(router.fleet.guesses)) == (None, 0)
    router.refused(refused, 2.0)
    router.ended(refused, 2.0)
    router.check_invariants()
    cold = [router.dispatch(prompt(1, 2, 3, 4, number, number), 3.0).worker for number in range(100, 140)]
    assert set(cold) == {"a", "b"}, "none of them starves"


def test_a_request_that_was_refused_takes_no_expectation_of_another_with_it() -> None:
    router = dispatcher("a")
    served = router.dispatch(prompt(*range(9)), 0.0)
    refused = router.dispatch(prompt(*range(9)), 0.0)
    router.refused(refused, 1.0)
    assert router.dispatch(prompt(*range(9)), 1.0).decision.worker.num_hit_tokens == 8
    router.ended(served, 2.0)


def test_only_workers_among_those_told_are_taken() -> None:
    router = dispatcher("a", "b", "c")
    assert {router.dispatch(prompt(index, 1), 0.0, among=("b", "c")).worker for index in range(20)} == {"b", "c"}
    with pytest.raises(ValueError, match="a worker that can take it, got none of 3"):
        router.dispatch(prompt(1), 0.0, among=())


def test_tickets_of_a_worker_that_went_and_came_back_do_not_end_those_of_its_new_life() -> None:
    router = dispatcher("a")
    old = router.dispatch(prompt(*range(9)), 0.0)
    router.remove_worker("a")
    router.add_worker("a")
    new = router.dispatch(prompt(*range(9)), 1.0)
    assert new.decision.worker.num_hit_tokens == 0
    router.ended(old, 2.0)
    router.check_invariants()
    assert router.num_running("a") == 1
    router.ended(new, 3.0)
    assert router.num_running("a") == 0


@settings(max_examples=60)
@given(data=st.data(), routing=st.sampled_from(sorted(ROUTINGS)))
def test_whatever_happens_to_tickets_counts_agree_and_end_at_nothing(data: st.DataObject, routing: str) -> None:
    names = ("a", "b", "c")
    router = dispatcher(*names, routing=routing)
    tickets: list[Ticket] = []
    for step in range(data.draw(st.integers(1, 30))):
        now_s = float(step)
        action = data.draw(st.sampled_from(["dispatch", "dispatch", "answer", "end", "refuse", "restart"]))
        if action == "dispatch":
            tickets.append(router.dispatch(prompt(*range(data.draw(st.integers(1, 30)))), now_s))
        elif action == "restart":
            name = data.draw(st.sampled_from(names))
            router.remove_worker(name)
            router.add_worker(name)
        elif tickets:
            ticket = data.draw(st.sampled_from(tickets))
            {"answer": router.answered, "end": router.ended, "refuse": router.refused}[action](ticket, now_s)
        router.check_invariants()
    for ticket in tickets:
        router.ended(ticket, 100.0)
    router.check_invariants()
    assert all(router.num_running(name) == 0 and router.work_ahead_s(name, 100.0) == 0 for name in names)


def test_another_fleets_index_is_followed_by_all_workers_in_its_own_blocks() -> None:
    router = dispatcher("a", "b")
    old = router.dispatch(prompt(*range(9)), 0.0)
    router.use_fleet(Fleet(FleetIndex(2 * BLOCK)))
    ids = list(range(40))
    known = prompt_of(ids, SPACE, 2 * BLOCK)
    first = router.dispatch(known, 1.0)
    seen = router.affinity.seen(prompt_of([*ids, 7], SPACE, 2 * BLOCK).chain)
    assert seen is not None
    assert seen[:2] == (first.worker, 32)
    for ticket in (old, first):
        router.ended(ticket, 2.0)
    assert router.dispatch(prompt_of([*ids, 7], SPACE, 2 * BLOCK), 2.0).decision.worker.num_hit_tokens == 32
    router.check_invariants()


def test_what_a_worker_is_known_to_have_is_not_guessed() -> None:
    router = dispatcher("a")
    known = prompt(*range(9))
    events = (
        KvStored(tuple(known.chain.hashes), None, SPACE.namespace, BLOCK),
        StateStored(known.chain.hashes[-1], 8, SPACE.namespace),
    )
    router.fleet.receive(Batch("a", 1, 0, events), 0.0)
    router.dispatch(known, 0.0)
    assert router.fleet.guesses.fates["made"] == 0
    router.dispatch(prompt(*range(13)), 0.0)
    assert router.fleet.guesses.fates["made"] == 1


def test_what_ends_without_being_served_says_nothing_of_how_long_requests_are_held() -> None:
    router = dispatcher("a")
    tickets = [router.dispatch(Prompt(Chain(b"", ()), 10, b"k"), 0.0) for _ in range(2)]
    for ticket in tickets:
        router.answered(ticket, 20.0)
    before_s = held_s(router, "a", 20.0)
    router.refused(tickets[0], 99_999.0)
    router.refused(tickets[1], 99_999.0)
    assert held_s(router, "a", 99_999.0) == pytest.approx(before_s)


def test_answers_that_nobody_saw_begin_say_nothing_of_room() -> None:
    """Of a whole answer only the time at which its prefill should have ended is known."""
    router = dispatcher("a")
    first, second = (router.dispatch(Prompt(Chain(b"", ()), 10, b"k"), 0.0) for _ in range(2))
    router.answered(first, 10.0, is_seen=False)
    router.answered(second, 500.0, is_seen=False)
    router.ended(first, 1_000.0)
    assert router.work_ahead_s("a", 1_000.0) == 0.0


def test_a_late_answer_beside_which_nothing_ran_waited_for_nothing() -> None:
    router = dispatcher("a")
    router.answered(router.dispatch(Prompt(Chain(b"", ()), 10, b"k"), 0.0), 500.0)
    assert router.work_ahead_s("a", 500.0) == 0.0


def test_a_guess_is_renewed_by_a_request_that_rests_on_it() -> None:
    router = dispatcher("a")
    router.dispatch(prompt(*range(13)), 0.0)
    router.dispatch(prompt(*range(13)), 8.0)
    assert router.fleet.guesses.fates["made"] == 1
    assert router.dispatch(prompt(*range(13)), 15.0).decision.worker.num_hit_tokens == 12


def test_a_prompt_that_continues_another_asks_for_no_state_where_that_ended() -> None:
    """A conversation's next turn on another worker; what parts from a prompt in its midst does ask, as others will."""
    router = dispatcher("a", "b")
    first = tuple(range(4000))
    router.dispatch(prompt(*first), 0.0, among=("a",))
    parted = router.dispatch(prompt(*first[:2000], *range(9000, 10_000)), 1.0, among=("b",))
    assert 1_000 < parted.decision.shared_tokens <= 2_000
    router = dispatcher("a", "b")
    router.dispatch(prompt(*first), 0.0, among=("a",))
    assert router.dispatch(prompt(*first, *range(9000, 10_000)), 1.0, among=("b",)).decision.shared_tokens == 0
