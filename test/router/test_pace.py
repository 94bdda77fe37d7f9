"""Workers of unequal speed are ranked by what each of them took, and equal ones as equal."""

from random import Random

import pytest

from marconi.events.base import Batch, KvStored, StateStored
from marconi.events.hashes import HashSpace
from marconi.model.learned_latency import LearnedLatency
from marconi.router.dispatch import Dispatcher, Prompt, prompt_of
from marconi.router.index import FleetIndex
from marconi.router.pace import EQUAL, FORGOTTEN_S, MIN_OBSERVED, Paces, Timed
from marconi.router.routing import ROUTINGS, routing_of
from marconi.router.sync import Fleet

BLOCK = 4
SPACE = HashSpace.of("m", None, None)
S_PER_TOKEN = 0.001
OVERHEAD_S = 0.01


def taught(speeds: dict[str, float], routing: str = "state-aware", num_each: int = 40) -> Dispatcher:
    """A router whose workers each served prompts of 100 to 1,000 tokens, `speeds` times as slow as the first."""
    latency = LearnedLatency(float)
    made = Dispatcher(Fleet(FleetIndex(BLOCK)), routing_of(routing, latency), latency)
    rng = Random(1)  # noqa: S311 - made-up traffic
    for name in speeds:
        made.add_worker(name)
    for _ in range(num_each):
        for name, slow in speeds.items():
            made.paces.observe(latency, name, prefill(rng.randint(100, 1000), slow), 0.0)
    return made


def prefill(num_tokens: int, slow: float, num_passes: int | None = None, waited_s: float = 0.0) -> Timed:
    seconds = slow * (OVERHEAD_S * (num_passes or 1) + S_PER_TOKEN * num_tokens)
    return Timed(0, num_tokens, seconds, num_passes, waited_s)


def hold(router: Dispatcher, worker: str, prompt: Prompt, num_tokens: int) -> None:
    """Have a worker hold a prompt up to a state after so many tokens."""
    hashes = tuple(prompt.chain.hashes[: num_tokens // BLOCK])
    stored = KvStored(hashes, None, SPACE.namespace, BLOCK)
    router.fleet.receive(Batch(worker, 1, 0, (stored, StateStored(hashes[-1], num_tokens, SPACE.namespace))), 0.0)


@pytest.mark.parametrize("routing", ["state-aware", "kv-only"])
def test_a_hit_on_a_slow_worker_is_weighed_by_that_workers_own_prefills(routing: str) -> None:
    """Half the prompt on a worker four times as slow takes twice what the whole takes on the other."""
    prompt = prompt_of(range(1001), SPACE, BLOCK)
    router = taught({"fast": 1.0, "slow": 4.0}, routing)
    hold(router, "slow", prompt, 500)
    ticket = router.dispatch(prompt, 1.0)
    assert ticket.worker == "fast"
    expected_s = OVERHEAD_S + S_PER_TOKEN * 1001
    assert (ticket.prefill_s, ticket.decision.expected_ttft_s) == (pytest.approx(expected_s, rel=0.15),) * 2
    assert router.dispatch(prompt_of(range(5000, 6001), SPACE, BLOCK), 1.0, ["slow"]).prefill_s == pytest.approx(
        4 * expected_s, rel=0.15
    )


@pytest.mark.parametrize("routing", ["state-aware", "kv-only"])
def test_control_the_fleets_fit_alone_chooses_the_slow_worker(routing: str) -> None:
    prompt = prompt_of(range(1001), SPACE, BLOCK)
    router = taught({"fast": 1.0, "slow": 4.0}, routing)
    router.paces = Paces()
    for name in router.workers:
        router.paces.add_worker(name)
    hold(router, "slow", prompt, 500)
    assert router.dispatch(prompt, 1.0).worker == "slow"


@pytest.mark.parametrize("routing", sorted(ROUTINGS))
def test_the_expected_first_token_is_the_chosen_workers_own(routing: str) -> None:
    router = taught({"fast": 1.0, "slow": 4.0}, routing)
    for name, slow in (("fast", 1.0), ("slow", 4.0)):
        ticket = router.dispatch(prompt_of(range(1000), SPACE, BLOCK), 1.0, [name])
        assert ticket.decision.expected_ttft_s == pytest.approx(slow * (OVERHEAD_S + S_PER_TOKEN * 1000), rel=0.15)
        router.refused(ticket, 1.0)


def test_which_worker_has_the_traffic_changes_no_pace_beside_another() -> None:
    router = taught({"fast": 1.0, "slow": 4.0})
    latency = router.latency
    assert isinstance(latency, LearnedLatency)
    for name, slow in (("slow", 4.0), ("fast", 1.0)):
        for number in range(300):
            router.paces.observe(latency, name, prefill(100 + 3 * number, slow), 1.0)
        fast, slowly = (router.paces.of(each, 1.0) for each in ("fast", "slow"))
        assert slowly / fast == pytest.approx(4.0, rel=0.1)
        assert fast * latency.seconds(0, 1000) == pytest.approx(OVERHEAD_S + S_PER_TOKEN * 1000, rel=0.15)


def test_what_a_worker_saw_of_one_length_alone_holds_for_every_length() -> None:
    router = taught({"fast": 1.0})
    router.add_worker("slow")
    assert isinstance(router.latency, LearnedLatency)
    for _ in range(MIN_OBSERVED):
        router.paces.observe(router.latency, "slow", prefill(200, 3.0), 0.0)
    long = prompt_of(range(4000), SPACE, BLOCK)
    assert router.dispatch(long, 1.0, ["slow"]).prefill_s == pytest.approx(3 * (OVERHEAD_S + S_PER_TOKEN * 4000), 0.1)


def test_a_worker_is_as_fast_as_the_fleet_until_enough_of_it_was_timed() -> None:
    router = taught({"a": 1.0})
    router.add_worker("b")
    assert isinstance(router.latency, LearnedLatency)
    paces = []
    for _ in range(MIN_OBSERVED):
        paces.append(router.paces.of("b", 0.0))
        router.paces.observe(router.latency, "b", prefill(500, 3.0), 0.0)
    assert paces == [1.0] * MIN_OBSERVED
    assert router.paces.of("b", 0.0) == pytest.approx(3.0, rel=0.05)


def test_a_small_difference_is_no_difference() -> None:
    router = taught({"a": 1.0, "b": 0.95 * EQUAL, "c": 1.0})
    assert [router.paces.of(name, 0.0) for name in "abc"] == [1.0] * 3


def test_what_waited_for_room_says_nothing_of_its_workers_speed() -> None:
    router = taught({"a": 1.0, "b": 1.0})
    assert isinstance(router.latency, LearnedLatency)
    for _ in range(40):
        router.paces.observe(router.latency, "b", prefill(500, 9.0, waited_s=0.1), 0.0)
    assert router.paces.of("b", 0.0) == 1.0


def test_whole_answers_tell_the_pace_while_nothing_else_does() -> None:
    latency, paces = LearnedLatency(float), Paces()
    rng = Random(2)  # noqa: S311 - made-up traffic
    for name in ("fast", "slow"):
        paces.add_worker(name)
    for _ in range(60):
        for name, slow in (("fast", 1.0), ("slow", 3.0)):
            paces.observe(latency, name, prefill(rng.randint(100, 1000), slow, rng.randint(1, 30)), 0.0)
    assert paces.of("slow", 0.0) / paces.of("fast", 0.0) == pytest.approx(3.0, rel=0.1)


def test_a_pace_outlives_another_index_but_neither_silence_nor_the_worker() -> None:
    router = taught({"fast": 1.0, "slow": 4.0})
    slow = router.paces.of("slow", 0.0)
    assert slow > EQUAL
    router.use_fleet(Fleet(FleetIndex(8)))
    assert router.paces.of("slow", FORGOTTEN_S - 1) == slow
    assert router.paces.of("slow", FORGOTTEN_S) == 1.0, "it is tried again"
    router.remove_worker("slow")
    router.add_worker("slow")
    assert router.paces.of("slow", 0.0) == 1.0
    assert isinstance(router.latency, LearnedLatency)
    router.paces.observe(router.latency, "removed", prefill(500, 9.0), 0.0)
    with pytest.raises(KeyError):
        router.paces.of("removed", 0.0)
