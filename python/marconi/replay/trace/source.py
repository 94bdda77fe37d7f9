"""Where a trace lies: a file, a folder or a tar of files, each compressed or not, as a sequence of documents.

Compression and tar are recognised by their first bytes, not by a name. A folder gives its files sorted by path, a tar
in its own order; in both, hidden files and texts beside the data (README, LICENSE, `.md`, `.txt`, `.py`) are left out.
Input that can be read only once, stdin (`-`) or a named pipe, is copied unchanged to a temporary file while it is read:
it may be compressed, or a tar, as well. Data that end early or do not decompress raise a `ValueError` that names
the file.
"""

import bz2
import codecs
import gzip
import importlib
import io
import lzma
import re
import shutil
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, cast

STDIN = "-"
"""The path of a trace that comes in by stdin."""

HEAD_BYTES = 1 << 16
"""How much of a document is looked at to recognise its format."""

_MAGIC = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ\x00": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
_NOT_DATA = re.compile(r"(^|/)\.|(^|/)(readme|license|licence|notice)[^/]*$|\.(md|txt|rst|py)$", re.IGNORECASE)
_KEY = re.compile(rb'(?<!\\)"([A-Za-z_]+)"\s*:')


@dataclass(frozen=True)
class FileHeader:
    """The beginning of a document."""

    data: bytes

    @cached_property
    def keys(self) -> frozenset[str]:
        """Names that are keys of a JSON object somewhere in it."""
        return frozenset(key.decode() for key in _KEY.findall(self.data))


@dataclass(frozen=True, slots=True)
class Document:
    """One file's content, decompressed, to be read once from its beginning."""

    name: str
    stream: IO[bytes]

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """The lines that are not blank, with their numbers from 1, without a byte order mark."""
        with _intact(self.name):
            for number, line in enumerate(self.stream, start=1):
                if number == 1:
                    line = line.removeprefix(codecs.BOM_UTF8)
                if not line.isspace():
                    yield number, line

    def read(self, num_bytes: int = -1) -> bytes:
        """The next `num_bytes`, or all that is left."""
        with _intact(self.name):
            return self.stream.read(num_bytes)


@dataclass(frozen=True, slots=True)
class Source:
    """A path that holds a trace."""

    path: Path
    came_by: str | None = None
    """The caller's name of the source that the path holds a copy of."""

    @property
    def name(self) -> str:
        """The file's name, without the folders that lead to it."""
        return self.came_by or self.path.name

    @property
    def place(self) -> str:
        """Name for messages."""
        return self.came_by or str(self.path)

    def documents(self) -> Iterator[Document]:
        """The documents, one after the other; each is read before the next is asked for."""
        if self.path.is_dir():
            for file in _files(self.path):
                with _intact(str(file)), _opened(file) as stream:
                    yield Document(str(file), stream)
        elif self._is_tar():
            with (
                _intact(self.place),
                _opened(self.path) as stream,
                tarfile.open(fileobj=stream, mode="r|") as tar,
            ):
                for member in tar:
                    content = None if _NOT_DATA.search(member.name) else tar.extractfile(member)
                    if content is not None:
                        name = f"{self.place}:{member.name}"
                        yield Document(name, _decompressed(io.BytesIO(content.read())))
        else:
            with _intact(self.place), _opened(self.path) as stream:
                yield Document(self.place, stream)

    def num_documents(self) -> int | None:
        """How many documents there are, where that is known without reading them."""
        if self.path.is_dir():
            return len(_files(self.path))
        return None if self._is_tar() else 1

    def head(self) -> FileHeader:
        """The beginning of the first document; `ValueError` where there is none or it is empty."""
        if not self.path.exists():
            raise ValueError(f"{self.place}: no such file or folder")
        for document in self.documents():
            if data := document.read(HEAD_BYTES):
                return FileHeader(data)
            raise ValueError(f"{document.name}: the file is empty")
        raise ValueError(f"{self.place}: holds no trace file")

    def _is_tar(self) -> bool:
        with _intact(self.place), _opened(self.path) as stream:
            return stream.read(512)[257:262] == b"ustar"


@contextmanager
def source_at(path: str) -> Iterator[Source]:
    """The source at `path`, or a copy of what can be read only once; the copy is removed afterwards."""
    where = Path(path)
    if path != STDIN and (where.is_file() or where.is_dir() or not where.exists()):
        yield Source(where)
        return
    name = "stdin" if path == STDIN else path
    with tempfile.NamedTemporaryFile(prefix="marconi-trace-") as copy:
        with _intact(name), _read_once(path) as stream:
            shutil.copyfileobj(stream, copy)
        copy.flush()
        yield Source(Path(copy.name), name)


@contextmanager
def _read_once(path: str) -> Iterator[IO[bytes]]:
    if path != STDIN:
        with Path(path).open("rb") as stream:
            yield stream
    elif sys.stdin is None:
        raise ValueError("stdin: is closed")
    else:
        yield sys.stdin.buffer


def _files(folder: Path) -> list[Path]:
    found = (file for file in folder.rglob("*") if file.is_file())
    return sorted(file for file in found if not _NOT_DATA.search(file.relative_to(folder).as_posix()))


def _opened(path: Path) -> IO[bytes]:
    return _decompressed(path.open("rb"))


def _decompressed(stream: IO[bytes]) -> IO[bytes]:
    first = stream.read(max(map(len, _MAGIC)))
    stream.seek(0)
    kind = next((name for magic, name in _MAGIC.items() if first.startswith(magic)), None)
    if kind == "gzip":
        return cast(IO[bytes], gzip.GzipFile(fileobj=stream))
    if kind == "bzip2":
        return bz2.BZ2File(stream)
    if kind == "xz":
        return lzma.LZMAFile(stream)
    return _zstd(stream) if kind == "zstd" else stream


def _zstd(stream: IO[bytes]) -> IO[bytes]:
    try:
        return cast(IO[bytes], importlib.import_module("compression.zstd").ZstdFile(stream))
    except ImportError:
        pass
    try:
        decompressor = importlib.import_module("zstandard").ZstdDecompressor()
    except ImportError:
        raise ValueError(
            "zstd data need Python 3.14 or the package zstandard: install it or decompress first"
        ) from None
    return io.BufferedReader(decompressor.stream_reader(stream))


@contextmanager
def _intact(name: str) -> Iterator[None]:
    try:
        yield
    except (EOFError, lzma.LZMAError, zlib.error, tarfile.TarError, OSError) as error:
        raise ValueError(f"{name}: cannot be read to its end: {error}") from error
