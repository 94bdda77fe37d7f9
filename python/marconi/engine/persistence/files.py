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
import math
import re
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
WEIGHTS: Final = "the weights"
"""The name of the digest of the weights in an identity."""
_NAME: Final = re.compile(r"\d+\.safetensors", re.ASCII)
_ENTRY: Final = {"name": str, "is_end": bool} | dict.fromkeys(
    ("num_bytes", "crc32", "namespace", "depth", "start"), int
)
_LEFT_BY: Final = {"num_prompt_tokens": int, "went_on": bool, "closing": int, "namespace": int, "is_open": bool}


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

    def __init__(self, folder: Path) -> None:
        """Make the new folder; `OSError` where that cannot be done."""
        self._folder = folder
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

    def finish(self, identity: Mapping[str, str]) -> None:
        """Write the index, of a server that is `identity`, and replace the folder that was there."""
        body = {
            "format": FORMAT,
            "identity": dict(identity),
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


def read_index(folder: Path, identity: Mapping[str, str], weights: Callable[[], str]) -> list[SavedFile]:
    """The states of a folder, the most valuable first; none where nothing was saved.

    `weights` is called, and may wait for a digest, once there are states that fit in all else.

    Raises `Unusable` for an index that is damaged or odd, or of a server that differs in its `identity` or its weights.
    """
    index = folder / INDEX
    try:
        found = json.loads(index.read_bytes())
        body = found.get("body") if isinstance(found, dict) else None
        crc32 = _crc_of(body) if isinstance(body, dict) else None
    except FileNotFoundError:
        return []
    except (OSError, ValueError, RecursionError, MemoryError) as error:
        raise Unusable(f"{index} must be an index of saved states, got {type(error).__name__}: {error}") from None
    if not isinstance(body, dict) or found.get("crc32") != crc32:
        raise Unusable(f"{index} must have the CRC-32 that it names: it is damaged, or no index of saved states")
    if body.get("format") != FORMAT:
        raise Unusable(f"{index} must be of format {FORMAT}, got {_shown(body.get('format'))}")
    saved = body.get("identity")
    states = body.get("states")
    if not isinstance(saved, dict) or not isinstance(states, list):
        raise Unusable(f"{index} must have an identity and a list of states: it was not written by a server")
    for name in dict.fromkeys([*identity, *saved, WEIGHTS]):
        own, other = weights() if name == WEIGHTS else identity.get(name, "not set"), saved.get(name, "not set")
        if own != other:
            raise Unusable(
                f"{index} must be of a server like this one: {_shown(name)} must be {own}, got {_shown(other)}"
            )
    try:
        return [_entry(each) for each in states]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Unusable(f"{index} must list states as a server does, got {type(error).__name__}: {error}") from None


def read_usable(
    folder: Path,
    identity: Mapping[str, str],
    weights: Callable[[], str],
    room: tuple[int, int],
    is_going_on: Callable[[], bool],
) -> list[SavedFile]:
    """Read the index, and check every file that fits, as long as `is_going_on`; `Unusable` if one of them is damaged.

    `room` is the number of states, and of tokens with KV, that there is room for.
    """
    num_states, num_tokens = room
    files: list[SavedFile] = []
    for file in read_index(folder, identity, weights)[:num_states]:
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


def _shown(value: Any) -> str:
    """A value of an index as a line of the log can show it."""
    text = str(value) if isinstance(value, str | int) else type(value).__name__
    return text if text.isprintable() else ascii(text)


def _entry(saved: dict[str, Any]) -> SavedFile:
    """An entry of an index; `KeyError`, `TypeError` or `ValueError` for one that no server writes."""
    left_by = saved["left_by"]
    facts = SavedFacts(
        _typed(saved, "idle_s", float),
        _typed(saved, "passed_s", float),
        _typed(saved, "num_hits", int),
        None if left_by is None else LeftBy(**{name: _typed(left_by, name, kind) for name, kind in _LEFT_BY.items()}),
    )
    file = SavedFile(**{name: _typed(saved, name, kind) for name, kind in _ENTRY.items()}, facts=facts)
    if not file.start <= file.depth:
        raise ValueError(f"start must be at most depth, {file.depth}, got {file.start}")
    if not _NAME.fullmatch(file.name):
        raise ValueError("a file's name must be a number and .safetensors")
    return file


def _typed(saved: dict[str, Any], name: str, kind: type) -> Any:
    value = saved[name]
    # What JSON holds beside numbers that are finite and not negative, no server writes; -1 is a closing not known.
    is_of_kind = type(value) is kind or (kind is float and type(value) is int)
    if not is_of_kind or (kind in (int, float) and not (-1 if name == "closing" else 0) <= value < math.inf):
        raise ValueError(f"{name} must be of type {kind.__name__} and in range")
    return value
