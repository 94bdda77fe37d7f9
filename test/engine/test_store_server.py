"""Servers with a store behind a host tier that holds less than the traffic: answers are those without a cache.

What a server wrote is read by itself, by the next one and by another, on one rank and on two, with drafts and without.
Objects that are damaged, cut, in each other's places or of other weights are named and computed anew; the control
seals wrong states as a server would, and turns answers wrong. Copies run late and what is freed on either tier is
overwritten at once (`late_copies_server.py`).

The stores are a folder; Mooncake's, by SGLang's code above a stand-in for its client; and the real one, over TCP on
loopback, where the package is installed and loads.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from marconi.engine.store import sealed
from marconi_cpu.demo.server_process import ServerProcess

from .client import HTTP, random_tokens
from .conftest import CONSENSUS, MTP, NEGATIVE_CONTROL, STRATEGY_ARGS, TWO_RANKS, EntryPoint, Launch
from .listener import Prompt, listener
from .loopback_mooncake.mooncake.store import DOWN, FOLDER
from .matrix import NEXTN, TIGHT_KV_TOKENS
from .processes import free_ports, is_gone
from .reference import Reference
from .scenarios import CHUNKED_PREFILL_SIZE, EXTRA_BUFFER, Exchange, one
from .scrapes import OF_A_STORE, all_unanswered, scraped
from .test_host_tier_server import LATE_COPIES

pytestmark = pytest.mark.slow

ARGS = (
    *("--radix-cache-backend", "marconi", "--max-total-tokens", str(TIGHT_KV_TOKENS), "--max-mamba-cache-size", "32"),
    *("--max-running-requests", "6", "--chunked-prefill-size", str(CHUNKED_PREFILL_SIZE)),
    *("--enable-hierarchical-cache", "--hicache-ratio", "1.5", "--enable-metrics"),
    *("--hicache-storage-prefetch-policy", "wait_complete", *STRATEGY_ARGS[EXTRA_BUFFER]),
)
NUM_TOKENS = 500
NUM_CONVERSATIONS = 8
"""Of `NUM_TOKENS` each, more than device and host hold together."""
OPERATOR = {"Authorization": "Bearer operator"}
SETTLES_WITHIN_S = STOPS_WITHIN_S = 60.0


WITHOUT_RDMA = (("SGLANG_HICACHE_MOONCAKE_REUSE_TE", "0"),)
"""SGLang starts Mooncake's transfers by RDMA for what else may need them."""


@dataclass(frozen=True, slots=True)
class Store:
    """A store that is running, as a server is told of it."""

    backend: str
    extra_config: dict[str, object]
    env: tuple[tuple[str, str], ...]
    kill: Callable[[], object]
    """End it, while servers run."""

    @property
    def args(self) -> tuple[str, ...]:
        extra = ("--hicache-storage-backend-extra-config", json.dumps(self.extra_config))
        return ("--hicache-storage-backend", self.backend, *extra)


@contextmanager
def running_mooncake(folder: Path) -> Iterator[Store]:
    """A master, and memory of a process of its own, so that objects outlive servers."""
    import mooncake

    programs, port = Path(mooncake.__path__[0]), free_ports(3)
    address = f"127.0.0.1:{port}"
    commands = (
        (programs / "mooncake_master", f"--rpc_port={port}", f"--metrics_port={port + 1}"),
        (
            *(programs / "mooncake_client", f"--master_server_address={address}", "--metadata_server=P2PHANDSHAKE"),
            *("--host=127.0.0.1", f"--port={port + 2}", "--global_segment_size=512MB"),
        ),
    )
    processes: list[subprocess.Popen[bytes]] = []
    with ExitStack() as running:
        for command in commands:
            log = running.enter_context((folder / command[0].name).open("wb"))
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
            running.callback(process.wait)
            running.callback(process.kill)
            processes.append(process)
            time.sleep(1.0)
            assert process.poll() is None, (folder / command[0].name).read_text()
        yield Store(
            "mooncake",
            {
                "master_server_address": address,
                "metadata_server": "P2PHANDSHAKE",
                "local_hostname": "127.0.0.1",
                "protocol": "tcp",
                "global_segment_size": 0,
            },
            WITHOUT_RDMA,
            lambda: [process.kill() for process in processes],
        )


def why_no_mooncake() -> str | None:
    """Why Mooncake's client cannot be used here."""
    command = [sys.executable, "-c", "import mooncake.store"]
    tried = subprocess.run(command, capture_output=True, text=True, timeout=60.0, check=False)
    return tried.stderr.strip().splitlines()[-1] if tried.returncode else None


@contextmanager
def running(kind: str, folder: Path) -> Iterator[Store]:
    """The store of a kind, empty."""
    objects = folder / "store"
    if kind == "file":
        env = (("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(objects)),)
        yield Store("file", {}, env, lambda: objects.rename(folder / "elsewhere"))
    elif kind == "stand-in":
        env = (FOLDER, str(objects)), *WITHOUT_RDMA
        yield Store("mooncake", {"master_server_address": "none"}, env, (objects / DOWN).touch)
    else:
        if (why := why_no_mooncake()) is not None:
            pytest.skip(f"Mooncake's client cannot be used: {why}")
        with running_mooncake(folder) as store:
            yield store


class Servers:
    """Servers of one kind, and what they answered."""

    def __init__(
        self, family: str, more: Sequence[str], env: Sequence[tuple[str, str]], store: Store, folder: Path
    ) -> None:
        self._folder = folder
        self._env = (*store.env, *env)
        self._family, self._args = family, (*ARGS, *store.args, *more)
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
        args = (*self._args, "--marconi-events", f"tcp://127.0.0.1:{free_ports(2)}")
        launch = Launch(log.name, self._family, args, env=(*self._env, *env))
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


TWO_POOLS = ("--mamba-full-memory-ratio", "0.9")
SHAPES = {
    "gdn-one-pool-page-16": ("gdn", ("--page-size", "16"), ()),
    "mamba2-two-ranks": ("mamba2", (*TWO_RANKS, *TWO_POOLS), CONSENSUS),
    "gdn-drafts-page-64": ("gdn" + MTP, ("--page-size", "64", *NEXTN), ()),
    "gdn-two-ranks-drafts": ("gdn" + MTP, (*TWO_RANKS, *NEXTN), CONSENSUS),
    "mamba2-page-16": ("mamba2", ("--page-size", "16", *TWO_POOLS), ()),
}


@pytest.mark.parametrize(
    ("shape", "kind"),
    [
        ("gdn-one-pool-page-16", "file"),
        ("mamba2-two-ranks", "file"),
        ("gdn-drafts-page-64", "file"),
        ("gdn-two-ranks-drafts", "stand-in"),
        ("mamba2-page-16", "stand-in"),
        ("gdn-two-ranks-drafts", "mooncake"),
        ("mamba2-page-16", "mooncake"),
    ],
)
def test_what_a_server_wrote_is_read_by_itself_by_another_and_by_the_next(
    shape: str,
    kind: str,
    models: dict[str, Path],
    preload: EntryPoint,
    references: Callable[[str], Reference],
    tmp_path: Path,
) -> None:
    family, more, env = SHAPES[shape]
    every = range(NUM_CONVERSATIONS)
    with running(kind, tmp_path) as store:
        servers = Servers(family, more, env, store, tmp_path)
        _wrote_is_read(servers, every, models, preload, store.kill)
    assert references(family).divergences(servers.exchanges) == []


def _wrote_is_read(
    servers: Servers, every: Sequence[int], models: dict[str, Path], preload: EntryPoint, kill: Callable[[], object]
) -> None:
    with servers.start(models, preload) as (server, _), listener(server.url) as heard:
        servers.turn(server.url, every)
        assert settled(server)["num_written"] >= NUM_CONVERSATIONS // 3
        first = servers.turn(server.url, every[:3])
        assert settled(server)["num_read"] >= 2
        assert num_resumed(first) >= 2
        for rank in HTTP.post(f"{server.url}/marconi/save", timeout=60.0).json()["ranks"]:
            assert rank["saved"]["num_states"] >= 0.8 * rank["saved"]["num_held"] > 0, rank
        give_up_s = time.monotonic() + SETTLES_WITHIN_S
        while missing := all_unanswered(scraped(server.url), OF_A_STORE.__contains__):
            assert time.monotonic() < give_up_s, missing
            time.sleep(0.5)
        with servers.start(models, preload) as (other, _):
            # The fourth was told once, before the server knew how much the host is to drop at once.
            read = servers.turn(other.url, every[:4])
            assert num_resumed(read[:3]) == 3
        # A router that hears the one knows what the other finds.
        heard.settle()
        load = heard.fleet.sync(heard.worker).load_report
        assert load is not None
        assert load.load.store is not None
        chains = (Prompt(each.prompt).chain(heard.told["model"], heard.told["block_tokens"]) for each in read)
        expected = [heard.fleet.num_stored_tokens(chain, load.load.store.store) for chain in chains]
        assert expected == [each.completion.num_cached_tokens for each in read]

    with servers.start(models, preload) as (server, _):
        again = servers.turn(server.url, every)
        assert settled(server)["num_lost"] == 0
        assert num_resumed(again) >= NUM_CONVERSATIONS - 1
        kill()
        servers.turn(server.url, every)
        assert settled(server)["num_failed"] > 0


def test_damaged_objects_are_named_and_computed_anew(
    models: dict[str, Path],
    preload: EntryPoint,
    references: Callable[[str], Reference],
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    with running("file", tmp_path) as store:
        servers, every = Servers("gdn", ("--page-size", "16"), (), store, tmp_path), range(NUM_CONVERSATIONS)
    folder = tmp_path / "store"
    with servers.start(models, preload) as (server, _):
        servers.turn(server.url, every)
    states, (page, *_) = sorted(folder.glob("*.mamba_*.bin")), folder.glob("*-????????????????????_*.bin")
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

    for path in folder.glob("*.mamba_*.bin"):
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
    path.write_bytes(body.numpy().tobytes() + sealed.seal(name, body))


def test_a_store_that_fails_and_stalls_loses_nothing(
    models: dict[str, Path], preload: EntryPoint, references: Callable[[str], Reference], tmp_path: Path
) -> None:
    """By SGLang's own injector: a third of all calls fail, and each waits."""
    every, folder = range(NUM_CONVERSATIONS), tmp_path / "store"
    with running("file", tmp_path) as store:
        servers = Servers("gdn", ("--page-size", "64", "--admin-api-key", "operator"), (), store, tmp_path)
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
        assert not list(folder.iterdir())
    assert references("gdn").divergences(servers.exchanges) == []
