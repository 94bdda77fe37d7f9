"""What an operator asks of an application, from the `args` of a Serve config or of `serve run`; checked once."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import Any, Final, Self

_OWN: Final = (
    *("--model-path", "--model", "--host", "--port", "--radix-cache-backend", "--dp-size", "--data-parallel-size"),
    *("--marconi-events", "--marconi-events-keys", "--kv-events-config", "--api-key"),
)
"""Of each server, set by its replica, or of no use to one."""


@dataclass(frozen=True, slots=True)
class Options:
    """Of one application; `ValueError`, one line, for what cannot be. Numbers may be texts, as `serve run` has them."""

    model: str
    """Folder or hub name, of the servers and of the router's tokenizer."""
    server_args: tuple[str, ...] = ()
    """More options of `sglang.launch_server`; of a text, its words as a shell reads them. The router minds those that
    change prompts (`--chat-template` and its like)."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Of the servers, beside their replica's own."""
    num_replicas: int = 1
    num_gpus: float = 1
    """Of each replica; what its `--tp-size` is needs."""
    num_cpus: float = 1
    """Of each replica, as Ray counts them."""
    max_ongoing_requests: int = 256
    """Of each replica, from all ingresses; where all have so many, more wait."""
    ready_timeout_s: float = 1800
    """Until a server has loaded its model."""
    num_ingress_replicas: int = 1
    max_body_bytes: int = 32 << 20
    max_attempts: int = 3
    """Replicas that a request is tried on while none has sent a byte."""
    routing: str = "state-aware"
    device: str = "h100"
    """Whose speed to expect until it was seen."""
    profile: str | None = None
    """A known model, where the folder has no `config.json`."""
    events_keys: str | None = None
    """File with the fleet's CURVE `.key_secret`, the same on every node: needed where nodes are several."""

    entry_point: tuple[str, ...] = ("-m", "sglang.launch_server")
    """What Python runs as a server: another program takes the same options."""

    def __post_init__(self) -> None:
        if not self.model:
            raise ValueError("model: none is given; a folder or a hub name is right")
        for name in ("num_replicas", "num_ingress_replicas", "max_ongoing_requests", "max_body_bytes", "max_attempts"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)}; 1 or more is right")
        for name in ("num_gpus", "num_cpus"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}: {getattr(self, name)}; 0 or more is right")
        if not self.ready_timeout_s > 0:
            raise ValueError(f"ready_timeout_s: {self.ready_timeout_s}; more than 0 is right")
        for argument in self.server_args:
            if argument.split("=")[0] in _OWN:
                raise ValueError(f"server_args: {argument} is not for servers that Ray Serve runs; leave it out")

    @classmethod
    def of(cls, args: Mapping[str, Any]) -> Self:
        """Of a config's `args`."""
        known = {each.name: each for each in fields(cls)}
        for name in args:
            if name not in known:
                near = get_close_matches(name, known, n=1)
                raise ValueError(f"{name} is no option; {near[0] if near else ', '.join(known)} is right")
        if "model" not in args:
            raise ValueError("model: none is given; a folder or a hub name is right")
        return cls(**{name: _read(name, str(known[name].type), value) for name, value in args.items()})

    def for_router(self) -> dict[str, Any]:
        """What a request router is told, for JSON; `of` reads it."""
        named = {name: getattr(self, name) for name in ("model", "routing", "device", "profile", "events_keys")}
        return {**named, "server_args": list(self.server_args)}


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
        raise ValueError(f"{name}: {value!r}; {wanted} is right") from None
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{name}: {value!r}; a text is right")
    return value
