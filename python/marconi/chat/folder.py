"""The folder of a model's tokenizer and configuration: given, or a hub name's, without the weights.

A hub name is looked up in the local cache first and fetched where it is not there, only the files that are read.
"""

from pathlib import Path
from typing import Final

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

_FILES: Final = ("*.json", "*.jinja", "*.model", "*.tiktoken", "merges.txt", "vocab.txt")
_NOT_FILES: Final = ("*.index.json",)


def folder_of(name: str, option: str = "--model") -> Path:
    """The folder of a model's files; `ValueError`, one line, where `option` names neither it nor the hub's."""
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.exists() or name.startswith(("/", ".", "~")) or name.count("/") != 1:
        raise ValueError(f"{option} must be a model's folder or a hub name, got {name!r}")
    try:
        return Path(snapshot_download(name, allow_patterns=list(_FILES), ignore_patterns=list(_NOT_FILES)))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()
        raise ValueError(f"{option} {name!r}: cannot be fetched ({reason[0] if reason else error!r})") from None
