"""The options of an application, from the `args` of a Serve config or of `serve run`; checked once."""

import argparse
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import Any, Final, Self

from marconi.router.command import add_prompt_flags
from marconi.router.model import reader_of
from marconi.router.prompts.reader import TokenizingReader

_OWN: Final = (
    *("--model-path", "--model", "--host", "--port", "--radix-cache-backend", "--dp-size", "--data-parallel-size"),
    *("--marconi-events", "--marconi-events-keys", "--kv-events-config", "--api-key"),
)
"""Flags of a server that its replica sets, or that no replica can have."""


_NO_MODEL: Final = "model must be a folder or a hub name, got none"


@dataclass(frozen=True, slots=True)
class Options:
    """One application's options; `ValueError`, one line, for a wrong one. Numbers may be texts, as from `serve run`."""

    model: str
    """Folder or hub name, for the servers and the router's tokenizer."""
    server_args: tuple[str, ...] = ()
    """More flags of `sglang.launch_server`; a text is split as a shell does. The router also reads those that change
    prompts (`--chat-template` and its like)."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the servers, added to their replica's."""
    num_replicas: int = 1
    num_gpus: float = 1
    """GPUs of each replica: as many as its `--tp-size`."""
    num_cpus: float = 1
    """CPUs of each replica, as Ray counts them."""
    max_ongoing_requests: int = 256
    """Requests at a time of each replica, from all ingresses; more wait."""
    ready_timeout_s: float = 1800
    """Time for a server to load its model."""
    num_ingress_replicas: int = 1
    max_body_bytes: int = 32 << 20
    max_attempts: int = 3
    """Replicas that a request is tried on while none has sent a byte."""
    routing: str = "state-aware"
    device: str = "h100"
    """The device whose prefill times are assumed until some were measured."""
    profile: str | None = None
    """A known model, where the folder has no `config.json`."""
    events_keys: str | None = None
    """File with the fleet's CURVE `.key_secret`, the same on every node: needed on several nodes."""
    entry_point: tuple[str, ...] = ("-m", "sglang.launch_server")
    """Python's arguments that run a server, which takes the same flags."""

    def __post_init__(self) -> None:
        if not self.model:
            raise ValueError(_NO_MODEL)
        for name in ("num_replicas", "num_ingress_replicas", "max_ongoing_requests", "max_body_bytes", "max_attempts"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, got {getattr(self, name)}")
        for name in ("num_gpus", "num_cpus"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be 0 or more, got {getattr(self, name)}")
        if not self.ready_timeout_s > 0:
            raise ValueError(f"ready_timeout_s must be above 0, got {self.ready_timeout_s}")
        for argument in self.server_args:
            if argument.split("=")[0] in _OWN:
                raise ValueError(f"server_args: {argument} is not for servers that Ray Serve runs; leave it out")

    @classmethod
    def of(cls, args: Mapping[str, Any]) -> Self:
        """Read a config's `args`."""
        known = {each.name: each for each in fields(cls)}
        for name in args:
            if name not in known:
                near = get_close_matches(name, known, n=1)
                raise ValueError(f"an option must be {near[0] if near else ', '.join(known)}, got {name}")
        if "model" not in args:
            raise ValueError(_NO_MODEL)
        return cls(**{name: _read(name, str(known[name].type), value) for name, value in args.items()})

    def for_router(self) -> dict[str, Any]:
        """The options that a request router needs, for JSON; `of` reads them."""
        named = {name: getattr(self, name) for name in ("model", "routing", "device", "profile", "events_keys")}
        return {**named, "server_args": list(self.server_args)}

    def reader(self) -> TokenizingReader:
        """The reader of prompts as the servers tokenize them; `ValueError`, one line, where that is not exact."""
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
        add_prompt_flags(parser)
        try:
            flags, _ = parser.parse_known_args(self.server_args)
        except argparse.ArgumentError as wrong:
            raise ValueError(f"server_args: {wrong}") from None
        reader = reader_of(self.model, flags)
        if reader.why_not:
            raise ValueError(reader.why_not)
        return reader


def _read(name: str, kind: str, value: Any) -> Any:
    numbers: dict[str, type[int] | type[float]] = {"int": int, "float": float}
    number = numbers.get(kind.removeprefix("<class '").removesuffix("'>"))
    try:
        if number is not None:
            if isinstance(value, bool):
                raise ValueError
            return number(value)
        if name in ("server_args", "entry_point"):
            return tuple(shlex.split(value) if isinstance(value, str) else map(str, value))
        if name == "env":
            return {str(key): str(text) for key, text in value.items()}
    except (ValueError, TypeError, AttributeError):
        wanted = "a number" if number else "an object of texts" if name == "env" else "a list of texts"
        raise ValueError(f"{name} must be {wanted}, got {value!r}") from None
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{name} must be a text, got {value!r}")
    return value
