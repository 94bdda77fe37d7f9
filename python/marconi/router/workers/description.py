"""What a worker says of itself, read with care: it is another process, perhaps another program.

    GET /model_info     of any SGLang server: the model that it answers under
    GET /marconi        of one with this project's cache: its ranks, and where each publishes its events

A server without events takes requests, too; what it holds is not known. An address of every interface (`tcp://*:5557`)
is the port, and the host that of the server's URL.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from marconi.events.address import Keys, TcpAddress, require_private
from marconi.events.codec import VERSION
from marconi.router.sync.subscriber import WorkerSockets


@dataclass(frozen=True, slots=True)
class EventsOf:
    """The addresses of a worker's events, and what its hashes are of."""

    sockets: WorkerSockets
    model: str | None
    block_tokens: int
    max_context_tokens: int | None = None
    """The longest prompt with its answer; None where it does not say, or cuts prompts that are longer."""


@dataclass(frozen=True, slots=True)
class Description:
    """A worker as it describes itself."""

    model: str
    """The name that it answers under."""
    events: EventsOf | None
    """None where it publishes none."""
    without: str
    """Why there are none, in words; empty where there are."""


def worker_url(text: str) -> str:
    """A worker's URL as it is named everywhere; `ValueError` for a text that is none."""
    wrong = ValueError(f"worker must be a URL like http://127.0.0.1:30001, got {text.strip()!r}")
    try:
        url = urlsplit(text.strip())
        port = url.port
    except ValueError:
        raise wrong from None
    if url.scheme not in ("http", "https") or not url.hostname or port is None or url.path.strip("/") or url.query:
        raise wrong
    host = f"[{url.hostname}]" if ":" in url.hostname else url.hostname
    return f"{url.scheme}://{host}:{port}"


def describe(url: str, model_info: Any, marconi: Any, keys: Keys | None) -> Description:
    """Read a worker's two answers, JSON values; `marconi` is None where it has no such route.

    `ValueError`, one line, for what no SGLang server of one rank answers, and for events that cannot be listened to.
    """
    model = (
        model_info.get("served_model_name") or model_info.get("model_path") if isinstance(model_info, dict) else None
    )
    if not isinstance(model, str):
        raise ValueError(f"{url}: no SGLang server (/model_info names no model)")
    if model_info.get("is_generation") is False:
        raise ValueError(f"{url}: the model must generate; {model} makes embeddings")
    if marconi is None:
        return Description(model, None, "its cache is SGLang's own: --radix-cache-backend marconi")
    ranks = marconi.get("ranks") if isinstance(marconi, dict) else None
    if not isinstance(ranks, list) or not all(isinstance(rank, dict) for rank in ranks) or not ranks:
        raise ValueError(f"{url}: /marconi names no ranks")
    if len(ranks) > 1:
        raise ValueError(f"{url}: must have 1 data-parallel rank, since a request cannot choose one, got {len(ranks)}")
    events = ranks[0].get("events")
    if events is None:
        return Description(model, None, "it publishes no events: --marconi-events")
    return Description(model, _events(url, events, keys), "")


def _events(url: str, said: Any, keys: Keys | None) -> EventsOf:
    if not isinstance(said, dict):
        raise ValueError(f"{url}: its events must be an object, got a {type(said).__name__}")
    if said.get("version") != VERSION:
        raise ValueError(f"{url}: the version of its events must be {VERSION}, got {said.get('version')!r}")
    worker, model, block_tokens = (_typed(url, said, name, kind) for name, kind in _FIELDS.items())
    host = urlsplit(url).hostname or ""
    addresses = [_address(url, _typed(url, said, name, str), host) for name in ("events", "replay")]
    if said.get("needs_keys") and keys is None:
        raise ValueError(f"{url}: its events need the fleet's keys: --events-keys")
    for address in addresses:
        require_private(address, keys)
    has_limit = said.get("max_context_tokens") is not None and not said.get("truncates_prompts")
    max_context_tokens = _typed(url, said, "max_context_tokens", int) if has_limit else None
    return EventsOf(WorkerSockets(worker, *addresses), model, block_tokens, max_context_tokens)


_FIELDS: Mapping[str, type] = {"worker": str, "model": str, "block_tokens": int}


def _typed(url: str, said: Mapping[str, Any], name: str, kind: type) -> Any:
    value = said.get(name)
    if not isinstance(value, kind) or isinstance(value, bool) or not value:
        raise ValueError(f"{url}: {name} of its events must be of type {kind.__name__}, got {value!r}")
    return value


def _address(url: str, endpoint: str, host: str) -> str:
    if not endpoint.startswith("tcp://"):
        return endpoint
    try:
        address = TcpAddress.parse(endpoint)
    except ValueError as wrong:
        raise ValueError(f"{url}: {wrong}") from None
    return str(address.reached_at(host))
