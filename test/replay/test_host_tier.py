"""Host tiers below a server: by worth and as stock has it. Nothing is lost, what is loaded was there, and it pays."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from marconi.policy.base import Costs, Eviction, Need
from marconi.policy.catalog import SGLANG_MAMBA_RATIO, PolicyInputs, PolicySpec
from marconi.policy.eviction.best import BestEviction
from marconi.policy.eviction.lru import SeparateLru
from marconi.policy.eviction.order import Order
from marconi.policy.forecast.forecast import Forecast
from marconi.policy.host_tier import NEEDS, HostMemory, HostTier, LoadTimes, Tier, WritePolicy
from marconi.policy.hybrid_cache import HybridCache
from marconi.policy.request import Request, Trace, pack
from marconi.replay.catalog import build, known_policies, require_possible
from marconi.replay.pools import JointPool, Pool, TwoPools
from marconi.replay.scheduling import Scheduling
from marconi.replay.server import ServerReplay
from marconi.replay.stock_tier import StockTier
from marconi.replay.target import CacheConfig, Host
from marconi.tree import HostCopy, RadixTree, check_invariants
from marconi.tree.invariants import check_host

from .worlds import COSTS, SecondAToken, conversations, request

PREFILL = SecondAToken()
TRACE = conversations(num_sessions=9, num_turns=8)
KV, STATES = 160, 9
"""Of the device: some two conversations."""


def times(bytes_per_s: float = 1e6) -> LoadTimes:
    return LoadTimes(COSTS, PREFILL.seconds, bytes_per_s, least_tokens=1)


class Server:
    """A server with a host tier of either kind."""

    def __init__(
        self,
        make: Callable[[RadixTree], Tier | None],
        pools: Pool | None = None,
        rule: Eviction | None = None,
        unit_tokens: int = 1,
    ) -> None:
        self.tree = RadixTree(unit_tokens, max_ghosts=50)
        self.tier = make(self.tree)
        admission = (
            known_policies()["lru-joint"]
            .rules(PolicyInputs(costs=COSTS, needs=NEEDS, unit_tokens=unit_tokens))
            .admission
        )
        hybrid = HybridCache(self.tree, admission, Order(rule or SeparateLru(NEEDS)), host=self.tier)
        self.replay = ServerReplay(hybrid, pools or TwoPools(KV, STATES), Scheduling())

    def serve(self, trace: Trace) -> list[int]:
        """The hits of each request; what must hold does after each."""
        hits = []
        for each in trace.requests:
            hits.append(self.replay.serve(each))
            self.check()
        return hits

    def check(self) -> None:
        check_invariants(self.tree)
        self.replay.check_invariants()


def by_worth(
    memory: HostMemory, rule: Callable[[], Eviction] = lambda: SeparateLru(NEEDS), bytes_per_s: float = 1e6
) -> Callable[[RadixTree], HostTier]:
    return lambda tree: HostTier(tree, Order(rule()), memory, times(bytes_per_s))


def as_stock(memory: HostMemory, policy: WritePolicy) -> Callable[[RadixTree], StockTier]:
    return lambda tree: StockTier(tree, memory, times(), policy)


PLENTY = HostMemory(100_000, 1_000)
LITTLE = HostMemory(200, 6)
KINDS = {
    "worth": by_worth,
    "write-through": lambda memory: as_stock(memory, WritePolicy.THROUGH),
    "write-back": lambda memory: as_stock(memory, WritePolicy.BACK),
}


def unbounded_hits(trace: Trace) -> list[int]:
    return Server(lambda tree: None, TwoPools(100_000, 1_000)).serve(trace)


@pytest.mark.parametrize(
    "of_device", [lambda: TwoPools(KV, STATES), lambda: JointPool(250, 1, 10)], ids=["two-pools", "one-pool"]
)
@pytest.mark.parametrize("memory", [PLENTY, LITTLE], ids=["plenty", "little"])
def test_neither_tier_holds_more_than_it_has_nor_anything_dead(
    memory: HostMemory, of_device: Callable[[], Pool]
) -> None:
    pools = of_device()
    needs = frozenset({pools.kv_need, pools.state_need})
    server = Server(by_worth(memory), pools, SeparateLru(needs))
    tier = server.tier
    assert isinstance(tier, HostTier)
    for each in TRACE.requests:
        server.replay.serve(each)
        server.check()
        check_host(server.tree, tier.copies)
        assert min(tier.room) >= 0
        assert not any(node.host_copy.num_locks for node in server.tree.nodes() if node.host_copy is not None)
    assert server.replay.counters.num_loads > 0
    assert (tier.num_dropped > 0) is (memory is LITTLE)


@pytest.mark.parametrize("kind", KINDS)
def test_with_a_host_for_everything_what_fits_the_device_hits_as_without_end(kind: str) -> None:
    """But for states that stood where the device had no slot for them."""
    bounded = sum(Server(lambda tree: None).serve(TRACE))
    tiered, unbounded = sum(Server(KINDS[kind](PLENTY)).serve(TRACE)), sum(unbounded_hits(TRACE))
    assert bounded < 0.75 * unbounded
    assert tiered > 0.95 * unbounded


def test_what_loads_no_faster_than_it_is_computed_is_neither_kept_nor_loaded() -> None:
    """A token a second is computed, and a state and a token are eleven bytes."""
    slow = Server(by_worth(PLENTY, bytes_per_s=1.0))
    assert slow.serve(TRACE) == Server(lambda tree: None).serve(TRACE)
    assert isinstance(slow.tier, HostTier)
    assert slow.tier.copies.num_states == 0


def test_a_copy_stays_while_it_is_loaded_though_the_host_has_no_room_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the device evicts for the load would take its place: the host has room for one state."""
    load, loaded = HybridCache.load, []

    def load_a_copy(hybrid: HybridCache, request: Request, depth: int, num_tokens: int) -> float:
        hosted = hybrid.match(request).hosted
        loaded.append((None if hosted is None else hosted.depth, depth))
        return load(hybrid, request, depth, num_tokens)

    monkeypatch.setattr(HybridCache, "load", load_a_copy)
    Server(by_worth(HostMemory(40, 1)), TwoPools(60, 3)).serve(TRACE)
    assert loaded
    assert all(hosted == depth for hosted, depth in loaded), loaded


def test_a_request_waits_for_its_load_and_computes_the_rest() -> None:
    server = Server(by_worth(PLENTY, bytes_per_s=20.0), TwoPools(30, 4))
    first = request("abcdefghijklmnop", "qrst", 0.0)
    server.replay.serve(first)
    server.replay.serve(request("ABCDEFGHIJKLMNOP", "QRST", 1.0))
    assert server.tree.match(first.path, 19).checkpoint.depth == 0
    assert server.replay.serve(request("abcdefghijklmnopqrst", "uvw", 2.0)) == 19
    counters = server.replay.counters
    assert (counters.num_loads, counters.num_loaded_tokens) == (1, 19)
    assert counters.load_s == pytest.approx((19 + 10) / 20.0)


class WatchedLru(SeparateLru):
    """Holds every victim against a scan of all copies."""

    def __init__(self) -> None:
        super().__init__(NEEDS)
        self.known: set[HostCopy] = set()
        self.num_victims = 0

    def update(self, node: object) -> None:
        assert isinstance(node, HostCopy)
        self.known.add(node)
        super().update(node)

    def discard(self, node: object) -> None:
        assert isinstance(node, HostCopy)
        self.known.discard(node)
        super().discard(node)

    def victim(self, need: Need, now_s: float) -> HostCopy | None:
        found = super().victim(need, now_s)
        held = [copy for copy in self.known if copy.is_held and not copy.num_locks]
        if need is Need.KV:
            held = [copy for copy in held if not copy.node.hosted_children]
            expected = min(held, key=lambda copy: (copy.last_pass_s, copy.serial))
        else:
            expected = min(held, key=lambda copy: (copy.last_hit_s, copy.serial))
        assert found is expected
        self.num_victims += 1
        return expected


@pytest.mark.parametrize("memory", [HostMemory(200, 1_000), HostMemory(100_000, 6), LITTLE])
def test_what_goes_is_what_a_scan_of_all_copies_finds(memory: HostMemory) -> None:
    rules: list[WatchedLru] = []

    def rule() -> Eviction:
        rules.append(WatchedLru())
        return rules[-1]

    Server(by_worth(memory, rule)).serve(TRACE)
    assert rules[0].num_victims > 20


def test_a_host_that_is_told_nothing_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostTier, "touch", lambda tier, node: None)
    with pytest.raises(AssertionError):
        Server(by_worth(LITTLE, WatchedLru)).serve(TRACE)


def test_the_forecast_is_one_for_both_tiers() -> None:
    """A state that went to the host is not gone: its life goes on, and ends in a use."""
    forecast = Forecast()
    of_host: list[BestEviction] = []

    def rule() -> Eviction:
        of_host.append(BestEviction(COSTS, forecast, NEEDS, times().worth_of))
        return of_host[-1]

    hits = Server(by_worth(LITTLE, rule), rule=BestEviction(COSTS, forecast, NEEDS)).serve(TRACE)
    policy = known_policies()["best"]
    inputs = PolicyInputs(costs=COSTS, needs=NEEDS)
    device = policy.rules(inputs).eviction
    found = policy.host_eviction(inputs, device, times())
    assert isinstance(device, BestEviction)
    assert isinstance(found, BestEviction)
    assert found.forecast is device.forecast
    assert sum(hits) > sum(Server(lambda tree: None, rule=BestEviction(COSTS, Forecast(), NEEDS)).serve(TRACE))


def test_a_policy_that_ranks_by_requests_is_refused_with_a_host_tier_and_named() -> None:
    """Nobody tells a rule for copies of requests: `gdsf`, `tail` and others once failed at the first copy."""
    config = CacheConfig(TRACE, COSTS, PREFILL, 10_000, host=Host(10_000, 1e9))
    for name, policy in known_policies().items():
        if policy.caches_blocks or policy.alternatives or policy.ranks_copies:
            continue
        number = None if policy.parameter is None or policy.parameter.default is not None else "1"
        with pytest.raises(ValueError, match=f"with a host tier the policy must be one of lru, .*, got {name}$"):
            require_possible(PolicySpec(name, number), config)


@pytest.mark.parametrize("name", [name for name, policy in known_policies().items() if policy.ranks_copies])
def test_a_policy_that_ranks_copies_serves_with_a_host_tier(name: str) -> None:
    """Documents that the device cannot hold at once, asked in turn."""
    spec = PolicySpec(name, "1" if name == "marconi-static" else None)
    documents = [Request(pack(range(300 * index, 300 * index + 200)), 200, 1, 200, float(index)) for index in range(5)]
    config = CacheConfig(Trace("documents", 1, tuple(documents * 4)), COSTS, PREFILL, 600, host=Host(10_000, 1e9))
    require_possible(spec, config)
    cache = build(spec, config)
    assert sum(cache.serve(document) for document in config.trace.requests) > 0
    assert cache.counters.num_loads > 0


def chat(name: str, turn: int, arrival_s: float) -> Request:
    letters = [chr(200 + 40 * ord(name) + index) for index in range(12 * (turn + 1))]
    return request("".join(letters[:-2]), "".join(letters[-2:]), arrival_s)


def usable(memory: HostMemory) -> list[int]:
    """The depths from which four chats can go on after they came in turn, under write-through."""
    server = Server(as_stock(memory, WritePolicy.THROUGH), TwoPools(18, 5))
    for index, name in enumerate("abcd"):
        server.replay.serve(chat(name, 0, float(index)))
    tier = server.tier
    assert isinstance(tier, StockTier)
    depths = []
    for name in "abcd":
        following = chat(name, 1, 9.0)
        match = server.replay.hybrid.match(following)
        depths.append(max(match.checkpoint.depth, tier.to_load(following, match)))
    return depths


def test_write_through_loses_what_the_host_has_no_room_for() -> None:
    """Copies of what the device holds as well are never given up there."""
    assert 0 not in usable(PLENTY)
    assert 0 in usable(HostMemory(24, 2))


@pytest.mark.parametrize("policy", WritePolicy)
@pytest.mark.parametrize("memory", [PLENTY, LITTLE, HostMemory(30, 2)])
def test_stocks_pools_are_never_overdrawn(memory: HostMemory, policy: WritePolicy) -> None:
    server = Server(as_stock(memory, policy), unit_tokens=4, pools=TwoPools(4 * KV, STATES))
    tier = server.tier
    assert isinstance(tier, StockTier)
    for each in conversations(num_sessions=9, num_turns=8, unit_tokens=4).requests:
        server.replay.serve(each)
        server.check()
        assert 0 <= tier._num_free_units <= memory.num_tokens // 4
        assert 0 <= tier._num_free_slots <= memory.num_slots
        units = [unit for root in tier._roots.values() for unit in below(root)]
        assert sum(unit.is_hosted for unit in units) == memory.num_tokens // 4 - tier._num_free_units
        assert sum(unit.has_state for unit in units) == memory.num_slots - tier._num_free_slots


def below(unit: object) -> list[object]:
    found = [unit]
    for each in found:
        found.extend(each.children.values())  # type: ignore[attr-defined]
    return found[1:]


def test_the_entries_that_stand_for_stock_have_stocks_tier() -> None:
    policies = {
        name: policy.write_policy for name, policy in known_policies().items() if policy.write_policy is not None
    }
    assert policies == {"lru": WritePolicy.THROUGH, "lru-write-back": WritePolicy.BACK}
    assert str(PolicySpec.parse("lru-write-back")) == "lru-write-back"


def agents(unit_tokens: int = 64) -> Trace:
    """Agents that begin one after the other and add four blocks a turn, one token of answer among them."""
    requests = []
    for session in range(40):
        path = pack(range(1000 * session, 1000 * session + 48))
        for turn in range(12):
            num_units = 4 + 4 * turn
            num_tokens = num_units * unit_tokens
            known = path[: len(path) // 48 * num_units]
            arrival_s = 20.0 * session + 10.0 * turn
            requests.append(Request(known, num_tokens, 1, num_tokens, arrival_s, session, turn))
    return Trace("agents", unit_tokens, tuple(sorted(requests, key=lambda each: each.arrival_s)))


SHORT, SHORTER = (153_600, 614_400), (80_000, 160_000)
"""Bytes of a device and of the host below it."""


def recomputed_tokens(policy: str, memory: tuple[int, int], served: Trace = agents()) -> int:  # noqa: B008 - frozen
    """On a device and a host tier, both divided as SGLang does."""
    costs = Costs(kv_bytes_per_token=10, state_bytes=640, flops=float)
    config = CacheConfig(served, costs, PREFILL, memory[0], SGLANG_MAMBA_RATIO, host=Host(memory[1], 1e9))
    cache = build(PolicySpec(policy), config)
    return sum(each.num_prompt_tokens - cache.serve(each) for each in served.requests)


@pytest.mark.parametrize("memory", [SHORT, SHORTER])
def test_in_sglangs_pools_worth_recomputes_no_more_than_stock_where_kv_is_short(memory: tuple[int, int]) -> None:
    stock = [recomputed_tokens(policy, memory) for policy in ("lru", "lru-write-back")]
    assert recomputed_tokens("best", memory) <= min(stock)


def test_worth_beyond_states_that_the_device_evicts_next_recomputes_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """A path was dropped from the host while the device still held its shallower states."""
    as_it_is = recomputed_tokens("best", SHORTER)
    monkeypatch.setattr(
        LoadTimes, "worth_of", lambda times, node, need: times.worth_between(node.checkpoint_depth_above, node.depth)
    )
    assert recomputed_tokens("best", SHORTER) > 1.1 * as_it_is


def test_costs_of_loading_are_those_of_the_link() -> None:
    found = LoadTimes(Costs(2, 30, float), PREFILL.seconds, 10.0)
    assert found.load_s(5) == pytest.approx((5 * 2 + 30) / 10.0)
    assert found.saved_s(10, 90, 100, 80) == pytest.approx(80 - (80 * 2 + 30) / 10.0)


class Floor:
    """Prefills that take a second at least, and a millisecond a token."""

    def seconds(self, num_cached_tokens: int, num_prompt_tokens: int) -> float:
        return max(1.0, (num_prompt_tokens - num_cached_tokens) / 1000)


def worth_per_token(times: LoadTimes, num_tokens: int) -> float:
    node = SimpleNamespace(depth=10_000, checkpoint_depth_above=10_000 - num_tokens, freed_tokens=num_tokens)
    return times.worth_of(node, Need.KV) / num_tokens  # type: ignore[arg-type]


def quadratic(num_tokens: int) -> float:
    """FLOPs of prefills whose every token takes one for each token before it."""
    return num_tokens**2 / 2


def test_the_last_tokens_of_a_path_are_worth_no_more_than_its_mean() -> None:
    times = LoadTimes(Costs(0, 0, quadratic), lambda cached, prompt: quadratic(prompt) - quadratic(cached), 1.0)
    assert worth_per_token(times, 100) == pytest.approx(10_000 / 2)
    assert worth_per_token(times, 10_000) == pytest.approx(10_000 / 2)


def test_what_is_saved_of_a_prefill_that_waits_for_memory_is_worth_its_seconds() -> None:
    """All but the last 100 of 10,000 tokens take no time here, and no token more FLOPs than another."""
    times = LoadTimes(Costs(0, 0, float), lambda cached, prompt: float(min(prompt - cached, 100)), 1.0)
    assert worth_per_token(times, 100) == pytest.approx(0.99)


def test_a_copy_saves_all_that_the_host_keeps_for_it_alone() -> None:
    """The state above it is on the device still, and is evicted from there soon."""
    times = LoadTimes(Costs(0, 0, float), PREFILL.seconds, 1.0)
    alone, beside = (
        SimpleNamespace(depth=100, checkpoint_depth_above=90, freed_tokens=freed_tokens) for freed_tokens in (100, 10)
    )
    assert times.worth_of(alone, Need.KV) == 100.0  # type: ignore[arg-type]
    assert times.worth_of(beside, Need.KV) == 10.0  # type: ignore[arg-type]
    assert times.worth_of(alone, Need.STATE) == 10.0, "a slot that the state above needs, too"  # type: ignore[arg-type]


def test_a_span_saves_what_it_adds_to_prefills_as_they_are_here() -> None:
    """Beside a prefill of one token every span of a second and less saves nothing; beside others each its part."""
    times = LoadTimes(Costs(0, 0, float), Floor().seconds, 1.0)
    assert worth_per_token(times, 500) == 0.0
    assert worth_per_token(times, 2000) == pytest.approx(0.0005, rel=0.01)
    for _ in range(500):
        times.resumed(1500)
    assert worth_per_token(times, 500) == pytest.approx(0.001, rel=0.01)
    assert worth_per_token(times, 2000) == pytest.approx(0.001, rel=0.01)


def test_a_tier_learns_what_prompts_that_start_from_a_state_compute() -> None:
    loads = times()
    server = Server(lambda tree: HostTier(tree, Order(SeparateLru(NEEDS)), PLENTY, loads), TwoPools(10_000, 500))
    for turn in range(300):
        server.replay.serve(chat("a", turn, float(turn)))
    assert server.replay.counters.num_states_hit == 299
    assert loads.num_new_tokens == pytest.approx(11.0, rel=0.05), "12 a turn, and all but the last were known"


@pytest.mark.parametrize(("mamba_ratio", "num_tokens", "num_slots"), [(1.0, 500, 50), (0.25, 800, 20), (None, 526, 47)])
def test_the_host_is_divided_as_the_devices_pools_and_beside_one_pool_as_sglang_does(
    mamba_ratio: float | None, num_tokens: int, num_slots: int
) -> None:
    costs = Costs(10, 100, float)
    made = CacheConfig(TRACE, costs, PREFILL, 10_000, mamba_ratio, host=Host(10_000, 1e9))  # type: ignore[arg-type]
    cache = build(PolicySpec("best"), made)
    assert isinstance(cache, ServerReplay)
    tier = cache.hybrid.host
    assert isinstance(tier, HostTier)
    assert tier.memory == HostMemory(num_tokens, num_slots)
