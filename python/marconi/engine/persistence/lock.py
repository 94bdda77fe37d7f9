"""One server a folder: a file that the kernel locks for as long as the server lives, however it ends."""

import fcntl
import logging
import os
from pathlib import Path
from typing import Final

from marconi.engine.version import Refusal

logger = logging.getLogger(__name__)

LOCK: Final = "lock"


class FolderLock:
    """The lock on a folder of saved states."""

    def __init__(self, folder: Path) -> None:
        """Lock `folder`, which is made if need be; `Refusal` where another server has it.

        A folder that cannot be written to, or a file system without locks, is no reason not to serve: a warning.
        """
        self._descriptor: int | None = None
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            opened = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            logger.warning("marconi: --marconi-save-dir %s cannot be locked: %s", folder, error.strerror)
            return
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            other = os.pread(opened, 20, 0).decode("ascii", "replace").strip()
            os.close(opened)
            owner = f"process {other}" if other.isdecimal() else "another server"
            raise Refusal(
                f"--marconi-save-dir must be a folder of this server's own, got {folder}, which {owner} uses: "
                "give each server another"
            ) from None
        except OSError as error:
            os.close(opened)
            logger.warning("marconi: --marconi-save-dir %s cannot be locked: %s", folder, error.strerror)
            return
        os.ftruncate(opened, 0)
        os.pwrite(opened, f"{os.getpid()}\n".encode(), 0)
        self._descriptor = opened

    def release(self) -> None:
        """Let another server have the folder; a second time does nothing."""
        if self._descriptor is not None:
            # A process that was forked meanwhile may have the file open, too.
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            os.close(self._descriptor)
            self._descriptor = None
