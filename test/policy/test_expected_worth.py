"""The worth of states near the end of prompts, held against a scan of the tree after every request and eviction."""

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from marconi.policy.admission.plan import Judicious
from marconi.policy.base import Costs, Need, Role
from marconi.policy.eviction.best import BestEviction
from marconi.policy.eviction.order import Order
from marconi.policy.forecast.forecast import Forecast, stratum_of
from marconi.policy.forecast.turns import MAX_DISTANCE, Turns
from marconi.policy.hybrid_cache import HybridCache
from marconi.policy.request import Lease, Request, pack
from marconi.tree import LeftBy, Node, RadixTree, check_invariants
from tree.faults import keep_to_itself

COSTS = Costs(kv_bytes_per_token=3, state_bytes=20, flops=float)
NEEDS = frozenset({Need.KV, Need.STATE})


class Server:
    """A tree that serves whole requests one after the other."""

    def __init__(self) -> None:
        self.turns = Turns()
        self.rule = BestEviction(COSTS, Forecast(self.turns), NEEDS)
        self.hybrid = HybridCache(RadixTree(max_ghosts=200), Judicious(), Order(self.rule), turns=self.turns)
        self.now_s = 0.0

    def lease(self, prompt: list[int]) -> Lease:
        request = Request(pack(prompt), len(prompt), 0, len(prompt), self.now_s)
        return Lease(request, self.hybrid.match(request))

    def serve(self, prompt: list[int], answer: list[int]) -> int:
        """Serve a request; the tokens that it found."""
        self.now_s += 1.0
        lease = self.lease(prompt)
        if lease.match.source is not None:
            self.hybrid.lock(lease.match.source)
        self.hybrid.begin(lease, self.now_s)
        plan = self.hybrid.plan(lease)
        if plan.depths:
            self.hybrid.insert(lease, plan.depths, self.now_s, trials=plan.trials)
        processed = [*prompt, *answer[:-1]]
        if len(processed) > max([lease.match.checkpoint.depth, *plan.depths]):
            whole = replace(
                lease.request, path=pack(processed), num_output_tokens=len(answer), num_known_tokens=len(processed)
            )
            self.hybrid.insert(Lease(whole, lease.match), [len(processed)], self.now_s)
        if lease.match.source is not None:
            self.hybrid.unlock(lease.match.source)
        return lease.match.checkpoint.depth

    def evict(self, need: Need) -> None:
        self.hybrid.evict(need, self.now_s)

    def states(self) -> list[Node]:
        return [node for node in self.hybrid.tree.nodes() if node.has_state]


def share_by_definition(turns: Turns, node: Node) -> float | None:
    """The share of `node`, by looking along its path; None for a state whose prompt was gone on from."""
    left_by = node.left_by
    if left_by is None or not left_by.is_open:
        return None
    end = left_by.num_prompt_tokens
    counts = {0: 1.0, 1: 0.9, 16: 0.4, 64: 0.4}
    for distance, count in turns._window(left_by.namespace, left_by.continued).counts.items():
        counts[distance] = counts.get(distance, 0.0) + count
    below, deeper = node, None
    while len(below.live_children) == 1 and deeper is None:
        (below,) = below.live_children
        if below.has_state:
            deeper = below
    nearest = -1
    if deeper is not None and deeper.left_by is left_by:
        nearest = max(end - deeper.depth, 0)
    furthest = max(end - node.depth, 0)
    return sum(count for x, count in counts.items() if nearest < x <= furthest) / sum(counts.values())


def words(rng: random.Random, num_tokens: int) -> list[int]:
    return [rng.randrange(10, 10_000) for _ in range(num_tokens)]


def random_run(server: Server, seed: int, num_steps: int) -> Iterator[None]:
    """Chats that drop some of what was said, repeats, questions about one text, and evictions; pauses after each."""
    rng = random.Random(seed)  # noqa: S311 - a workload, not a secret
    known: list[list[int]] = [words(rng, 150)]
    for _ in range(num_steps):
        draw = rng.random()
        if draw < 0.6:
            before = rng.choice(known[-6:])
            prompt = before[: len(before) - rng.choice([0, 0, 1, 3, 20, 70])]
            prompt = [*prompt, *words(rng, rng.choice([0, 5, 40, 150]))][:600] or [1]
            answer = words(rng, rng.choice([1, 2, 30]))
            server.serve(prompt, answer)
            known.append([*prompt, *answer])
            if rng.random() < 0.1:
                known.append(words(rng, 200))
        else:
            server.evict(rng.choice([Need.KV, Need.STATE]))
        check_invariants(server.hybrid.tree)
        yield


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_the_share_of_a_state_is_what_looking_along_its_path_says(seed: int) -> None:
    server, num_seen = Server(), 0
    for _ in random_run(server, seed, 400):
        for node in server.states():
            share = share_by_definition(server.turns, node)
            if share is not None and node.serial in server.rule.forecast._traits:
                stratum, weight = server.rule.forecast.standing(node, server.now_s)
                traits = server.rule.forecast._traits[node.serial]
                assert stratum == traits.rhythm
                assert weight == pytest.approx(server.rule.forecast.weight(stratum, traits.levels) * share)
                num_seen += share < 1
    assert num_seen > 200


def stale(server: Server) -> list[Node]:
    """States of the rule's order whose class is not the one that ranking them now would give."""
    found = []
    for node in server.states():
        if node.on_trial:
            continue
        before = server.rule._classes[Need.STATE].class_of(node)
        server.rule.update(node)
        if server.rule._classes[Need.STATE].class_of(node) != before:
            found.append(node)
    return found


def frozen(monkeypatch: pytest.MonkeyPatch) -> Server:
    """A server whose counts and rates stay as they are, so that the worth of a state hangs on the tree alone."""
    monkeypatch.setattr("marconi.policy.forecast.forecast.FIRST_FITS", frozenset())
    monkeypatch.setattr("marconi.policy.forecast.forecast.ARRIVALS_A_FIT", 1 << 30)
    monkeypatch.setattr(
        "marconi.policy.forecast.turns._Window.share",
        lambda self, nearest, furthest: (furthest - nearest) / (MAX_DISTANCE + 2),
    )
    return Server()


def test_every_state_is_ranked_again_when_what_its_worth_hangs_on_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    server = frozen(monkeypatch)
    for _ in random_run(server, 4, 300):
        assert stale(server) == []


def test_nothing_is_kept_of_states_that_were_passed_beyond_their_traits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("marconi.policy.forecast.forecast.MAX_TRAITS", 16)
    server, most = Server(), 0
    forecast = server.rule.forecast
    for _ in random_run(server, 4, 200):
        assert forecast._passed <= forecast._traits.keys()
        most = max(most, len(forecast._passed))
    assert most > 3


@pytest.mark.parametrize("note", ["_note_nearest_above", "_note_nearest_below"])
def test_a_tree_that_does_not_tell_of_a_neighbour_is_caught(note: str, monkeypatch: pytest.MonkeyPatch) -> None:
    server = frozen(monkeypatch)
    keep_to_itself(monkeypatch, note)
    assert any(stale(server) for _ in random_run(server, 4, 300))


def test_a_prompt_is_closed_when_a_request_goes_on_from_it_and_open_again_when_it_is_repeated() -> None:
    server, rng = Server(), random.Random(5)  # noqa: S311 - a workload, not a secret
    prompt, answer = words(rng, 200), words(rng, 10)
    server.serve(prompt, answer)
    own = [node for node in server.states() if not node.on_trial]
    assert {node.depth for node in own} == {184, 199, 209}
    assert all(node.left_by is not None and node.left_by.is_open for node in own)
    server.serve([*prompt[:190], *words(rng, 50)], [1])
    assert all(node.left_by is not None and not node.left_by.is_open for node in own)
    assert [node.depth for node in own if node.is_passed_over] == [199, 209]
    server.serve(prompt, answer)
    assert {node.depth for node in own if node.left_by is not None and node.left_by.is_open} >= {199, 209}


def test_of_a_prompt_that_was_gone_on_from_the_end_that_was_passed_over_is_evicted_before_anything_else() -> None:
    server, rng = Server(), random.Random(6)  # noqa: S311 - a workload, not a secret
    for _ in range(5):
        prompt, answer = words(rng, 200), words(rng, 10)
        server.serve(prompt, answer)
        server.serve([*prompt[:190], *words(rng, 50)], words(rng, 10))
    victim = server.hybrid.order.victim(Need.KV, server.now_s)
    assert isinstance(victim, Node)
    assert victim.is_passed_over


def test_what_was_evicted_too_early_raises_the_rate_of_its_prompt() -> None:
    """Prompts come again whose states are gone: as often as that is seen, what is like them waits for it."""
    index = []
    for repeats in (False, True):
        server, rng = Server(), random.Random(7)  # noqa: S311 - a workload, not a secret
        for _ in range(40):
            prompt = words(rng, 100)
            server.serve(prompt, [1, 2])
            while server.states():
                server.evict(Need.STATE)
            if repeats:
                assert server.serve(prompt, [1, 2]) == 0
                while server.states():
                    server.evict(Need.STATE)
        index.append(server.rule.forecast.index[stratum_of(Role.END, 0), 0])
    assert index[1] > 3 * index[0]


def planned(server: Server, prompt: list[int], depth: int, role: Role = Role.END) -> bool:
    """Whether a state at `depth` of a prompt that has come deserves a slot for which something must be evicted."""
    return server.hybrid.deserves(server.lease(prompt), depth, role, set(), Need.STATE, server.now_s)


def test_a_planned_state_deserves_a_slot_if_it_is_worth_more_than_the_least_that_holds_one() -> None:
    server, rng = Server(), random.Random(8)  # noqa: S311 - a workload, not a secret
    assert not planned(server, words(rng, 500), 499), "nothing can be evicted"
    server.serve(words(rng, 100), words(rng, 40))
    while len(server.states()) > 1:
        server.evict(Need.STATE)
    assert planned(server, words(rng, 400), 399)
    assert not planned(server, words(rng, 10), 9)
    assert not planned(server, words(rng, 400), 399, Role.PASSED)


def test_a_planned_state_takes_no_slot_of_one_that_a_request_waits_for() -> None:
    server, rng = Server(), random.Random(9)  # noqa: S311 - a workload, not a secret
    server.serve(words(rng, 50), [1, 2])
    for number, node in enumerate(server.states()):
        server.hybrid.queue((), [(number, node)])
    assert not planned(server, words(rng, 5000), 4999)


def test_a_prompts_states_are_noted_with_its_name_space_and_the_answer_with_its_closing() -> None:
    server, rng = Server(), random.Random(10)  # noqa: S311 - a workload, not a secret
    server.serve(words(rng, 100), words(rng, 5))
    assert {node.left_by for node in server.states()} == {LeftBy(100, continued=False)}
