"""What a router reads of the model that its workers serve: no weights, a few small files.

A hub name is looked up in the local cache first and fetched where it is not there, only the files that are read.
"""

from pathlib import Path
from typing import Final

from marconi.model import load
from marconi.model.profile import ModelProfile
from marconi.router.prompts.base import PromptReader
from marconi.router.prompts.reader import TokenizingReader

_FILES: Final = ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "chat_template.json")


def folder_of(name: str) -> Path:
    """Where a model's files lie; `ValueError`, one line, for what is neither a folder nor of the hub."""
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.exists() or name.startswith(("/", ".", "~")) or name.count("/") != 1:
        raise ValueError(f"--model {name!r}: no such folder; one with a tokenizer.json is right, or a hub name")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=list(_FILES)))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()
        raise ValueError(f"--model {name!r}: cannot be fetched ({reason[0] if reason else error!r})") from None


def reader_of(name: str, chat_template: Path | None = None) -> PromptReader:
    """What reads prompts as the workers do; `ValueError` where that cannot be done exactly."""
    template = None if chat_template is None else chat_template.read_text(encoding="utf-8")
    return TokenizingReader.of(folder_of(name), chat_template=template)


def profile_of(name: str, profile: str | None = None) -> ModelProfile:
    """What its prefixes cost to compute; `ValueError` where neither its folder nor `profile` says."""
    if profile is not None:
        return load(profile)
    folder = folder_of(name)
    if not (folder / "config.json").is_file():
        raise ValueError(f"--model {name!r}: has no config.json; --profile with a known model is right")
    return load(str(folder))
