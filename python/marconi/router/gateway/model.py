"""What a router reads of the model that its workers serve: no weights, a few small files.

A hub name is looked up in the local cache first and fetched where it is not there, only the files that are read.
"""

import argparse
import json
from pathlib import Path
from typing import Any, Final

from marconi.model import DEVICES, PrefillLatency, load
from marconi.model.learned_latency import LearnedLatency
from marconi.router.prompts.reader import TokenizingReader

_FILES: Final = ("*.json", "*.jinja", "*.model", "*.tiktoken", "merges.txt", "vocab.txt")
_NOT_FILES: Final = ("*.index.json",)


def folder_of(name: str) -> Path:
    """Where a model's files lie; `ValueError`, one line, for what is neither a folder nor of the hub."""
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.exists() or name.startswith(("/", ".", "~")) or name.count("/") != 1:
        raise ValueError(f"--model {name!r}: must be a model's folder or a hub name")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=list(_FILES), ignore_patterns=list(_NOT_FILES)))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()
        raise ValueError(f"--model {name!r}: cannot be fetched ({reason[0] if reason else error!r})") from None


def reader_of(name: str, flags: argparse.Namespace) -> TokenizingReader:
    """What reads prompts as workers with these flags do (`add_prompt_flags`); `ValueError` for some that cannot be."""
    return TokenizingReader.of(
        folder_of(name),
        chat_template=flags.chat_template,
        template_name=flags.hf_chat_template_name,
        template_defaults=_template_defaults(flags.default_chat_template_kwargs),
        lora_paths=dict(_adapter(text) for text in flags.lora_paths),
    )


def _template_defaults(text: str | None) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except json.JSONDecodeError:
        value = None
    if not isinstance(value, dict):
        raise ValueError(f"--default-chat-template-kwargs {text!r}: a JSON object is right")
    return value


def _adapter(text: str) -> tuple[str, str]:
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        raise ValueError(f"--lora-paths {text!r}: NAME=PATH is right, as the workers have it")
    return name, path


def latency_of(name: str, profile: str | None = None, device: str = "h100") -> LearnedLatency:
    """How long prefills take: as on `device`, until they were seen; `ValueError` where nobody says what they cost."""
    if device not in DEVICES:
        raise ValueError(f"--device {device!r}: known are {', '.join(DEVICES)}")
    if profile is None:
        folder = folder_of(name)
        if not (folder / "config.json").is_file():
            raise ValueError(f"--model {name!r}: has no config.json; --profile with a known model is right")
        profile = str(folder)
    costs = load(profile)
    return LearnedLatency(costs.prefix_flops, PrefillLatency(costs, DEVICES[device]))
