"""What a worker says of its events: all that a router needs to listen to it, and to hash prompts as it does.

`GET /marconi` gives one for each rank, as `events`. An address may name every address of the host (`tcp://*:5557`): its
port counts then, and the host is that of the URL that was asked.

    namespace of a prompt     digest of `model`, `extra_key` and `cache_salt` (`HashSpace.of`)
    positions                 every `block_tokens`; a state may stand at any multiple of `page_tokens`, but for a
                              prompt's last token, which is always computed
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EventsStatus:
    """Of one rank."""

    version: int
    """Of what is told (`marconi.events.codec.VERSION`)."""
    worker: str
    """By what name it tells: host, port of HTTP, rank. The same after a restart."""
    epoch: int
    """Of this life, nanoseconds since 1970; another after a restart."""
    events: str
    """Address of the PUB socket."""
    replay: str
    """Address of the ROUTER socket, which is asked for snapshots and for what was missed."""
    needs_keys: bool
    """Whether who listens needs the fleet's CURVE keys."""
    model: str
    """`--served-model-name`, part of every namespace."""
    block_tokens: int
    page_tokens: int
    max_context_tokens: int
    """The longest sequence, prompt and answer."""
    truncates_prompts: bool
    """Whether a prompt that is longer is cut, not refused."""
    tells_tokens: bool
    """Whether tokens and salts are told beside hashes."""
    is_telling: bool
    """Whether its thread runs. Where it has ended the log says why, and nothing is told until a restart."""
    num_batches: int
    """Sent in this epoch: the last one has the sequence number below it."""
    num_events: int
    num_waiting: int
    """Changes of the tree that are noted and not told yet."""
