"""Saved states as files: a safetensors file for each state, and an index that names them all.

    DIR/rank-R/index.json                 identity of the server, and the states, the most valuable first
    DIR/rank-R/0000000.safetensors ...    the tokens of a state's path, the state, and the KV that comes with it

The index is written last, and a whole folder takes the place of the one before, which is removed only then: a server
that is killed while it writes or removes files leaves one of the two. The CRC-32 of every file stands in the index, and
that of the index in itself: it finds damage, not forgery, and whoever can write to the folder decides what the next
server answers. What is written is readable by the server's user alone: it holds users' prompts.

Copies of pools are lists of lists of tensors, which SGLang's pools define. A file keeps the tensors by number, and the
nesting in its metadata.
"""

import json
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save

from marconi.policy.persistence import SavedState
from marconi.tree import LeftBy, SavedFacts

FORMAT: Final = 1
INDEX: Final = "index.json"
_PATH: Final = "path"
_NESTING: Final = "nesting"
_CHUNK_BYTES: Final = 1 << 24


class Unusable(Exception):
    """Saved states that this server cannot use; the message names the file and says why."""


@dataclass(frozen=True, slots=True)
class SavedFile:
    """A state's entry in the index."""

    name: str
    num_bytes: int
    crc32: int
    namespace: int
    depth: int
    """Tokens that the state stands for."""
    start: int
    """Tokens whose KV comes with states that precede it."""
    is_end: bool
    """Whether a request ended there."""
    facts: SavedFacts


class Contents(NamedTuple):
    """A file's contents."""

    path: bytes
    """Packed ids."""
    copies: Any
    """Nested lists of tensors on the host."""


class SavedFolder:
    """A folder that is being filled beside the one whose place it takes."""

    def __init__(self, folder: Path, identity: Mapping[str, str]) -> None:
        """Make the new folder; `OSError` where that cannot be done."""
        self._folder = folder
        self._identity = dict(identity)
        self._new, self._old = (folder.with_name(folder.name + suffix) for suffix in (".new", ".old"))
        self._files: list[SavedFile] = []
        for left in (self._new, self._old):
            shutil.rmtree(left, ignore_errors=True)
        self._new.mkdir(mode=0o700, parents=True)

    def add(self, state: SavedState, *, is_end: bool, copies: Any) -> int:
        """Write a state; returns the bytes of its file. `OSError` where they cannot be written."""
        tensors: list[torch.Tensor] = []
        nesting = _flatten(copies, tensors)
        named = {str(number): tensor for number, tensor in enumerate(tensors)}
        named[_PATH] = torch.frombuffer(bytearray(state.path), dtype=torch.uint8)
        data = save(named, {_NESTING: json.dumps(nesting)})
        name = f"{len(self._files):07}.safetensors"
        (self._new / name).write_bytes(data)
        entry = SavedFile(
            name, len(data), zlib.crc32(data), state.namespace, state.depth, state.start, is_end, state.facts
        )
        self._files.append(entry)
        return len(data)

    def finish(self) -> None:
        """Write the index, and replace the folder that was there."""
        body = {
            "format": FORMAT,
            "identity": self._identity,
            "states": [
                {name: getattr(each, name) for name in SavedFile.__slots__ if name != "facts"}
                | each.facts._asdict()
                | {"left_by": each.facts.left_by and each.facts.left_by._asdict()}
                for each in self._files
            ],
        }
        (self._new / INDEX).write_text(json.dumps({"crc32": _crc_of(body), "body": body}), encoding="utf-8")
        if self._folder.exists():
            self._folder.rename(self._old)
        self._new.rename(self._folder)
        shutil.rmtree(self._old, ignore_errors=True)

    def abandon(self) -> None:
        """Remove what was written; the folder before stays."""
        shutil.rmtree(self._new, ignore_errors=True)


def read_index(folder: Path, identity: Mapping[str, str]) -> list[SavedFile]:
    """The states of a folder, the most valuable first; none where nothing was saved.

    Raises `Unusable` for an index that is damaged, or of a server that differs in its `identity`.
    """
    index = folder / INDEX
    try:
        found = json.loads(index.read_bytes())
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise Unusable(f"{index} must be an index of saved states, got {type(error).__name__}: {error}") from None
    body = found.get("body") if isinstance(found, dict) else None
    if not isinstance(body, dict) or found.get("crc32") != _crc_of(body):
        raise Unusable(f"{index} must have the CRC-32 that it names: it is damaged, or no index of saved states")
    if body.get("format") != FORMAT:
        raise Unusable(f"{index} must be of format {FORMAT}, got {body.get('format')}")
    saved: dict[str, str] = body["identity"]
    for name in dict.fromkeys([*identity, *saved]):
        own, other = identity.get(name, "not set"), saved.get(name, "not set")
        if own != other:
            raise Unusable(f"{index} must be of a server like this one: {name} must be {own}, got {other}")
    return [_entry(each) for each in body["states"]]


def read_usable(
    folder: Path, identity: Mapping[str, str], num_states: int, num_tokens: int, is_going_on: Callable[[], bool]
) -> list[SavedFile]:
    """Read the index, and check every file that fits, as long as `is_going_on`; `Unusable` if one of them is damaged.

    `num_states` and `num_tokens` are the room that there is for states and for KV.
    """
    files: list[SavedFile] = []
    for file in read_index(folder, identity)[:num_states]:
        num_tokens -= file.depth - file.start
        if num_tokens < 0 or not is_going_on():
            break
        require_whole(folder, file)
        files.append(file)
    return files


def require_whole(folder: Path, file: SavedFile) -> None:
    """Raise `Unusable` unless the file is the one that was written; reads all of it."""
    path = folder / file.name
    num_bytes = crc32 = 0
    try:
        with path.open("rb") as opened:
            while chunk := opened.read(_CHUNK_BYTES):
                num_bytes, crc32 = num_bytes + len(chunk), zlib.crc32(chunk, crc32)
    except OSError as error:
        raise Unusable(f"{path} must be a file of {file.num_bytes} bytes, got {type(error).__name__}") from None
    if num_bytes != file.num_bytes:
        raise Unusable(f"{path} must have {file.num_bytes} bytes, got {num_bytes}")
    if crc32 != file.crc32:
        raise Unusable(f"{path} must have the CRC-32 {file.crc32:08x}, got {crc32:08x}: it is damaged")


def read_file(folder: Path, file: SavedFile) -> Contents:
    """The contents of a file that is whole."""
    with safe_open(folder / file.name, "pt") as opened:
        tensors: Iterator[torch.Tensor] = (opened.get_tensor(str(each)) for each in range(len(opened.keys()) - 1))
        copies = _nested(json.loads(opened.metadata()[_NESTING]), tensors)
        return Contents(opened.get_tensor(_PATH).numpy().tobytes(), copies)


def layout_of(copies: Any) -> str:
    """The types, and the shapes without the numbers of tokens and slots, of the tensors of a copy of one page."""
    tensors: list[torch.Tensor] = []
    nesting = _flatten(copies, tensors)
    shapes = [f"{str(each.dtype).removeprefix('torch.')}{list(each.shape)}" for each in tensors]
    return f"{json.dumps(nesting, separators=(',', ':'))} of {', '.join(shapes)}"


def _flatten(copies: Any, tensors: list[torch.Tensor]) -> Any:
    """The nesting of `copies`, with 0 for a tensor, which joins `tensors`; `TypeError` for anything else."""
    if isinstance(copies, torch.Tensor):
        tensors.append(copies.contiguous())
        return 0
    if not isinstance(copies, list | tuple):
        raise TypeError(f"a copy must be of tensors and lists of them, got {type(copies).__name__}")
    return [_flatten(each, tensors) for each in copies]


def _nested(nesting: Any, tensors: Iterator[torch.Tensor]) -> Any:
    return next(tensors) if nesting == 0 else [_nested(each, tensors) for each in nesting]


def _crc_of(body: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())


def _entry(saved: dict[str, Any]) -> SavedFile:
    left_by = saved["left_by"]
    facts = SavedFacts(
        saved["idle_s"], saved["passed_s"], saved["num_hits"], None if left_by is None else LeftBy(**left_by)
    )
    return SavedFile(**{name: saved[name] for name in SavedFile.__slots__ if name != "facts"}, facts=facts)
