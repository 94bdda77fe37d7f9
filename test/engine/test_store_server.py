"""Servers with a store of files behind a host tier that holds less than the traffic: answers are those without a cache.

What a server wrote is read by itself, by the next one and by another, on one rank and on two, with drafts and without.
Objects that are damaged, cut, in each other's places or of other weights are named and computed anew; the control
seals wrong states as a server would, and turns answers wrong. Copies run late and what is freed on either tier is
overwritten at once (`late_copies_server.py`).
"""

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from marconi.engine.host import sealed
from marconi_cpu.demo.server_process import ServerProcess

from .client import HTTP, random_tokens
from .conftest import CONSENSUS, MTP, NEGATIVE_CONTROL, STRATEGY_ARGS, TWO_RANKS, EntryPoint, Launch
from .matrix import NEXTN, TIGHT_KV_TOKENS
from .processes import is_gone
from .reference import Reference
from .scenarios import CHUNKED_PREFILL_SIZE, EXTRA_BUFFER, Exchange, one
from .test_host_tier_server import LATE_COPIES

pytestmark = pytest.mark.slow

ARGS = (
    *("--radix-cache-backend", "marconi", "--max-total-tokens", str(TIGHT_KV_TOKENS), "--max-mamba-cache-size", "32"),
    *("--max-running-requests", "6", "--chunked-prefill-size", str(CHUNKED_PREFILL_SIZE)),
    *("--enable-hierarchical-cache", "--hicache-ratio", "1.5", "--hicache-storage-backend", "file"),
    *("--hicache-storage-prefetch-policy", "wait_complete", *STRATEGY_ARGS[EXTRA_BUFFER]),
)
NUM_TOKENS = 500
NUM_CONVERSATIONS = 8
"""Of `NUM_TOKENS` each, more than device and host hold together."""
OPERATOR = {"Authorization": "Bearer operator"}
SETTLES_WITHIN_S = STOPS_WITHIN_S = 60.0


class Servers:
    """Servers of one kind, one after another, and what they answered."""

    def __init__(self, family: str, more: Sequence[str], env: Sequence[tuple[str, str]], folder: Path) -> None:
        self.store = folder / "store"
        self._folder = folder
        self._env = (("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(self.store)), *env)
        self._family, self._args = family, (*ARGS, *more)
        self.exchanges: list[Exchange] = []
        self._told = [random_tokens(1_000 + number, NUM_TOKENS) for number in range(NUM_CONVERSATIONS)]
        self._num_started = 0

    @contextmanager
    def start(
        self, models: dict[str, Path], preload: EntryPoint, *env: tuple[str, str]
    ) -> Iterator[tuple[ServerProcess, Path]]:
        """One more server, which is stopped as an operator does, and its log."""
        self._num_started += 1
        log = self._folder / f"log-{self._num_started}"
        launch = Launch(log.name, self._family, self._args, env=(*self._env, *env))
        with launch.process(models, log, entry_point=preload(LATE_COPIES)) as server:
            yield server, log
            os.kill(server.pid, signal.SIGTERM)
            assert is_gone(server.pid, within_s=STOPS_WITHIN_S)

    def turn(self, url: str, numbers: Sequence[int], *, is_kept: bool = True) -> list[Exchange]:
        """The next turn of these conversations; the one after it begins from there if it is kept."""
        answers = []
        for number in numbers:
            told = self._told[number]
            answers.append(one(url, [*told, *random_tokens(2_000 + number, 20)]))
            if is_kept:
                self._told[number] = [*answers[-1].prompt, *answers[-1].completion.token_ids]
        self.exchanges += answers
        return answers


def settled(server: ServerProcess) -> dict[str, Any]:
    """What the last rank says of its store, once no rank reads or writes."""
    deadline_s = time.monotonic() + SETTLES_WITHIN_S
    while time.monotonic() < deadline_s:
        stores = [rank["store"] for rank in HTTP.get(f"{server.url}/marconi").json()["ranks"]]
        if not any(each["num_being_written"] or each["num_being_read"] for each in stores):
            return dict(stores[-1])
        time.sleep(0.1)
    raise AssertionError(stores)


def num_resumed(exchanges: Sequence[Exchange]) -> int:
    """Turns that started near the end of what was said; one whose copy would have taken too long does not."""
    return sum(each.completion.num_cached_tokens >= NUM_TOKENS - 64 for each in exchanges)


@pytest.mark.parametrize(
    ("family", "more", "env"),
    [
        pytest.param("gdn", ("--page-size", "16"), (), id="gdn-one-pool-page-16"),
        pytest.param("mamba2", (*TWO_RANKS, "--mamba-full-memory-ratio", "0.9"), CONSENSUS, id="mamba2-two-ranks"),
        pytest.param("gdn" + MTP, ("--page-size", "64", *NEXTN), (), id="gdn-drafts-page-64"),
    ],
)
def test_what_a_server_wrote_is_read_by_itself_and_by_the_next(
    family: str,
    more: tuple[str, ...],
    env: tuple[tuple[str, str], ...],
    models: dict[str, Path],
    preload: EntryPoint,
    references: Callable[[str], Reference],
    tmp_path: Path,
) -> None:
    servers = Servers(family, more, env, tmp_path)
    every = range(NUM_CONVERSATIONS)
    with servers.start(models, preload) as (server, _):
        servers.turn(server.url, every)
        assert settled(server)["num_written"] >= NUM_CONVERSATIONS // 3
        first = servers.turn(server.url, every[:3])
        assert settled(server)["num_read"] >= 2
        assert num_resumed(first) >= 2
        for rank in HTTP.post(f"{server.url}/marconi/save", timeout=60.0).json()["ranks"]:
            assert rank["saved"]["num_states"] >= 0.8 * rank["saved"]["num_held"] > 0, rank

    with servers.start(models, preload) as (server, _):
        again = servers.turn(server.url, every)
        assert settled(server)["num_lost"] == 0
        assert num_resumed(again) >= NUM_CONVERSATIONS - 1
    assert references(family).divergences(servers.exchanges) == []


def test_damaged_objects_are_named_and_computed_anew(
    models: dict[str, Path],
    preload: EntryPoint,
    references: Callable[[str], Reference],
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    servers, every = Servers("gdn", ("--page-size", "16"), (), tmp_path), range(NUM_CONVERSATIONS)
    with servers.start(models, preload) as (server, _):
        servers.turn(server.url, every)
    states, (page, *_) = sorted(servers.store.glob("*.mamba_*.bin")), servers.store.glob("*-????????????????????_*.bin")
    flipped, cut, swapped = states[0::4], states[1::4], states[2::4]
    for state in (page, *flipped):
        flip(state)
    for state in cut:
        state.write_bytes(state.read_bytes()[:-1])
    contents = [state.read_bytes() for state in swapped]
    for state, content in zip(swapped, [*contents[1:], contents[0]], strict=True):
        state.write_bytes(content)
    with servers.start(models, preload) as (server, log):
        again = servers.turn(server.url, every, is_kept=False)
        num_damaged = settled(server)["num_damaged"]
        said = log.read_text(errors="replace")
        named = {path for path in (page, *flipped, *cut, *swapped) if f"marconi: {path} must be an object" in said}
        assert len(named) == num_damaged >= 3
        assert 0 < num_resumed(again) < NUM_CONVERSATIONS
    assert references("gdn").divergences(servers.exchanges) == []

    for path in servers.store.glob("*.mamba_*.bin"):
        seal_zeros(path)
    servers.exchanges.clear()
    with servers.start(models, preload) as (server, _):
        servers.turn(server.url, every)
        assert settled(server)["num_damaged"] == 0
    divergences = references("gdn").divergences(servers.exchanges)
    assert divergences
    record_property(NEGATIVE_CONTROL, f"sealed zeros for states: {len(divergences)} answers diverge")


def flip(path: Path) -> None:
    """Flip a bit."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def seal_zeros(path: Path) -> None:
    """Put zeros in the place of a state, with the seal that a server would give them."""
    body = torch.zeros(path.stat().st_size - sealed.SEAL_BYTES, dtype=torch.uint8)
    name = path.name[: path.name.index(".mamba") + len(".mamba")]
    path.write_bytes(torch.cat([body, sealed.seal(name, body)]).numpy().tobytes())


def test_a_store_that_fails_and_stalls_loses_nothing(
    models: dict[str, Path], preload: EntryPoint, references: Callable[[str], Reference], tmp_path: Path
) -> None:
    """By SGLang's own injector: a third of all calls fail, and each waits."""
    servers, every = (
        Servers("gdn", ("--page-size", "64", "--admin-api-key", "operator"), (), tmp_path),
        range(NUM_CONVERSATIONS),
    )
    faults = (
        ("SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE", "0.3"),
        ("SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY", "0.02"),
    )
    with servers.start(models, preload, *faults) as (server, _):
        for _ in range(3):
            servers.turn(server.url, every)
        used = settled(server)
        assert used["num_failed"] + used["num_lost"] > 0
        assert used["num_written"] > 0
        HTTP.post(f"{server.url}/flush_cache?timeout=30", timeout=60.0, headers=OPERATOR).raise_for_status()
        (rank,) = HTTP.get(f"{server.url}/marconi").json()["ranks"]
        assert rank["host"]["kv_tokens"]["free"] == rank["host"]["kv_tokens"]["size"]
        assert rank["host"]["state_slots"]["free"] == rank["host"]["state_slots"]["size"]
        servers.turn(server.url, every[:2])
        update = {"model_path": str(models["gdn"]), "flush_cache": False}
        HTTP.post(
            f"{server.url}/update_weights_from_disk", json=update, timeout=60.0, headers=OPERATOR
        ).raise_for_status()
        assert not settled(server)["is_ready"], "states of two sets of weights"
        HTTP.post(f"{server.url}/flush_cache?timeout=30", timeout=60.0, headers=OPERATOR).raise_for_status()
        servers.turn(server.url, every[2:4])
        assert settled(server)["is_ready"]
        route = f"{server.url}/hicache/storage-backend"
        HTTP.delete(route, timeout=60.0, headers=OPERATOR).raise_for_status()
        assert not settled(server)["is_ready"]
        HTTP.put(route, json={"hicache_storage_backend": "file"}, timeout=60.0, headers=OPERATOR).raise_for_status()
        servers.turn(server.url, every[4:6])
        assert settled(server)["is_ready"]
        HTTP.post(f"{route}/clear", timeout=60.0, headers=OPERATOR).raise_for_status()
        assert not list(servers.store.iterdir())
    assert references("gdn").divergences(servers.exchanges) == []
