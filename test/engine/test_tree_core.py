"""The tree core loses no index and no slot, and never names as a victim what is in use."""

import random
from array import array
from types import SimpleNamespace

import pytest

pytest.importorskip("sglang", reason="the server extra is not installed: pip install '.[server]'")

import torch
from sglang.srt.mem_cache.base_prefix_cache import DecLockRefParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.cache_action import FreeDeviceKV
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

from marconi.engine.cache.device_only import NOT_SERVED
from marconi.engine.cache.tree_core import IDS_PER_TOKEN, ROOT, MarconiTreeCore, namespace_of, path_of
from marconi.engine.cache.waiting import paths_above
from marconi.engine.launch.policies import PolicyChoice, hybrid_cache
from marconi.model.learned_latency import LearnedLatency
from marconi.policy.base import Costs
from marconi.policy.catalog import SERVED

COSTS = Costs(kv_bytes_per_token=3, state_bytes=20, flops=lambda num_tokens: num_tokens * (num_tokens + 10))


class Pools:
    """Indices and slots, each free, the tree's, or a request's."""

    def __init__(self, num_tokens: int, num_slots: int) -> None:
        self.kv = list(range(1, num_tokens + 1))
        self.slots = list(range(1, num_slots + 1))


class Host:
    """Drives a core the way SGLang's cache does, one call at a time."""

    def __init__(self, choice: PolicyChoice, page: int, num_tokens: int, num_slots: int) -> None:
        self.now_s = 0.0
        self.page = page
        self.pools = Pools(num_tokens, num_slots)
        self.sizes = num_tokens, num_slots
        latency = LearnedLatency(COSTS.flops)
        for num in range(1, 20):
            latency.observe(0, num, COSTS.flops(num))
        params = SimpleNamespace(
            page_size=page, token_to_kv_pool_allocator=SimpleNamespace(device="cpu"), swa_retain_window=None
        )
        self.core = MarconiTreeCore(
            params,  # type: ignore[arg-type]
            lambda memory: hybrid_cache(choice, COSTS, page, page * IDS_PER_TOKEN, memory, latency),
            lambda: self.now_s,
        )
        self.locks: list[tuple[int, DecLockRefParams]] = []
        self.num_evictions = {ComponentType.FULL: 0, ComponentType.MAMBA: 0}

    def evict(self, component: ComponentType, num: int) -> None:
        tracker = {ComponentType.FULL: 0, ComponentType.MAMBA: 0}
        in_use = {int(index) for node, _ in self.locks for index in self.core.collect_full_device_indices(node, ROOT)}
        self.core.evict_device_start(component, num)
        while True:
            result = self.core.evict_device_next_node(component, tracker)
            kv = [int(index) for part in result.device_frees.pop(ComponentType.FULL, []) for index in part]
            slots = [int(slot) for part in result.device_frees.pop(ComponentType.MAMBA, []) for slot in part]
            assert not in_use & set(kv), "KV of a locked path was evicted"
            self.pools.kv += kv
            self.pools.slots += slots
            for each, count in result.tracker.items():
                tracker[each] += count
            if not result.made_progress:
                break
            self.num_evictions[component] += 1
        self.core.evict_device_end(component)

    def take_kv(self, num_tokens: int) -> list[int] | None:
        if len(self.pools.kv) < num_tokens:
            self.evict(ComponentType.FULL, num_tokens - len(self.pools.kv))
        if len(self.pools.kv) < num_tokens:
            return None
        taken, self.pools.kv = self.pools.kv[:num_tokens], self.pools.kv[num_tokens:]
        return taken

    def take_slot(self) -> int | None:
        if not self.pools.slots:
            self.evict(ComponentType.MAMBA, 1)
        return self.pools.slots.pop() if self.pools.slots else None

    def serve(self, key: RadixKey) -> int:
        """Match, lock, take memory, insert to the last whole page, unlock; returns the tokens that were hit."""
        self.now_s += 1.0
        match = self.core.match_prefix(MatchPrefixParams(key=key))
        assert match.cache_actions == [], "a list, which SGLang turns round in place"
        hit, node = match.device_prefix_len, match.last_device_node
        assert hit <= len(key)
        assert hit % self.page == 0
        self.lock(node)
        num_tokens = len(key.token_ids) // self.page * self.page
        kv = self.take_kv(num_tokens - hit)
        slot = self.take_slot() if kv is not None and num_tokens else None
        if kv is None or slot is None:
            self.pools.kv += kv or []
        else:
            row = torch.cat([self.core.collect_full_device_indices(node, ROOT), torch.tensor(kv, dtype=torch.int64)])
            whole = RadixKey(key.token_ids, key.extra_key, cache_salt=key.cache_salt)
            step = self.core.begin_insert(
                InsertParams(key=whole, value=row, mamba_value=torch.tensor([slot]), prev_prefix_len=hit)
            )
            assert step.result is not None
            for action in step.actions:
                assert isinstance(action, FreeDeviceKV)
                self.pools.kv += [int(index) for part in action.indices for index in part]
            if step.result.mamba_exist:
                self.pools.slots.append(slot)
            path = self.core.collect_full_device_indices(step.result.last_device_node, ROOT)
            assert len(path) == num_tokens
            assert path[step.result.prefix_len :].tolist() == row[step.result.prefix_len :].tolist()
        self.unlock(0 if len(self.locks) == 1 else -1)
        return hit

    def lock(self, node: int) -> None:
        self.locks.append((node, self.core.inc_lock_ref(node).to_dec_params()))

    def unlock(self, at: int) -> None:
        node, receipt = self.locks.pop(at)
        self.core.dec_lock_ref(node, receipt)

    def check(self) -> None:
        core = self.core
        core.sanity_check([], [])
        held, states = core.total_size()
        assert core.evictable_size() + core.protected_size() == held
        assert core.mamba_evictable_size() + core.mamba_protected_size() == states
        assert sorted(self.pools.kv + core.all_values_flatten().tolist()) == list(range(1, self.sizes[0] + 1))
        assert sorted(self.pools.slots + core.all_mamba_values_flatten().tolist()) == list(range(1, self.sizes[1] + 1))


def key_of(tokens: list[int], salt: str | None = None, limit: int | None = None) -> RadixKey:
    return RadixKey(array("q", tokens), None, cache_salt=salt, limit=limit)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("eviction", SERVED)
def test_no_index_and_no_slot_is_lost_under_pressure(eviction: str, page: int) -> None:
    rng = random.Random(f"{eviction} {page}")  # noqa: S311 - a workload, not a secret
    num_tokens, num_slots = (100, 6) if page == 1 else (140, 8)
    host = Host(PolicyChoice(eviction, ttft_budget_s=100.0, max_ghosts=20), page, num_tokens, num_slots)
    num_hits = 0
    for _ in range(800):
        letters = [rng.randrange(2) for _ in range(rng.randint(1, 30 // page))]
        tokens = [letter for letter in letters for _ in range(page)] + [7] * rng.randrange(page)
        limit = len(tokens) - 1 if rng.random() < 0.5 else None
        num_hits += host.serve(key_of(tokens, rng.choice([None, "tenant"]), limit)) > 0
        held = list(host.core.hybrid.tree.nodes())
        if held and rng.random() < 0.3 and len(host.locks) < 2:
            node = rng.choice([each for each in held if each.has_state])
            host.lock(host.core.handle(node))
        elif host.locks and rng.random() < 0.4:
            host.unlock(rng.randrange(len(host.locks)))
        host.check()
    assert num_hits > 5
    assert min(host.num_evictions.values()) > 10


def test_all_that_is_not_locked_can_be_had() -> None:
    """A branching state below which paths are locked is beyond any rule's scope, and counted as evictable: it goes."""
    host = Host(PolicyChoice("marconi"), 1, num_tokens=100, num_slots=6)
    for tail in ([7, 7], [8, 8], [9, 9]):
        host.serve(key_of([1, 2, 3, *tail]))
    host.serve(key_of([1, 2, 3]))
    tree = host.core.hybrid.tree
    for node in [each for each in tree.nodes() if each.depth == 5]:
        host.lock(host.core.handle(node))
    assert host.core.mamba_evictable_size() == 1
    host.evict(ComponentType.MAMBA, 1)
    assert host.core.mamba_evictable_size() == 0
    host.check()


def test_a_match_touches_nothing() -> None:
    """The scheduler matches what waits again and again: neither times nor order change."""
    host = Host(PolicyChoice("marconi"), 1, num_tokens=100, num_slots=6)
    host.serve(key_of([1, 2, 3]))
    before = [(node.last_hit_s, node.last_pass_s, node.num_hits) for node in host.core.hybrid.tree.nodes()]
    host.now_s = 50.0
    for _ in range(3):
        assert host.core.match_prefix(MatchPrefixParams(key=key_of([1, 2, 3, 4]))).device_prefix_len == 3
    assert before == [(node.last_hit_s, node.last_pass_s, node.num_hits) for node in host.core.hybrid.tree.nodes()]


def test_tenants_and_adapters_share_nothing() -> None:
    host = Host(PolicyChoice("marconi"), 1, num_tokens=100, num_slots=6)
    host.serve(key_of([1, 2, 3], "a"))
    assert host.core.match_prefix(MatchPrefixParams(key=key_of([1, 2, 3, 4], "b"))).device_prefix_len == 0
    assert host.core.match_prefix(MatchPrefixParams(key=key_of([1, 2, 3, 4], "a"))).device_prefix_len == 3
    assert len({namespace_of(*pair) for pair in ((None, None), ("a", None), (None, "a"), ("a", "a"))}) == 4
    assert namespace_of("ab", "c") != namespace_of("a", "bc"), "where one ends and the other begins counts"


def test_ids_of_images_are_told_apart_by_all_their_bits() -> None:
    low, high = 5, 5 + (1 << 40)
    assert path_of(array("q", [low]), 1) != path_of(array("q", [high]), 1)
    host = Host(PolicyChoice("marconi"), 1, num_tokens=100, num_slots=6)
    host.serve(key_of([low, low]))
    assert host.core.match_prefix(MatchPrefixParams(key=key_of([high, low]))).device_prefix_len == 0


def test_reset_holds_nothing() -> None:
    host = Host(PolicyChoice("marconi"), 1, num_tokens=100, num_slots=6)
    host.serve(key_of([1, 2, 3]))
    host.core.reset()
    assert host.core.total_size() == (0, 0)
    assert host.core.hybrid.counters.num_states_written == 1, "counts go on"
    assert host.core.match_prefix(MatchPrefixParams(key=key_of([1, 2, 3]))).last_device_node == ROOT


def test_a_canary_sees_every_token_behind_the_one_before_it() -> None:
    host = Host(PolicyChoice("marconi"), 1, num_tokens=100, num_slots=6)
    host.serve(key_of([1, 2, 3]))
    host.serve(key_of([1, 2, 9]))
    walk = host.core.walk_for_kv_canary(unlocked_only=False, swa_resident_only=False)
    before = dict(zip(walk.slot_indices.tolist(), walk.prev_slot_indices.tolist(), strict=True))
    positions = dict(zip(walk.slot_indices.tolist(), walk.positions.tolist(), strict=True))
    assert sorted(positions.values()) == [0, 1, 2, 2]
    assert all(
        positions[slot] == 0 if above == -1 else positions[above] + 1 == positions[slot]
        for slot, above in before.items()
    )


def test_requests_that_wait_follow_each_other_down_the_tree_the_heavier_branch_first() -> None:
    host = Host(PolicyChoice("marconi"), 1, num_tokens=100, num_slots=8)
    a, ab, c = [1, 2, 3], [1, 2, 3, 4, 5], [6, 7, 8]
    for tokens in (a, ab, c):
        host.serve(key_of(tokens))
    at = {
        name: host.core.match_prefix(MatchPrefixParams(key=key_of([*tokens, 9]))).last_device_node
        for name, tokens in (("a", a), ("ab", ab), ("c", c), ("none", [9]))
    }
    waiting = ["none", "c", "a", "ab", "c", "ab"]
    order = host.core.dfs_weight_order([at[name] for name in waiting])
    assert [waiting[index] for index in order] == ["ab", "ab", "a", "c", "c", "none"]
    assert sorted(order) == list(range(6))


def test_a_request_whose_node_is_gone_still_waits() -> None:
    host = Host(PolicyChoice("marconi", max_ghosts=0), 1, num_tokens=100, num_slots=8)
    host.serve(key_of([1, 2, 3]))
    node = host.core.match_prefix(MatchPrefixParams(key=key_of([1, 2, 3, 4]))).last_device_node
    host.evict(ComponentType.FULL, 3)
    assert host.core.dfs_weight_order([node, ROOT]) == [0, 1]


def test_the_order_of_waiting_requests_sees_nothing_but_their_paths() -> None:
    host = Host(PolicyChoice("marconi"), 1, num_tokens=100, num_slots=8)
    for first in range(20):
        host.serve(key_of([first, 2, 3]))
    host.serve(key_of([1, 2, 3, 4]))
    tree = host.core.hybrid.tree
    assert len(tree.ghosts) > 5
    node = tree.match(path_of(array("q", [1, 2, 3, 4]), 4), 4).checkpoint
    root, copies = paths_above([node, None, node])
    assert copies[0] is copies[2]
    assert copies[1] is root
    seen = [root]
    for above in seen:
        seen += above.children.values()
    num_above = 1
    while node.parent is not None:
        node, num_above = node.parent, num_above + 1
    assert len(seen) == num_above + 1, "the path with the root of its name space, and the root of all"


def test_what_needs_a_host_tier_or_a_window_says_that_it_is_not_served() -> None:
    core = Host(PolicyChoice("lru"), 1, num_tokens=10, num_slots=2).core
    for method in NOT_SERVED:
        with pytest.raises(NotImplementedError, match=f": {method} is not served"):
            getattr(core, method)(1)
