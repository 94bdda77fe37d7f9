"""A worker's description of its events: all that a router needs to subscribe, and to hash prompts as it does.

`GET /marconi` gives one for each rank, as `events`. An address may name every address of the host (`tcp://*:5557`): its
port counts then, and the host is that of the URL of the request.

    namespace of a prompt     digest of `model`, `extra_key` and `cache_salt` (`HashSpace.of`)
    positions                 every `block_tokens`; a state may stand at any multiple of `page_tokens`, but for a
                              prompt's last token, which is always computed
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EventsStatus:
    """The events of one rank."""

    version: int
    """The version of the payloads (`marconi.events.codec.VERSION`)."""
    worker: str
    """Its name in its events: host, port of HTTP, rank. The same after a restart."""
    epoch: int
    """The start of this life, nanoseconds since 1970."""
    events: str
    """Address of the PUB socket."""
    replay: str
    """Address of the ROUTER socket, for requests of snapshots and replays."""
    needs_keys: bool
    """Whether subscribers need the fleet's CURVE keys."""
    model: str
    """`--served-model-name`, part of every namespace."""
    block_tokens: int
    page_tokens: int
    max_context_tokens: int
    """The longest sequence, prompt and answer."""
    truncates_prompts: bool
    """Whether a prompt that is longer is cut, not refused."""
    has_tokens: bool
    """Whether tokens, salts and adapters are published beside hashes."""
    is_publishing: bool
    """Whether its thread runs. Where it has ended the log says why, and nothing is published until a restart."""
    num_batches: int
    """Sent in this epoch: the last one has the sequence number below it."""
    num_events: int
    num_waiting: int
    """Changes of the tree that are logged and not published yet."""
