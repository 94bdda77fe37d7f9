"""The model that the workers serve, as a router needs it: no weights, a few small files.

    folder or hub name + the workers' flags that change prompts --reader_of--> TokenizingReader
    config.json, or a known model's name; a device              --latency_of--> LearnedLatency

Files of a hub name come from `marconi.chat.folder`.
"""

import argparse
import json
from typing import Any

from marconi.chat.folder import folder_of
from marconi.model import DEVICES, PrefillLatency, load
from marconi.model.learned_latency import LearnedLatency
from marconi.router.prompts.reader import TokenizingReader


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
