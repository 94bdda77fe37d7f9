"""Saved states come back as they were written, and a damaged or foreign file is refused by its name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from marconi.engine.persistence.files import (
    INDEX,
    WEIGHTS,
    SavedFile,
    SavedFolder,
    Unusable,
    _crc_of,
    layout_of,
    read_file,
    read_index,
    require_whole,
)
from marconi.policy.persistence import SavedState
from marconi.policy.request import pack
from marconi.tree import LeftBy, SavedFacts

IDENTITY = {"the model": "a", "the type of KV": "bfloat16"}
SAVED = {**IDENTITY, WEIGHTS: "w"}
FACTS = SavedFacts(1.5, 0.5, 3, LeftBy(20, went_on=True, closing=7, namespace=1 << 120, is_open=False))
STATES = [
    SavedState(1 << 120, pack(range(20)), 20, 0, FACTS),
    SavedState(0, pack(range(12)), 12, 12, SavedFacts(9.0, 9.0, 0, None)),
]


def copies_of(seed: int, num_tokens: int) -> object:
    """KV of two layers and a state, in the types that pools have."""
    draw = torch.Generator().manual_seed(seed)
    kv = [
        [[torch.randn(num_tokens, 2, 4, generator=draw).to(dtype) for dtype in (torch.bfloat16, torch.float8_e4m3fn)]]
        for _ in range(2)
    ]
    conv = [torch.randn(3, 1, 8, 3, generator=draw)]
    return kv if num_tokens else [[], []], (conv, torch.randn(3, 1, 4, 4, generator=draw).half())


def same(left: object, right: object) -> bool:
    if isinstance(left, torch.Tensor):
        assert isinstance(right, torch.Tensor)
        return left.dtype == right.dtype and torch.equal(left.view(torch.uint8), right.view(torch.uint8))
    assert isinstance(left, list | tuple)
    assert isinstance(right, list | tuple)
    return len(left) == len(right) and all(map(same, left, right))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with both states."""
    new = SavedFolder(tmp_path / "save" / "rank-0")
    for number, state in enumerate(STATES):
        new.add(state, is_end=number == 0, copies=copies_of(number, state.depth - state.start))
    new.finish(SAVED)
    return tmp_path / "save" / "rank-0"


def index_of(folder: Path, identity: dict[str, str] = IDENTITY, weights: str = "w") -> list[SavedFile]:
    return read_index(folder, identity, lambda: weights)


def whole(folder: Path, identity: dict[str, str] = IDENTITY) -> list[SavedFile]:
    files = index_of(folder, identity)
    for file in files:
        require_whole(folder, file)
    return files


def test_what_was_written_is_read(folder: Path) -> None:
    files = whole(folder)
    assert [(each.namespace, each.depth, each.start, each.is_end, each.facts) for each in files] == [
        (1 << 120, 20, 0, True, FACTS),
        (0, 12, 12, False, STATES[1].facts),
    ]
    for number, (file, state) in enumerate(zip(files, STATES, strict=True)):
        path, copies = read_file(folder, file)
        assert path == state.path
        assert same(copies, copies_of(number, state.depth - state.start))
    assert not same(read_file(folder, files[0]).copies, copies_of(5, 20)), "the control: other contents differ"


def test_only_the_servers_user_may_read_it(folder: Path) -> None:
    assert folder.stat().st_mode & 0o077 == 0


def test_nothing_saved_is_nothing_to_load(tmp_path: Path) -> None:
    assert index_of(tmp_path / "rank-0") == []


def test_a_new_folder_replaces_the_old_one_only_when_it_is_finished(folder: Path) -> None:
    new = SavedFolder(folder)
    new.add(STATES[1], is_end=False, copies=copies_of(1, 0))
    assert len(whole(folder)) == 2
    new.abandon()
    assert len(whole(folder)) == 2
    assert [each.name for each in folder.parent.iterdir()] == ["rank-0"]
    new = SavedFolder(folder)
    new.finish(SAVED)
    assert whole(folder) == []


def test_a_server_that_is_killed_while_it_removes_the_old_folder_leaves_a_whole_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = SavedFolder(folder)
    new.add(STATES[1], is_end=False, copies=copies_of(1, 0))

    def killed(path: Path, **_: object) -> None:
        (path / INDEX).unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr("shutil.rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        new.finish(SAVED)
    (file,) = index_of(folder)
    require_whole(folder, file)


@pytest.mark.parametrize("where", [0, 9, 400, -1])
@pytest.mark.parametrize("number", [0, 1])
def test_a_flipped_byte_is_found_and_its_file_named(folder: Path, number: int, where: int) -> None:
    path = folder / f"{number:07}.safetensors"
    data = bytearray(path.read_bytes())
    data[where] ^= 1
    path.write_bytes(data)
    with pytest.raises(Unusable, match=rf"000000{number}\.safetensors must have the CRC-32 \w+, got \w+: it is damag"):
        whole(folder)


def test_a_truncated_or_missing_file_is_named(folder: Path) -> None:
    path = folder / "0000001.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-3])
    with pytest.raises(Unusable, match=rf"0000001\.safetensors must have {len(data)} bytes, got {len(data) - 3}"):
        whole(folder)
    path.unlink()
    with pytest.raises(Unusable, match=r"0000001\.safetensors must be a file of \d+ bytes, got FileNotFoundError"):
        whole(folder)


def test_a_flipped_byte_in_the_index_is_found(folder: Path) -> None:
    data = (folder / INDEX).read_bytes()
    for where in range(0, len(data), 11):
        flipped = bytearray(data)
        flipped[where] ^= 1
        (folder / INDEX).write_bytes(flipped)
        with pytest.raises(Unusable, match=r"index\.json must "):
            index_of(folder)


@pytest.mark.parametrize(
    ("identity", "says"),
    [
        ({**IDENTITY, "the model": "b"}, "the model must be b, got a"),
        ({**IDENTITY, "the type of KV": "float8_e5m2"}, "the type of KV must be float8_e5m2, got bfloat16"),
        ({**IDENTITY, "the page": "64"}, "the page must be 64, got not set"),
        ({"the model": "a"}, "the type of KV must be not set, got bfloat16"),
    ],
)
def test_another_servers_states_are_refused(folder: Path, identity: dict[str, str], says: str) -> None:
    with pytest.raises(Unusable, match=f"index.json must be of a server like this one: {says}"):
        whole(folder, identity)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"crc32": 1, "body": {"format": 1}}', "no json"])
def test_a_foreign_index_is_refused(folder: Path, text: str) -> None:
    (folder / INDEX).write_text(text)
    with pytest.raises(Unusable, match=r"index\.json must"):
        index_of(folder)


def rewritten(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the body of an index, and give it the checksum of what it is now."""
    body = json.loads((folder / INDEX).read_text())["body"]
    change(body)
    (folder / INDEX).write_text(json.dumps({"crc32": _crc_of(body), "body": body}))


DEEP = "[" * 200_000
ODD: dict[str, Callable[[dict[str, Any]], object]] = {
    "no identity": lambda body: body.pop("identity"),
    "an identity that is a list": lambda body: body.update(identity=["the model"]),
    "no states": lambda body: body.pop("states"),
    "states by name": lambda body: body.update(states={"a": 1}),
    "a state that is a number": lambda body: body["states"].append(3),
    "a state without facts": lambda body: body["states"][0].pop("idle_s"),
    "a depth in words": lambda body: body["states"][0].update(depth="20"),
    "a depth that is true": lambda body: body["states"][0].update(depth=True),
    "a depth below 0": lambda body: body["states"][0].update(depth=-1, start=-2),
    "a start beyond the depth": lambda body: body["states"][0].update(start=21),
    "no number": lambda body: body["states"][0].update(idle_s=float("nan")),
    "no end": lambda body: body["states"][0].update(passed_s=float("inf")),
    "left by a list": lambda body: body["states"][0].update(left_by=[1]),
    "left by less": lambda body: body["states"][0]["left_by"].pop("closing"),
    "a file elsewhere": lambda body: body["states"][0].update(name="../../0000000.safetensors"),
    "a file that is none": lambda body: body["states"][0].update(name="0\0.safetensors"),
}


@pytest.mark.parametrize("change", ODD.values(), ids=ODD)
def test_an_index_of_a_right_checksum_and_another_schema_is_refused(
    folder: Path, change: Callable[[dict[str, Any]], object]
) -> None:
    rewritten(folder, lambda body: body["states"][1].update(idle_s=8))
    assert len(whole(folder)) == 2, "the control: what a server might have written is read"
    rewritten(folder, change)
    with pytest.raises(Unusable, match=r"index\.json must (list|have) "):
        index_of(folder)


@pytest.mark.parametrize("text", [DEEP, '{"a":' * 100_000, f'{{"crc32": 1, "body": {DEEP}', f"{{{'1' * 5000}: 0}}"])
def test_an_index_that_is_nested_very_deeply_is_refused(folder: Path, text: str) -> None:
    (folder / INDEX).write_text(text)
    with pytest.raises(Unusable, match=r"index\.json must be an index of saved states, got \w+: "):
        index_of(folder)


def test_what_an_index_says_is_one_line_of_the_log(folder: Path) -> None:
    rewritten(folder, lambda body: body["identity"].update({"the model": "a\nmarconi: all is well"}))
    with pytest.raises(Unusable) as refused:
        index_of(folder)
    assert str(refused.value).isprintable()


def test_the_digest_of_the_weights_is_waited_for_only_by_what_fits_in_all_else(folder: Path, tmp_path: Path) -> None:
    def waited() -> str:
        raise AssertionError("nothing needs it")

    assert read_index(tmp_path / "rank-1", IDENTITY, waited) == []
    with pytest.raises(Unusable, match="the model must be b, got a"):
        read_index(folder, {**IDENTITY, "the model": "b"}, waited)
    with pytest.raises(Unusable, match="the weights must be v, got w"):
        index_of(folder, weights="v")


def test_another_format_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("marconi.engine.persistence.files.FORMAT", 2)
    with pytest.raises(Unusable, match="must be of format 2, got 1"):
        index_of(folder)


def test_the_index_holds_no_token(folder: Path) -> None:
    """Tokens are in the states' files alone, so an index may be shown when something is wrong."""
    assert set(json.loads((folder / INDEX).read_text())["body"]["states"][0]) == {
        *("name", "num_bytes", "crc32", "namespace", "depth", "start", "is_end"),
        *("idle_s", "passed_s", "num_hits", "left_by"),
    }


def test_layouts_differ_by_type_shape_and_nesting() -> None:
    one = copies_of(0, 1)
    assert layout_of(one) == layout_of(copies_of(1, 1))
    assert len({layout_of(each) for each in (one, [one], [torch.zeros(1)], [torch.zeros(1).half()])}) == 4
    with pytest.raises(TypeError, match="must be of tensors and lists of them, got dict"):
        layout_of({"kv": torch.zeros(1)})
