"""Pack an interpreter and its packages into parts small enough to carry to a machine with a card and no network.

Packages that no server imports stay here, and so do CUDA's libraries, which a machine with a card has: `unpack.sh`
links them. Machine code for other cards is blanked, so that it compresses to nothing: a fat binary is a sequence of
containers, a container a sequence of entries, each with a header (its kind at byte 0, the header's bytes at 4, the
payload's bytes at 8, the architecture at 28), of which the driver reads the best that fits. PTX stays in containers
without code for `ARCH`.

    python benchmark/pack_environment.py FOLDER [--part-mb 59.5]     writes part.00, part.01, ..., zstd and unpack.sh
    bash FOLDER/unpack.sh FOLDER     on the other machine: the interpreter is /opt/card/bin/python; LD_LIBRARY_PATH must
                                     name /opt/card/lib, and PYTHONPATH this project's two source folders
"""

import argparse
import io
import os
import shutil
import struct
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

ARCH = 90
CONTAINER, ENTRY = struct.Struct("<IHHQ"), struct.Struct("<HHIQIIHHI")
MAGIC = struct.pack("<I", 0xBA55ED50)
ELF = 2
STRIPPED = ("libtriton.so", "libproton.so")
LARGE_BYTES = 8_000_000
"""A library of fewer bytes is packed as it is."""
NO_SERVER_NEEDS = (
    *("nvidia/cu13/", "nvidia/cudnn/", "nvidia/cusparselt/", "nvidia/nvshmem/", "nvidia/mathdx/", "nccl/", "nvshmem/"),
    *("nvidia_cutlass_dsl/cu12/", "nvidia_cutlass_dsl/dsl_packages/cutlass/_mlir/_mlir_libs/_cutlass_ir.cu12"),
    *("triton/backends/nvidia/lib/cupti", "triton/backends/amd/lib/", "sgl_kernel/sm100/", "sgl_kernel/infllm_ops"),
    *("playwright/", "tilelang/", "mypy/", "mypyc/", "6ec57", "jedi/", "modelscope/", "z3/", "lxml/", "llvmlite/"),
    *(
        "numba/",
        "timm/",
        "anthropic/",
        "deepseek_recipe",
        "grpc/",
        "tml_renderers/",
        "torchcodec",
        "Cython/",
        "hf_xet/",
    ),
)
"""Beginnings of paths in `site-packages`."""
NOT_OF_THE_LIBRARY = ("site-packages/", "test/", "idlelib/", "config-3", "lib2to3/", "ensurepip/")
UNPACK = """\
#!/usr/bin/env bash
# Unpack the parts in $1; NVIDIA is the folder `nvidia` of that machine's torch.
set -euo pipefail
mkdir -p /opt/card
chmod +x "$1"/zstd
cat "$1"/part.* | "$1"/zstd -dc --long=27 | tar -x -C /opt/card
nvidia=${{NVIDIA:-$(python3 -c 'import nvidia; print(list(nvidia.__path__)[0])')}}
for each in "$nvidia"/*; do
  here=/opt/card/lib/{version}/site-packages/nvidia/${{each##*/}}
  [ -e "$here" ] || ln -s "$each" "$here"
done
ldconfig -n /opt/card/lib
export LD_LIBRARY_PATH=/opt/card/lib
/opt/card/bin/python -c 'import torch; print(torch.__version__, torch.cuda.is_available())'
"""


def keep_card(code: bytes) -> bytes:
    """`code` with the payloads blanked that a card of `ARCH` never reads."""
    left = bytearray(code)
    at = code.find(MAGIC)
    while 0 <= at <= len(code) - CONTAINER.size:
        _, _, header, size = CONTAINER.unpack_from(code, at)
        end = at + header + size
        entries = list(_entries(code, at + header, end)) if header == CONTAINER.size and end <= len(code) else []
        has_code = any(kind == ELF and arch == ARCH for kind, arch, _, _ in entries)
        for kind, arch, start, end in entries:
            if arch != ARCH and (kind == ELF or has_code):
                left[start:end] = bytes(end - start)
        at = code.find(MAGIC, end if entries else at + len(MAGIC))
    return bytes(left)


def _entries(code: bytes, at: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Kind, architecture, first and last byte of each payload."""
    while at + 64 <= end:
        kind, _, header, size, _, _, _, _, arch = ENTRY.unpack_from(code, at)
        if header < 64 or at + header + size > end:
            return
        yield kind, arch, at + header, at + header + size
        at += header + size


def _files(folder: Path, inside: str, left_out: tuple[str, ...]) -> Iterator[tuple[Path, str]]:
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and not name.startswith(left_out):
            yield path, f"{inside}/{name}"


def _add(archive: tarfile.TarFile, path: Path, name: str) -> None:
    info = archive.gettarinfo(str(path.resolve()), name)
    content = path.read_bytes()
    if path.name in STRIPPED:
        with tempfile.TemporaryDirectory() as scratch:
            stripped = Path(scratch) / path.name
            subprocess.run(("strip", "-o", stripped, path), check=True)  # noqa: S603, S607
            content = stripped.read_bytes()
    if info.size >= LARGE_BYTES and ".so" in path.name:
        content = keep_card(content)
    info.type, info.size = tarfile.REGTYPE, len(content)
    archive.addfile(info, io.BytesIO(content))


def main() -> int:
    """Pack; the last line says how many parts and bytes were written."""
    parser = argparse.ArgumentParser("pack_environment.py", description="An environment to carry to a card.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--part-mb", type=float, default=59.5, metavar="N", help="megabytes of a part (default: 59.5)")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    for old in given.folder.glob("part.*"):
        old.unlink()
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    library, home = Path(sysconfig.get_path("stdlib")), Path(sys.base_prefix)
    if (zstd := shutil.which("zstd")) is None:
        parser.error("zstd must be installed, found none")
    packed = subprocess.Popen((zstd, "-q", "-T2", "-9", "--long=27"), stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # noqa: S603
    split = ("split", "-d", "-b", str(int(given.part_mb * 1e6)), "-", str(given.folder / "part."))
    parts = subprocess.Popen(split, stdin=packed.stdout)  # noqa: S603
    assert packed.stdin is not None
    assert packed.stdout is not None
    packed.stdout.close()
    with packed.stdin as pipe, tarfile.open(fileobj=pipe, mode="w|") as archive:
        _add(archive, (home / "bin" / version).resolve(), f"bin/{version}")
        for path in sorted((home / "lib").glob("libpython*")):
            _add(archive, path, f"lib/{path.name}")
        for path, name in _files(library, f"lib/{version}", NOT_OF_THE_LIBRARY):
            _add(archive, path, name)
        for path, name in _files(Path(sysconfig.get_path("purelib")), f"lib/{version}/site-packages", NO_SERVER_NEEDS):
            if not name.endswith(".pth"):
                _add(archive, path, name)
        for path, name in _files(Path(sysconfig.get_path("include")), f"include/{version}", ()):
            _add(archive, path, name)
        link = tarfile.TarInfo("bin/python")
        link.type, link.linkname = tarfile.SYMTYPE, version
        archive.addfile(link)
    if packed.wait() or parts.wait():
        return 1
    shutil.copy(zstd, given.folder / "zstd")
    (given.folder / "unpack.sh").write_text(UNPACK.format(version=version))
    found = sorted(given.folder.glob("part.*"))
    print(f"{len(found)} parts, {sum(each.stat().st_size for each in found) / 1e6:.0f} MB in {os.fspath(given.folder)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
