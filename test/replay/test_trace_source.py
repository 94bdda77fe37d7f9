"""Where a trace may lie: compressed or not, alone, in a folder or in a tar; told by content."""

import bz2
import gzip
import io
import lzma
import subprocess
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from marconi.policy.request import unpack
from marconi.replay.trace import read
from marconi.replay.trace.source import Source

LINES = b"".join(
    b'{"timestamp": %d, "input_length": 600, "output_length": 5, "hash_ids": [7, %d]}\n' % (time, 10 + time)
    for time in range(3)
)
SESSION = b'{"block_size": 4, "hash_id_scope": "local", "tool_tokens": 0, "system_tokens": 0, "requests": []}\n'


def tarred(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


@pytest.mark.parametrize("compress", [bytes, gzip.compress, bz2.compress, lzma.compress])
@pytest.mark.parametrize("pack", [lambda data: data, lambda data: tarred({"a.jsonl": data})])
def test_compression_and_tar_are_recognised_without_a_telling_name(
    tmp_path: Path, compress: Callable[[bytes], bytes], pack: Callable[[bytes], bytes]
) -> None:
    (tmp_path / "trace").write_bytes(compress(pack(LINES)))
    trace = read(tmp_path / "trace")
    assert [unpack(request.path) for request in trace.requests] == [[0, 1], [0, 2], [0, 3]]
    assert trace.name == "trace"


@pytest.mark.parametrize("pack", [bytes, gzip.compress, lambda data: gzip.compress(tarred({"a.jsonl": data}))])
@pytest.mark.parametrize("by", ["stdin", "a pipe"])
def test_what_can_be_read_only_once_is_read_like_a_file(
    by: str, pack: Callable[[bytes], bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "content").write_bytes(pack(LINES))
    with subprocess.Popen(["cat", tmp_path / "content"], stdout=subprocess.PIPE) as source:
        assert source.stdout is not None
        name = "-" if by == "stdin" else f"/dev/fd/{source.stdout.fileno()}"
        if by == "stdin":
            monkeypatch.setattr("sys.stdin", io.TextIOWrapper(source.stdout))
        trace = read(name)
    assert [unpack(request.path) for request in trace.requests] == [[0, 1], [0, 2], [0, 3]]
    assert trace.name == name.replace("-", "stdin")
    assert list(tmp_path.iterdir()) == [tmp_path / "content"]


def test_a_fault_in_what_stdin_brings_is_one_line_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for content, says in (
        (LINES + b"{\n", "^stdin, line 4: not JSON"),
        (b"", "^stdin: the file is empty$"),
        (b"?", "^stdin: of no known format"),
        (gzip.compress(LINES)[:-9], "^stdin: cannot be read to its end"),
        (SESSION * 2, "^stdin: .*a session needs a file of its own, in a folder or a tar$"),
    ):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))
        with pytest.raises(ValueError, match=says):
            read("-")
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(ValueError, match=r"^stdin: is closed$"):
        read("-")


def test_members_of_a_tar_may_be_compressed_each_for_itself(tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(tarred({"x/README.md": b"not data", "x/a.gz": gzip.compress(LINES)}))
    assert len(read(tmp_path / "t").requests) == 3


def test_a_folder_gives_its_files_by_path_and_a_tar_in_its_own_order(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (folder / "sub").mkdir(parents=True)
    for name in ("b.jsonl", "a.jsonl", "sub/c.jsonl", "README.md", "LICENSE", ".hidden"):
        (folder / name).write_bytes(name.encode())
    (tmp_path / "tar").write_bytes(tarred({"b": b"b", "a": b"a", ".hidden": b"h", "notes.txt": b"n"}))
    assert [document.read() for document in Source(folder).documents()] == [b"a.jsonl", b"b.jsonl", b"sub/c.jsonl"]
    assert [document.read() for document in Source(tmp_path / "tar").documents()] == [b"b", b"a"]


@pytest.mark.parametrize("compress", [gzip.compress, bz2.compress, lzma.compress])
@pytest.mark.parametrize("damage", [lambda data: data[:-9], lambda data: data[:12] + b"\xff" * (len(data) - 12)])
def test_damaged_data_are_one_line_with_the_file(
    tmp_path: Path, compress: Callable[[bytes], bytes], damage: Callable[[bytes], bytes]
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(damage(compress(LINES.splitlines(keepends=True)[0] * 6000)))
    with pytest.raises(ValueError, match=r"^[^\n]*trace\.jsonl: cannot be read to its end: [^\n]+$"):
        read(path, format="mooncake")


def test_a_tar_cut_within_a_member_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cut"
    path.write_bytes(tarred({"a.jsonl": LINES * 100})[:9000])
    with pytest.raises(ValueError, match="cut: cannot be read to its end"):
        read(path)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "the file is empty"),
        (gzip.compress(b"", mtime=0), "the file is empty"),
        (tarred({"README": b"nothing here"}), "holds no trace file"),
        (b"hello\n", "of no known format"),
        (b'{"a": 1}\n', "of no known format"),
        (b"TIMESTAMP,ContextTokens,GeneratedTokens\n", "holds no request"),
    ],
)
def test_what_holds_no_trace_is_one_line(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"^[^\n]*file: {says}[^\n]*$"):
        read(path)


def test_a_missing_file_and_an_unknown_format_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="absent: no such file or folder"):
        read(tmp_path / "absent")
    with pytest.raises(ValueError, match="a format must be one of coding-agent, sharegpt"):
        read(tmp_path, format="vhs")


def test_an_empty_folder_holds_no_trace(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no trace file"):
        read(tmp_path)


def test_progress_ends_with_equal_counts(tmp_path: Path) -> None:
    (tmp_path / "trace").write_bytes(LINES * 1)
    calls: list[tuple[int, int | None]] = []
    read(tmp_path / "trace", progress=lambda done, total: calls.append((done, total)))
    assert calls == [(3, 3)]
    (tmp_path / "long").write_bytes(LINES.splitlines(keepends=True)[0] * 600)
    calls.clear()
    read(tmp_path / "long", progress=lambda done, total: calls.append((done, total)))
    assert calls == [(256, None), (512, None), (600, 600)]


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path: Path) -> None:
    (tmp_path / "trace").write_bytes(b"\xef\xbb\xbf" + LINES)
    assert len(read(tmp_path / "trace").requests) == 3
