"""A server with `--marconi-events`: who listens knows, request by request, what the server has of a prompt."""

import json
import random
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sglang", reason="the server extra is not installed: pip install '.[server]'")

import msgspec
import zmq.auth
from sglang.srt.disaggregation import kv_events as sglang
from sglang.srt.disaggregation.kv_events import BlockRemoved, BlockStored, KVEventBatch

from marconi.events.address import Keys
from marconi.events.base import MAX_HASH, Event, FreeMemory, KvRemoved, StateRemoved, WorkerLoad
from marconi.events.codec import DEVICE
from marconi.process import LAUNCH
from marconi_cpu.demo.server_process import ServerFailed, ServerProcess
from rig import vllm_events as vllm

from .client import HTTP, random_tokens
from .conftest import BY_REQUESTS, MARCONI, EntryPoint, StartServer
from .listener import Listener, Prompt, hold_against, listener, told_by
from .processes import free_ports

pytestmark = pytest.mark.slow

POOLS = ("--max-total-tokens", "1600", "--max-mamba-cache-size", "16", "--max-running-requests", "3")
NAMES = ((None, None), ("adapter", None), (None, "tenant"), ("adapter", "tenant"))


def hears_no_removal(event: Event) -> bool:
    """As a router that knows what was there, and not when it went."""
    return not isinstance(event, KvRemoved | StateRemoved)


@pytest.fixture(scope="module", params=[16])
def server(request: pytest.FixtureRequest, models: dict[str, Path], start_server: StartServer) -> ServerProcess:
    page = ("--page-size", str(request.param), "--chunked-prefill-size", "256")
    events = ("--marconi-events", f"tcp://127.0.0.1:{free_ports(2)}")
    return start_server(
        models["gdn"], [*MARCONI, *POOLS, *page, *events, "--served-model-name", "tiny"], env=dict(BY_REQUESTS)
    )


@pytest.fixture
def router(server: ServerProcess) -> Iterator[Listener]:
    with listener(server.url) as found:
        yield found


def prompts(seed: int) -> list[Prompt]:
    """Of four name spaces: with prefixes in common, repeats, and prompts that go on."""
    rng = random.Random(seed)  # noqa: S311 - a workload, not a secret
    shared = [random_tokens(1000 * seed + number, rng.choice((70, 200, 333))) for number in range(3)]
    found: list[Prompt] = []
    for number in range(24):
        roll = rng.random()
        if roll < 0.25 and found:
            found.append(rng.choice(found))
        elif roll < 0.5 and found:
            last = rng.choice(found)
            found.append(Prompt((*last.ids, *random_tokens(2000 * seed + number, 50))[:600], *rng.choice(NAMES)))
        else:
            ids = (*rng.choice(shared), *random_tokens(3000 * seed + number, rng.randrange(1, 150)))
            found.append(Prompt(ids, *rng.choice(NAMES)))
    return found


def test_a_listener_knows_what_the_server_has_of_each_prompt_through_evictions(
    server: ServerProcess, router: Listener
) -> None:
    """By events alone, which are held against a snapshot; one that misses removals is fooled."""
    with listener(server.url, hears_no_removal) as deaf:
        asked = prompts(seed=1)
        (found,) = hold_against([router], asked)
        assert [expected for expected, _ in found] == [num_cached for _, num_cached in found]
        snapshot = router.settle()
        assert router.held() == router.held_by(snapshot)
        deaf.settle()
        evicted = next(prompt for prompt in asked if deaf.hit_tokens(prompt) > router.hit_tokens(prompt))
        (((expected, num_cached),),) = hold_against([deaf], [evicted])
        assert expected > num_cached, "the control does not turn red"
    assert sum(num_cached > 0 for _, num_cached in found) > 4
    (status,) = HTTP.get(f"{server.url}/marconi", timeout=60.0).json()["ranks"]
    assert sum(status["evictions"].values()) > 10
    assert router.fleet.stats.num_gaps == 0


def test_requests_that_run_together_leave_what_the_events_say(server: ServerProcess, router: Listener) -> None:
    asked = prompts(seed=2)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda prompt: prompt.send(server.url, 16), asked))
    snapshot = router.settle()
    assert router.held() == router.held_by(snapshot)
    (found,) = hold_against([router], asked)
    assert [expected for expected, _ in found] == [num_cached for _, num_cached in found]


def test_the_same_tokens_are_another_prefix_to_another_adapter_and_tenant(
    server: ServerProcess, router: Listener
) -> None:
    HTTP.post(f"{server.url}/flush_cache?timeout=30", timeout=60.0).raise_for_status()
    ids = tuple(random_tokens(31, 150))
    asked = [Prompt(ids, *names) for names in NAMES]
    for number, prompt in enumerate(asked):
        assert prompt.send(server.url) == 0
        router.settle()
        expected = [router.hit_tokens(each) for each in asked]
        assert [num_tokens > 0 for num_tokens in expected] == [each <= number for each in range(len(asked))]
    (found,) = hold_against([router], asked)
    assert all(expected == num_cached > 100 for expected, num_cached in found)


def test_a_server_tells_what_it_runs_and_once_idle_what_memory_is_left(server: ServerProcess, router: Listener) -> None:
    loads: list[WorkerLoad] = []

    def is_idle() -> bool:
        router.settle()
        told = router.fleet.sync(router.worker).load_report
        if told is not None:
            loads.append(told.load)
        return told is not None and told.load.num_running + told.load.num_waiting == 0

    num_clients = 6
    with ThreadPoolExecutor(num_clients) as pool:
        answers = [pool.submit(prompt.send, server.url, 64) for prompt in prompts(seed=4)[:12]]
        while not all(answer.done() for answer in answers):
            is_idle()
    deadline_s = time.monotonic() + 30
    while not is_idle():
        assert time.monotonic() < deadline_s, loads[-1]
    assert {load.max_running for load in loads} == {3}
    assert max(load.num_running for load in loads) == 3
    # How many prompts the first batch has is the scheduler's affair: one of them runs at least.
    assert 1 < max(load.num_waiting for load in loads) < num_clients
    assert max(load.num_prefill_tokens for load in loads) > 0
    assert loads[-1].num_prefill_tokens == 0
    (status,) = HTTP.get(f"{server.url}/marconi", timeout=60.0).json()["ranks"]
    kv, slots = status["kv_tokens"], status["state_slots"]
    assert loads[-1].memory == FreeMemory(kv["free"], kv["cached"], slots["free"], slots["cached"])


def test_a_flush_leaves_nothing(server: ServerProcess, router: Listener) -> None:
    prompt = Prompt(tuple(random_tokens(32, 150)))
    HTTP.post(f"{server.url}/flush_cache?timeout=30", timeout=60.0).raise_for_status()
    prompt.send(server.url)
    router.settle()
    assert router.hit_tokens(prompt) > 0
    HTTP.post(f"{server.url}/flush_cache?timeout=30", timeout=60.0).raise_for_status()
    router.settle()
    assert router.held() == (set(), set())
    assert (router.hit_tokens(prompt), prompt.send(server.url)) == (0, 0)


@pytest.mark.parametrize("schema", [sglang, vllm], ids=["sglang", "vllm"])
def test_decoders_of_sglang_and_vllm_read_every_payload_and_find_the_same_whole_blocks(
    schema: Any, server: ServerProcess, router: Listener
) -> None:
    HTTP.post(f"{server.url}/flush_cache?timeout=30", timeout=60.0).raise_for_status()
    router.settle()
    router.payloads.clear()
    for prompt in prompts(seed=3):
        prompt.send(server.url)
    snapshot = router.settle()
    router.settle_payloads(snapshot)
    decoder = msgspec.msgpack.Decoder(schema.KVEventBatch)
    kv: set[int] = set()
    for payload in router.payloads:
        for event in decoder.decode(payload).events:
            if isinstance(event, schema.BlockStored):
                assert (event.block_size, event.medium, event.token_ids) == (router.told["block_tokens"], DEVICE, [])
                assert schema is sglang or (event.group_idx, event.kv_cache_spec_kind) == (0, "full_attention")
                kv.update(event.block_hashes)
            elif isinstance(event, schema.BlockRemoved):
                kv.difference_update(event.block_hashes)
            elif isinstance(event, schema.AllBlocksCleared):
                kv.clear()
    whole = [each for each in snapshot.events if getattr(each, "block_tokens", 0) == router.told["block_tokens"]]
    assert {each % (MAX_HASH + 1) for each in kv} == {number for each in whole for number in each.block_hashes}  # type: ignore[union-attr]
    assert kv


def test_the_answer_tells_a_router_all_that_it_needs(server: ServerProcess) -> None:
    told = told_by(server.url)
    page = told["page_tokens"]
    assert told["block_tokens"] == (page if page > 1 else 64)
    assert told["worker"].endswith(f":{server.port}/0")
    expected = {"model": "tiny", "is_publishing": True, "needs_keys": False, "has_tokens": False, "version": 1}
    assert {name: told[name] for name in expected} == expected
    assert (told["max_context_tokens"], told["truncates_prompts"]) == (32768, False)
    log = server.log_path.read_text(errors="replace")
    assert f"marconi: publishes events on {told['events']}, replays and snapshots on {told['replay']}, as " in log


def test_a_killed_server_begins_a_later_epoch_with_nothing(
    preload: EntryPoint, models: dict[str, Path], tmp_path: Path
) -> None:
    """On every address of the host, for those who have the fleet's keys."""
    prompt = Prompt(tuple(random_tokens(33, 150)))
    _, secret = zmq.auth.create_certificates(tmp_path, "fleet")
    args = [*MARCONI, *POOLS, "--marconi-events", f"tcp://*:{free_ports(2)}", "--marconi-events-keys", secret]
    server = ServerProcess(models["gdn"], args, log_path=tmp_path / "log", entry_point=preload(LAUNCH))
    with server, listener(server.url, keys=Keys.read(Path(secret))) as router:
        assert router.told["needs_keys"]
        prompt.send(server.url)
        router.settle()
        assert router.hit_tokens(prompt) == 149
        server.stop()
        with server:
            told = told_by(server.url)
            assert (told["worker"], told["events"]) == (router.worker, router.told["events"])
            assert told["epoch"] > router.told["epoch"]
            before = len(router.snapshots)
            router.subscriber.request(router.worker, None)
            router._listen(lambda: len(router.snapshots) > before)
            router._receive(router.snapshots[-1])
            assert router.hit_tokens(prompt) == 0
            assert router.fleet.stats.num_restarts == 1


def test_sglangs_own_publisher_tells_its_consumers_what_a_prompt_may_find(
    preload: EntryPoint, models: dict[str, Path], tmp_path: Path
) -> None:
    """By tokens, through evictions: no less than is used, often just that; who hears no removal expects too much."""
    page, port = 16, free_ports(1)
    config = json.dumps({"publisher": "zmq", "endpoint": f"tcp://127.0.0.1:{port}", "bind": True})
    args = [*MARCONI, *POOLS, "--page-size", str(page), "--kv-events-config", config, "--chunked-prefill-size", "256"]
    args += ["--marconi-events", f"tcp://127.0.0.1:{free_ports(2)}"]
    context = zmq.Context()
    consumer = context.socket(zmq.SUB)
    consumer.connect(f"tcp://127.0.0.1:{port}")
    consumer.subscribe(b"")
    decoder, paths, known = msgspec.msgpack.Decoder(KVEventBatch), dict[int, tuple[int, ...]](), set[int]()

    def hear(within_ms: int = 300) -> None:
        while consumer.poll(within_ms):
            for event in decoder.decode(consumer.recv_multipart()[2]).events:
                if isinstance(event, BlockStored):
                    path = () if event.parent_block_hash is None else paths[event.parent_block_hash]
                    for number, block in enumerate(event.block_hashes):
                        path += tuple(event.token_ids[number * page : (number + 1) * page])
                        paths[block] = path
                        known.add(block)
                elif isinstance(event, BlockRemoved):
                    known.difference_update(event.block_hashes)
                else:
                    known.clear()

    def most_of(ids: tuple[int, ...], blocks: Iterable[int]) -> int:
        return max((len(paths[each]) for each in blocks if ids[: len(paths[each])] == paths[each]), default=0)

    try:
        entry_point = preload(LAUNCH)
        with ServerProcess(models["gdn"], args, log_path=tmp_path / "log", entry_point=entry_point) as server:
            assert "--kv-events-config" in server.log_path.read_text(errors="replace")
            found = []
            for each in (*prompts(seed=4), *prompts(seed=5), *prompts(seed=4)):
                prompt = Prompt(each.ids)
                hear()
                found.append((most_of(prompt.ids, known), most_of(prompt.ids, paths), prompt.send(server.url)))
            assert all(num_cached <= expected for expected, _, num_cached in found)
            assert sum(num_cached > 0 for *_, num_cached in found) > 4
            # All KV before a state can be used but for the prompt's last token.
            assert sum(num_cached == expected > 0 for expected, _, num_cached in found) > 4
            assert any(without_removals > expected for expected, without_removals, _ in found), "nothing was removed"
            hear()
            (rank,) = HTTP.get(f"{server.url}/marconi", timeout=60.0).json()["ranks"]
            assert len(known) * page == rank["kv_tokens"]["cached"]
            assert rank["events"]["num_events"] > 0, "ours are published beside"
            HTTP.post(f"{server.url}/flush_cache?timeout=30", timeout=60.0).raise_for_status()
            Prompt(tuple(random_tokens(41, 40))).send(server.url)
            hear()
            assert {len(paths[each]) for each in known} <= {page, 2 * page}
    finally:
        context.destroy(linger=0)


def test_events_of_a_model_without_states_are_refused_in_one_line(
    preload: EntryPoint, attention_model: Path, tmp_path: Path
) -> None:
    args = ["--radix-cache-backend", "marconi", "--marconi-events", f"tcp://127.0.0.1:{free_ports(2)}"]
    with (
        pytest.raises(ServerFailed, match="--marconi-events: this model has no recurrent layers"),
        ServerProcess(attention_model, args, log_path=tmp_path / "log", entry_point=preload(LAUNCH)),
    ):
        pass
