"""The model that the workers serve, as a router needs it: no weights, a few small files.

    folder or hub name + the workers' flags that change prompts --reader_of--> TokenizingReader
    config.json, or a known model's name; a device              --latency_of--> LearnedLatency

A hub name is looked up in the local cache first and fetched where it is not there, only the files that are read.
"""

import argparse
import json
from pathlib import Path
from typing import Any, Final

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from marconi.model import DEVICES, PrefillLatency, load
from marconi.model.learned_latency import LearnedLatency
from marconi.router.prompts.reader import TokenizingReader

_FILES: Final = ("*.json", "*.jinja", "*.model", "*.tiktoken", "merges.txt", "vocab.txt")
_NOT_FILES: Final = ("*.index.json",)


def folder_of(name: str) -> Path:
    """The folder of a model's files; `ValueError`, one line, for a name that is neither a folder nor of the hub."""
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.exists() or name.startswith(("/", ".", "~")) or name.count("/") != 1:
        raise ValueError(f"--model must be a model's folder or a hub name, got {name!r}")
    try:
        return Path(snapshot_download(name, allow_patterns=list(_FILES), ignore_patterns=list(_NOT_FILES)))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()
        raise ValueError(f"--model {name!r}: cannot be fetched ({reason[0] if reason else error!r})") from None


def reader_of(name: str, flags: argparse.Namespace) -> TokenizingReader:
    """The reader of prompts for workers with the flags of `command.add_prompt_flags`; `ValueError` for a wrong one."""
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
        raise ValueError(f"--default-chat-template-kwargs must be a JSON object, got {text!r}")
    return value


def _adapter(text: str) -> tuple[str, str]:
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        raise ValueError(f"--lora-paths must be NAME=PATH, as the workers have it, got {text!r}")
    return name, path


def latency_of(name: str, profile: str | None = None, device: str = "h100") -> LearnedLatency:
    """Prefill times: those of `device` until some were measured; `ValueError` for a model whose costs are unknown."""
    if device not in DEVICES:
        raise ValueError(f"--device must be one of {', '.join(DEVICES)}, got {device!r}")
    if profile is None:
        folder = folder_of(name)
        if not (folder / "config.json").is_file():
            raise ValueError(f"--model must be a folder with config.json, or --profile a known model, got {name!r}")
        profile = str(folder)
    costs = load(profile)
    return LearnedLatency(costs.prefix_flops, PrefillLatency(costs, DEVICES[device]))
