"""Where the ranks of a server publish: two ports each, from that of `--marconi-events` on.

    events of rank r     port + r                  as SGLang's own KV events have it
    replay of rank r     port + num_ranks + r

A rank is a replica of its own cache (`--dp-size`). The ports are looked at before any process is started, so that a
server whose events nobody could receive is refused and not found out.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import zmq

from marconi.engine.launch.flags import Flags
from marconi.engine.version import Refusal
from marconi.events.address import TcpAddress


class Sockets(NamedTuple):
    """The addresses of one rank."""

    events: TcpAddress
    replay: TcpAddress


def sockets_of(first: TcpAddress, rank: int, num_ranks: int) -> Sockets:
    """The addresses of a rank; `ValueError` past the last port."""
    return Sockets(first.offset(rank), first.offset(num_ranks + rank))


def require_tellable(flags: Flags, *, num_ranks: int, http_port: int) -> None:
    """Raise `Refusal` for events that could not be published: a port that is not there, in use or the server's own."""
    if flags.events is None:
        return
    try:
        for rank in range(num_ranks):
            for address in sockets_of(flags.events, rank, num_ranks):
                if address.port == http_port:
                    raise ValueError(f"a port must differ from the server's own --port, got {address}")
                _require_free(address)
    except ValueError as error:
        of_ranks = f" ({2 * num_ranks} ports from {flags.events.port} on, for {num_ranks} ranks)"
        raise Refusal(f"--marconi-events: {error}{of_ranks if num_ranks > 1 else ''}") from None


def _require_free(address: TcpAddress) -> None:
    with _context() as context:
        socket = context.socket(zmq.PUB)
        socket.ipv6 = ":" in address.host
        try:
            socket.bind(str(address))
        except zmq.ZMQError as error:
            raise ValueError(f"cannot listen on {address} ({zmq.strerror(error.errno or 0)})") from None


@contextmanager
def _context() -> Iterator["zmq.Context[zmq.Socket[bytes]]"]:
    context = zmq.Context()
    try:
        yield context
    finally:
        # Waits until the port is free again.
        context.destroy(linger=0)
