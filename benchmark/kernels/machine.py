"""What is measured, and on which machine: versions, commit, device."""

import os
import platform
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

import torch

FOLDER = Path(__file__).parent
PACKAGES = ("torch", "triton", "sglang")


def description(device: torch.device, commit: str | None = None) -> dict[str, str | int | None]:
    """Describe machine and versions for the result file; None is unknown or not installed.

    `commit` names what is measured where it is no git checkout.
    """
    return {
        "machine": platform.machine(),
        "processors": os.cpu_count(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES},
        "commit": commit or _commit(),
    }


def line_of(described: dict[str, str | int | None]) -> str:
    """The description in a line, for a terminal."""
    versions = ", ".join(f"{name} {described[name] or 'not installed'}" for name in ("python", *PACKAGES))
    where = f"{described['device']} ({described['machine']}, {described['processors']} processors)"
    return f"{where}, {versions}, commit {described['commit'] or 'unknown'}"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The checkout's commit, with "+ changes" where files of it are changed."""
    git = shutil.which("git")
    if git is None:
        return None

    def ask(*arguments: str) -> str | None:
        run = subprocess.run([git, *arguments], cwd=FOLDER, capture_output=True, text=True, check=False)  # noqa: S603
        return run.stdout.strip() if run.returncode == 0 else None

    commit = ask("rev-parse", "--short=12", "HEAD")
    return f"{commit} + changes" if commit and ask("status", "--porcelain") else commit
