"""A store of SGLang's whose objects are sealed: what is damaged or of another model is a miss, never another's.

On SGLang's own store of files, and on a stand-in for Mooncake's client, with pools of one tensor in place of those of a
host tier.
"""

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheFile,
    HiCacheStorageConfig,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)

from marconi.engine.store import mooncake, sealed
from marconi.engine.store.sealed import SEAL_BYTES, SealedStore
from marconi.engine.version import Refusal

from .loopback_mooncake.mooncake.store import DOWN, FOLDER, MooncakeDistributedStore

KEYS = ["a" * 64, "b" * 64, "c" * 64]
PAGE = 48


class Pool:
    """Pages of states on the host."""

    page_size = 1

    def __init__(self) -> None:
        self.rows = torch.zeros(4, PAGE, dtype=torch.uint8)

    def get_data_page(self, row: int) -> torch.Tensor:
        return self.rows[row]

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.zeros(PAGE, dtype=torch.uint8)

    def set_from_flat_data_page(self, row: int, page: torch.Tensor) -> None:
        self.rows[row] = page


class Weights:
    """Weights that are digested when they are told to be."""

    def __init__(self, digest: str = "first") -> None:
        self.digest: str | None = digest

    def end(self) -> None:
        pass


def backend_of(folder: Path) -> Any:
    """SGLang's store in a folder."""
    config = HiCacheStorageConfig(0, 1, 0, 1, 0, 1, False, False, False, "model")
    if FOLDER not in os.environ:
        return HiCacheFile(config, str(folder))
    client = MooncakeDistributedStore()
    client.setup()
    settings = SimpleNamespace(standalone_storage=False, master_server_address="none", tenant_id="default")
    return SimpleNamespace(store=client, config=settings, storage_config=config, config_prefix="model")


class Server:
    """A server's store in a folder."""

    def __init__(self, folder: Path, weights: str = "first", facts: str = "facts") -> None:
        self.pool, self.weights = Pool(), Weights(weights)
        pools: Any = SimpleNamespace(get_pool=lambda _name: self.pool)
        self.store = SealedStore(backend_of(folder), pools)
        self.store.identify(facts, lambda: self.weights)
        self.use()

    def use(self) -> None:
        """Use the store if the weights are known."""
        if (own := self.store.own_identity) is not None:
            self.store.use(f"{own:016x}")

    def write(self) -> bool:
        """Three pages of KV, 0, 1 and 2, and the state behind them, 9."""
        self.pool.rows[:] = 9
        pages = [torch.full((PAGE // 2,), number, dtype=torch.bfloat16) for number in range(3)]
        (is_written,) = self.store.batch_set_v2([self.state()])[PoolName.MAMBA]
        return is_written and self.store.batch_set(KEYS, pages)

    def num_found(self) -> int:
        """Pages up to the deepest state."""
        return int(self.store.batch_exists_v2(KEYS, [self.state()]).kv_hit_pages)

    def read(self) -> tuple[list[float | None], float | None]:
        """What the pages of KV and the state hold; None for what is missing."""
        targets = [torch.zeros(PAGE // 2, dtype=torch.bfloat16) for _ in KEYS]
        pages = [None if page is None else float(page.mean()) for page in self.store.batch_get(KEYS, targets)]
        self.pool.rows[:] = 0
        (is_read,) = self.store.batch_get_v2([self.state()])[PoolName.MAMBA]
        return pages, float(self.pool.rows[1].float().mean()) if is_read else None

    def state(self) -> PoolTransfer:
        return PoolTransfer(
            name=PoolName.MAMBA,
            host_indices=torch.tensor([1]),
            keys=KEYS[-1:],
            hit_policy=PoolHitPolicy.TRAILING_PAGES,
        )


WHOLE = ([0.0, 1.0, 2.0], 9.0)


@pytest.fixture(params=["file", "mooncake", "mooncake-an-object-a-call"])
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the objects of a store are files."""
    if request.param != "file":
        monkeypatch.setenv(FOLDER, str(tmp_path / "store"))
    if request.param == "mooncake-an-object-a-call":
        monkeypatch.setattr(sealed, "_BYTES_AT_ONCE", 1)
        monkeypatch.setattr(mooncake, "_LEAST_MEMORY_BYTES", 1)
        monkeypatch.setattr(mooncake, "_MAX_KEYS", 1)
    return tmp_path / "store"


def test_an_empty_folder_becomes_the_users_own(tmp_path: Path) -> None:
    Server(tmp_path)
    assert tmp_path.stat().st_mode & 0o777 == 0o700


def test_servers_of_one_store_and_one_identity_have_its_number(folder: Path) -> None:
    first, second, other = Server(folder), Server(folder), Server(folder, "second")
    assert first.store.number == second.store.number != other.store.number
    if FOLDER not in os.environ:
        assert Server(folder.with_name("another")).store.number != first.store.number
        assert len(list(folder.iterdir())) == 1


def test_what_is_written_is_read_by_the_next_server_of_the_same_identity(folder: Path) -> None:
    assert Server(folder).write()
    server = Server(folder)
    assert (server.num_found(), server.read()) == (3, WHOLE)
    assert server.store.read.num_objects == 4
    assert server.store.bytes_per_s


@pytest.mark.parametrize(("weights", "facts"), [("second", "facts"), ("first", "others")])
def test_a_server_of_other_weights_or_facts_finds_nothing_and_replaces_nothing(
    folder: Path, weights: str, facts: str
) -> None:
    Server(folder).write()
    other = Server(folder, weights, facts)
    assert (other.num_found(), other.read()) == (0, ([None] * 3, None))
    assert other.write()
    assert (other.read(), Server(folder).read()) == (WHOLE, WHOLE)


def test_nothing_is_found_until_the_weights_are_digested_and_again_after_a_flush(folder: Path) -> None:
    Server(folder).write()
    server = Server(folder)
    server.store.renew()
    server.weights.digest = None
    server.use()
    assert (server.store.is_ready, server.num_found(), server.write()) == (False, 0, False)
    assert server.read() == ([None] * 3, None)
    server.weights.digest = "first"
    server.use()
    assert (server.num_found(), server.read()) == (3, WHOLE)
    server.weights = Weights("second")
    server.store.renew()
    assert (server.store.is_ready, server.num_found()) == (False, 0)
    server.use()
    assert (server.store.is_ready, server.num_found()) == (True, 0)


def flipped(data: bytes) -> bytes:
    return bytes([data[0] ^ 1, *data[1:]])


@pytest.mark.parametrize(
    "damage",
    [flipped, lambda data: data[:-1], lambda data: b"", lambda data: data[:-SEAL_BYTES] + bytes(SEAL_BYTES)],
    ids=["flipped", "cut", "empty", "without-seal"],
)
@pytest.mark.parametrize("number", range(4))
def test_a_damaged_object_is_removed_and_written_again(
    folder: Path, damage: Callable[[bytes], bytes], number: int, caplog: pytest.LogCaptureFixture
) -> None:
    Server(folder).write()
    paths = sorted(folder.iterdir())
    path = paths[number]
    path.write_bytes(damage(path.read_bytes()))
    server = Server(folder)
    pages, state = server.read()
    assert (*pages, state) != (*WHOLE[0], WHOLE[1])
    assert None in (*pages, state)
    assert all(page in (None, whole) for page, whole in zip((*pages, state), (*WHOLE[0], WHOLE[1]), strict=True))
    assert server.store.num_damaged == 1
    where = path.name if FOLDER in os.environ else path
    assert f"marconi: {where} must be an object that a server wrote" in caplog.text
    assert sorted(folder.iterdir()) == [each for each in paths if each != path]
    assert server.write()
    assert server.read() == WHOLE


def test_an_object_in_the_place_of_another_is_damaged(folder: Path) -> None:
    Server(folder).write()
    first, second, *_ = sorted(each for each in folder.iterdir() if ".mamba" not in each.name)
    first.write_bytes(second.read_bytes())
    server = Server(folder)
    assert server.read()[0] == [None] * 3
    assert server.store.num_damaged == 1


def test_an_error_of_the_store_is_a_miss_and_is_logged_once(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    Server(folder).write()
    server = Server(folder)

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no route to the store")

    below = server.store._backend if FOLDER not in os.environ else server.store._backend.store
    for name in ("get", "set", "exists", "batch_exists_v2", "batch_is_exist", "batch_get_into", "batch_put_from"):
        setattr(below, name, fail)
    assert (server.num_found(), server.read(), server.write()) == (0, ([None] * 3, None), False)
    assert (server.store.read.num_failed, server.store.written.num_failed) == (3, 1)
    assert caplog.text.count("no route to the store\n") == 2


@pytest.mark.parametrize("folder", ["mooncake"], indirect=True)
def test_a_mooncake_store_that_cannot_be_reached_is_a_miss_until_it_can(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = Server(folder)
    assert server.write()
    (folder / DOWN).touch()
    assert (server.num_found(), server.read(), server.write()) == (0, ([None] * 3, None), False)
    assert "failed with code -900" in caplog.text
    (folder / DOWN).unlink()
    assert (server.num_found(), server.read(), server.write()) == (3, WHOLE, True)


@pytest.mark.parametrize("folder", ["mooncake"], indirect=True)
def test_a_mooncake_store_that_reaches_memory_of_its_own_alone_is_refused(folder: Path) -> None:
    backend = backend_of(folder)
    backend.config.standalone_storage = True
    with pytest.raises(Refusal, match="standalone_storage must be false, got true"):
        SealedStore(backend, None)


@pytest.mark.parametrize("folder", ["mooncake"], indirect=True)
def test_memory_that_is_not_registered_is_not_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the stand-in."""
    server = Server(folder)
    assert server.write()
    monkeypatch.setattr(MooncakeDistributedStore, "register_buffer", lambda *_: 0)
    assert Server(folder).read() == ([None] * 3, None)
