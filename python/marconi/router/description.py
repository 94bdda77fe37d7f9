"""A worker's description of itself, read with care: it is another process, perhaps another program.

    GET /model_info     of any SGLang server: the name of its model
    GET /marconi        of one with this project's cache: its ranks, and the addresses of each rank's events

Data-parallel ranks behind one address (`--dp-size N`) have a cache and events each. A server without events takes
requests, too; the router does not know what it holds, and reads how busy it is from SGLang's own
`GET /v1/loads` (`loads_of`). Events at an address of every interface (`tcp://*:5557`) are
reached at that port of the host in the server's URL.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

from marconi.events.address import Keys, TcpAddress, require_private
from marconi.events.base import WorkerLoad
from marconi.events.codec import VERSION
from marconi.router.subscriber import WorkerSockets


@dataclass(frozen=True, slots=True)
class EventSource:
    """The addresses of a rank's events, and how its block hashes are made."""

    sockets: WorkerSockets
    model: str | None
    block_tokens: int
    max_context_tokens: int | None = None
    """The longest prompt with its answer; None where it gives none, or cuts prompts that are longer."""


@dataclass(frozen=True, slots=True)
class Description:
    """A worker as it describes itself."""

    model: str
    """The model's name, as clients call it."""
    events: tuple[EventSource, ...]
    """The events of each rank; empty where it publishes none."""
    why_no_events: str = ""
    """In words; empty where there are events."""
    num_ranks: int = 1
    """Data-parallel ranks, each with a cache of its own; 1 where it does not say."""

    @property
    def ranks(self) -> tuple[int | None, ...]:
        """The numbers of its ranks; None for one that is alone, which no request need name."""
        return tuple(range(self.num_ranks)) if self.num_ranks > 1 else (None,)


def worker_url(text: str) -> str:
    """A worker's URL in the form that names it everywhere; `ValueError` for a text that is none."""
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

    `ValueError`, one line, for what no SGLang server answers, and for events that cannot be received.
    """
    is_object = isinstance(model_info, dict)
    model = model_info.get("served_model_name") or model_info.get("model_path") if is_object else None
    if not isinstance(model, str):
        raise ValueError(f"{url}: must be an SGLang server, got a /model_info that names no model")
    if model_info.get("is_generation") is False:
        raise ValueError(f"{url}: the model must generate, got {model}, which makes embeddings")
    if marconi is None:
        return Description(model, (), "its cache is SGLang's own: --radix-cache-backend marconi")
    ranks = marconi.get("ranks") if isinstance(marconi, dict) else None
    if not isinstance(ranks, list) or not all(isinstance(rank, dict) for rank in ranks) or not ranks:
        raise ValueError(f"{url}: /marconi must list the server's ranks, got none")
    numbers = [rank.get("dp_rank") for rank in ranks]
    if len(ranks) > 1 and numbers != list(range(len(ranks))):
        raise ValueError(f"{url}: /marconi must list data-parallel ranks 0 to {len(ranks) - 1}, got {numbers}")
    published = [rank["events"] for rank in ranks if rank.get("events") is not None]
    if not published:
        return Description(model, (), "it publishes no events: --marconi-events", len(ranks))
    sources = tuple(_event_source(url, events, keys) for events in published)
    num_ways = len({(source.model, source.block_tokens) for source in sources})
    if len(sources) != len(ranks) or num_ways > 1:
        raise ValueError(
            f"{url}: its ranks must all publish events, and hash alike, got {len(sources)} of {len(ranks)} that "
            f"publish, in {num_ways} ways"
        )
    return Description(model, sources, num_ranks=len(ranks))


def loads_of(answer: Any) -> dict[int, WorkerLoad]:
    """Read an answer to `GET /v1/loads`, a JSON value: the load of each rank; what cannot be read is left out."""
    entries = answer.get("loads") if isinstance(answer, dict) else None
    loads: dict[int, WorkerLoad] = {}
    for entry in entries if isinstance(entries, list) else ():
        values: list[Any] = [entry.get(name) for name in _LOAD_FIELDS] if isinstance(entry, dict) else []
        if values and all(type(value) is int and value >= 0 for value in values):
            rank, num_running, num_waiting, max_running, num_prefill_tokens = values
            if max_running > 0:
                loads[rank] = WorkerLoad(num_running, num_waiting, max_running, num_prefill_tokens)
    return loads


_LOAD_FIELDS: Final = (
    "dp_rank",
    "num_running_reqs",
    "num_waiting_reqs",
    "max_running_requests",
    "num_waiting_uncached_tokens",
)


def _event_source(url: str, events: Any, keys: Keys | None) -> EventSource:
    if not isinstance(events, dict):
        raise ValueError(f"{url}: its events must be an object, got a {type(events).__name__}")
    if events.get("version") != VERSION:
        raise ValueError(f"{url}: the version of its events must be {VERSION}, got {events.get('version')!r}")
    worker, model, block_tokens = (_typed(url, events, name, kind) for name, kind in _FIELDS.items())
    host = urlsplit(url).hostname or ""
    addresses = [_address(url, _typed(url, events, name, str), host) for name in ("events", "replay")]
    if events.get("needs_keys") and keys is None:
        raise ValueError(f"{url}: --events-keys must be given for its events, got none")
    for address in addresses:
        require_private(address, keys)
    has_limit = events.get("max_context_tokens") is not None and not events.get("truncates_prompts")
    max_context_tokens = _typed(url, events, "max_context_tokens", int) if has_limit else None
    return EventSource(WorkerSockets(worker, *addresses), model, block_tokens, max_context_tokens)


_FIELDS: Final[Mapping[str, type]] = {"worker": str, "model": str, "block_tokens": int}


def _typed(url: str, events: Mapping[str, Any], name: str, kind: type) -> Any:
    value = events.get(name)
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
