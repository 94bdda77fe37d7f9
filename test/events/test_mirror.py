"""What the events of a tree leave is what it holds: blocks and states, after splits, joins, victims and flushes."""

import random
from array import array
from hashlib import sha256

import pytest

pytest.importorskip("msgspec", reason="the router extra is not installed: pip install '.[router]'")

from marconi.events import mirror, tree_log
from marconi.events.base import Cleared, Event, KvRemoved, KvStored, StateRemoved, StateStored
from marconi.events.hashes import HashSpace
from marconi.events.mirror import LogClosed, Mirror
from marconi.events.tree_log import Tenant, TreeLog
from marconi.tree import Node, RadixTree

BLOCK = 4
TENANTS = {0: Tenant(), 1: Tenant("adapter", None), 2: Tenant(None, "tenant"), 3: Tenant("adapter", "tenant")}


def packed(ids: list[int]) -> bytes:
    return array("q", ids).tobytes()


class Holdings:
    """What a listener makes of events."""

    def __init__(self) -> None:
        self.kv: dict[int, tuple[int | None, bytes, int]] = {}
        self.states: dict[int, tuple[int, bytes]] = {}

    def hear(self, event: Event) -> None:
        match event:
            case KvStored(hashes, parent, namespace, block_tokens):
                for each in hashes:
                    assert each not in self.kv, "stored twice"
                    self.kv[each] = (parent, namespace, block_tokens)
                    parent = each
            case KvRemoved(hashes):
                for each in hashes:
                    del self.kv[each]
            case StateStored(block_hash, depth, namespace):
                assert block_hash not in self.states, "a second state"
                assert block_hash in self.kv, "a state without its KV"
                self.states[block_hash] = (depth, namespace)
            case StateRemoved(block_hash):
                del self.states[block_hash]
            case Cleared():
                self.kv.clear()
                self.states.clear()


def ids_of(node: Node) -> list[int]:
    key = b""
    above: Node | None = node
    while above is not None:
        key, above = above.key + key, above.parent
    return array("q", key).tolist()


def naive_hashes(ids: list[int], tenant: Tenant) -> list[int]:
    """Of every block and of the part at the end, from the definition."""
    before = (
        b"" if tenant.cache_salt is None else sha256(b"sglang-cache-salt-v1\0" + tenant.cache_salt.encode()).digest()
    )
    found = []
    for start in range(0, len(ids), BLOCK):
        before = sha256(before + b"".join(each.to_bytes(4, "little") for each in ids[start : start + BLOCK])).digest()
        short = before[:8]
        if tenant != Tenant():
            seed = sha256(b"sglang-kv-event-namespace-v1")
            for part in (tenant.extra_key, tenant.cache_salt):
                seed.update(b"\0" if part is None else b"\1" + len(part).to_bytes(8, "little") + part.encode())
            short = sha256(seed.digest() + short).digest()[:8]
        found.append(int.from_bytes(short, "big"))
    return found


def truth(tree: RadixTree) -> Holdings:
    """What the tree holds, by walking it."""
    holdings = Holdings()
    for namespace, root in tree.roots.items():
        tenant = TENANTS[namespace]
        space = HashSpace.of("model", *tenant)
        for node in root.walk():
            if node.parent is None or not node.is_live:
                continue
            ids = ids_of(node)
            assert len(ids) == node.depth
            hashes = naive_hashes(ids, tenant)
            num_whole = len(ids) // BLOCK
            for index in range(num_whole):
                above = hashes[index - 1] if index else None
                holdings.kv[hashes[index]] = (above, space.namespace, BLOCK)
            if node.has_state:
                holdings.states[hashes[-1]] = (node.depth, space.namespace)
                if len(ids) % BLOCK:
                    above = hashes[-2] if num_whole else None
                    holdings.kv[hashes[-1]] = (above, space.namespace, len(ids) % BLOCK)
    return holdings


class Run:
    """A tree, its log and a listener."""

    def __init__(self, max_ghosts: int) -> None:
        self.log = TreeLog()
        self.mirror = Mirror(self.log, BLOCK, "model")
        self.heard = Holdings()
        self.max_ghosts = max_ghosts
        self.flush()

    def flush(self) -> None:
        self.log.flushed()
        self.tree = RadixTree(1, self.max_ghosts, 2, self.log)
        self.states: set[Node] = set()

    def insert(self, ids: list[int], depths: list[int], namespace: int) -> None:
        self.log.tenant = TENANTS[namespace]
        for node in self.tree.insert(packed(ids), depths, namespace):
            if node not in self.states:
                self.states.add(node)
                self.log.kept_state(node)

    def evict(self, node: Node) -> None:
        had = {each for each in self.tree.nodes() if each.has_state}
        self.tree.evict(node)
        self.states -= {each for each in had if not each.has_state}

    def check(self) -> None:
        for each in self.mirror.drain():
            self.heard.hear(each.event)
        expected = truth(self.tree)
        assert self.heard.kv == expected.kv
        assert self.heard.states == expected.states
        snapshot = Holdings()
        for event in self.mirror.held():
            snapshot.hear(event)
        assert snapshot.kv == expected.kv
        assert snapshot.states == expected.states


@pytest.mark.parametrize("max_ghosts", [0, 50])
@pytest.mark.parametrize("seed", range(15))
def test_events_and_snapshots_of_a_random_run_are_what_the_tree_holds(seed: int, max_ghosts: int) -> None:
    random_ = random.Random(seed)  # noqa: S311 - a run, not a secret
    run = Run(max_ghosts)
    for step in range(200):
        states = [node for node in run.tree.nodes() if node.has_state and not node.num_locks]
        chance = random_.random()
        if chance < 0.4 and states:
            run.evict(random_.choice(states))
        elif chance < 0.42:
            run.flush()
        else:
            ids = [random_.randrange(2) for _ in range(random_.randrange(1, 26))]
            depths = sorted(random_.sample(range(1, len(ids) + 1), min(len(ids), random_.randrange(1, 4))))
            run.insert(ids, depths, random_.randrange(4))
        # Several changes are published at once, too.
        if step % random_.randrange(1, 4) == 0:
            run.check()
    run.check()


def test_tokens_and_names_are_told_only_if_asked_for() -> None:
    for has_tokens in (False, True):
        run = Run(0)
        mirror = Mirror(run.log, BLOCK, None, has_tokens, adapter_of=lambda tenant: f"name of {tenant.extra_key}")
        run.insert([5, 6, 7, 8, 9], [5], 3)
        (_, first, *others) = mirror.drain()
        expected = ([5, 6, 7, 8], "tenant", "name of adapter") if has_tokens else ([], None, None)
        assert (list(first.token_ids), first.cache_salt, first.lora_name) == expected
        assert all(each[1:] == ((), None, None) for each in others)


def test_wide_ids_are_hashed_by_their_eight_bytes_and_only_in_their_block() -> None:
    ids = [1, 2, 3, 4, 5, 1 << 40, 7, 8, 9]
    first, second, third = HashSpace.of(None, None, None).digests(b"", packed(ids), BLOCK)
    assert first == sha256(array("I", ids[:4]).tobytes()).digest()
    assert second == sha256(first + b"\xff" + packed(ids[4:8])).digest()
    assert third == sha256(second + array("I", ids[8:]).tobytes()).digest()


def test_namespaces_tell_models_adapters_and_tenants_apart() -> None:
    tenants = [(model, *each) for model in (None, "a", "b") for each in TENANTS.values()]
    spaces = [HashSpace.of(*each) for each in tenants]
    assert len({space.namespace for space in spaces}) == len(tenants)
    assert HashSpace.of(None, "", "").namespace == b""
    assert HashSpace.of("m", "ab", "c").namespace != HashSpace.of("m", "a", "bc").namespace


def test_a_long_span_is_told_in_pieces_that_follow_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirror, "MAX_BLOCKS", 3)
    run = Run(0)
    run.mirror = Mirror(run.log, BLOCK, "model", has_tokens=True)
    ids = [number % 7 for number in range(8 * BLOCK + 1)]
    run.insert(ids, [len(ids)], 3)
    told = list(run.mirror.drain())
    hashes = naive_hashes(ids, TENANTS[3])
    namespace = HashSpace.of("model", *TENANTS[3]).namespace
    assert [each.event for each in told[1:4]] == [
        KvStored(tuple(hashes[0:3]), None, namespace, BLOCK),
        KvStored(tuple(hashes[3:6]), hashes[2], namespace, BLOCK),
        KvStored(tuple(hashes[6:8]), hashes[5], namespace, BLOCK),
    ]
    assert [number for each in told for number in each.token_ids] == ids[: 8 * BLOCK]


def test_a_log_whose_reader_is_behind_keeps_nothing_more_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_log, "MAX_CHANGES", 10)
    run = Run(0)
    for first in range(20):
        run.insert([first, 1, 2], [3], 0)
    assert (run.log.is_closed, len(run.log.changes)) == (True, 0)
    with pytest.raises(LogClosed, match="changes that wait to be published must be at most"):
        list(run.mirror.drain())


def test_a_second_reader_hears_of_all_changes_also_when_the_first_has_ended() -> None:
    run = Run(0)
    other = TreeLog()
    run.log = TreeLog(also=other)
    run.mirror, second = Mirror(run.log, BLOCK, "model"), Mirror(other, BLOCK, "model")
    run.flush()
    run.insert([0, 1, 2], [3], 1)
    told = list(run.mirror.drain())
    assert told == list(second.drain())
    assert len(told) > 1
    run.mirror.close()
    run.insert([1, 1, 2], [3], 0)
    assert (run.mirror.num_waiting, run.log.is_closed, other.is_closed) == (0, True, False)
    assert sum(isinstance(each.event, KvStored) for each in second.drain()) == 1


def test_a_log_whose_reader_has_ended_keeps_nothing() -> None:
    run = Run(0)
    run.insert([0, 1, 2], [3], 0)
    assert run.mirror.num_waiting > 0
    run.mirror.close()
    run.insert([1, 1, 2], [3], 0)
    run.flush()
    assert run.mirror.num_waiting == 0
