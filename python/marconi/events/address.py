"""Addresses of events: sockets that other hosts cannot reach, or CURVE keys.

Events show which prefixes a worker holds, and forged ones would poison an index. So an address is one of

    tcp://127.0.0.1:5557, tcp://[::1]:5557, tcp://localhost:5557, ipc://path, inproc://name

or any `tcp://` address with a pair of keys. A fleet has one pair: a peer with its secret may publish and subscribe, any
other fails the handshake (ZMTP's CURVE). `*` and `0.0.0.0` are every address of a host, so they need keys, which
`python -c "import zmq.auth; zmq.auth.create_certificates('.', 'fleet')"` writes to `fleet.key_secret`.
"""

import ipaddress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

_MAX_PORT = 65535
_EVERY_ADDRESS = ("*", "0.0.0.0", "::")  # noqa: S104 - compared with, not bound to


@dataclass(frozen=True, slots=True)
class Keys:
    """A fleet's pair of CURVE keys, each of 40 characters (Z85)."""

    public: bytes
    secret: bytes = field(repr=False)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a secret certificate; `ValueError` for another file."""
        import zmq.auth

        try:
            public, secret = zmq.auth.load_certificate(path)
        except (OSError, ValueError) as error:
            reason = (getattr(error, "strerror", None) or str(error)).splitlines()[0]
            raise ValueError(f"{path}: must be a .key_secret of pyzmq, got no CURVE certificate ({reason})") from None
        if secret is None:
            raise ValueError(f"{path}: must be the .key_secret beside it, got a public key")
        return cls(public, secret)


@dataclass(frozen=True, slots=True)
class TcpAddress:
    """`tcp://host:port`, an IPv6 host without its brackets."""

    host: str
    port: int

    @classmethod
    def parse(cls, endpoint: str) -> Self:
        """Read an address; `ValueError` for another text."""
        host, colon, port = endpoint.removeprefix("tcp://").rpartition(":")
        well_formed = endpoint.startswith("tcp://") and bool(colon) and bool(host)
        if not (well_formed and port.isascii() and port.isdigit() and 0 < int(port) <= _MAX_PORT):
            raise ValueError(f"an address must be like tcp://127.0.0.1:5557, got {endpoint!r}")
        return cls(host.removeprefix("[").removesuffix("]"), int(port))

    def offset(self, num_ports: int) -> "TcpAddress":
        """The address so many ports up; `ValueError` past the last port."""
        if self.port + num_ports > _MAX_PORT:
            raise ValueError(f"the port must be at most {_MAX_PORT}, got {self.port} + {num_ports} of {self}")
        return TcpAddress(self.host, self.port + num_ports)

    def reached_at(self, host: str) -> "TcpAddress":
        """The address to connect to where `host` has bound this one, which may be every address of the host."""
        return TcpAddress(host, self.port) if self.host in _EVERY_ADDRESS else self

    @property
    def is_loopback(self) -> bool:
        """True if no other host can reach it."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def __str__(self) -> str:
        return f"tcp://[{self.host}]:{self.port}" if ":" in self.host else f"tcp://{self.host}:{self.port}"


def require_private(endpoint: str, keys: Keys | None) -> None:
    """Raise `ValueError` for an address that other hosts can reach, without keys."""
    if endpoint.startswith(("ipc://", "inproc://")) or keys is not None:
        return
    address = TcpAddress.parse(endpoint)
    if not address.is_loopback:
        private = TcpAddress("127.0.0.1", address.port)
        raise ValueError(f"{endpoint} must be {private}, or have CURVE keys: other hosts reach it")
