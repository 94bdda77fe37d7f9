"""What an operator asks of a router, checked once."""

import re
from dataclasses import dataclass, field
from typing import Final

from marconi.events.address import TcpAddress
from marconi.router.workers.health import Patience

_TOKEN: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
"""What a header's name is made of (RFC 9110, 5.6.2)."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Addresses, access and limits; `ValueError`, one line, for what cannot be."""

    host: str = "127.0.0.1"
    port: int = 30000
    token: str | None = field(default=None, repr=False)
    """Of the administrator: `/router` and `/metrics` need it as `Authorization: Bearer`."""
    worker_api_key: str | None = field(default=None, repr=False)
    """Sent to workers where this router asks them something of its own."""
    tenant_header: str | None = None
    """Names who a request is of; each tenant's prefixes are a space of their own."""
    session_header: str | None = None
    """Names a session; its requests belong together for rules and ties that go by a key."""
    max_body_bytes: int = 32 << 20
    body_timeout_s: float = 60.0
    """Until a request's body has come in whole: one that trickles is given up."""
    max_header_bytes: int = 16 << 10
    """Of one header, and of the request's line."""
    max_headers: int = 100
    max_head_bytes: int = 128 << 10
    """Of all headers of a request together."""
    headers_timeout_s: float = 20.0
    """Until a request's headers have come in, from their first byte or from the connection's beginning."""
    idle_timeout_s: float = 75.0
    """Until a connection without a request is closed: longer than a proxy in front keeps its own."""
    max_connections: int = 8192
    """Of clients, at a time; health and the administrator's pages have a few more."""
    max_prompt_tokens: int = 1 << 20
    max_requests_per_worker: int = 512
    """Given to a worker and not finished; where all have so many, more are turned away."""
    max_attempts: int = 3
    """Workers that a request is tried on, as long as none has sent a byte of an answer."""
    connect_timeout_s: float = 5.0
    first_byte_timeout_s: float = 600.0
    """Until a worker's answer begins; after it the request is tried elsewhere. Also the longest silence of a stream."""
    snapshot_period_s: float = 5.0
    """Between two snapshots of a worker: after any loss the index is right again within it."""
    num_recent: int = 256
    """Requests that `GET /router` tells of."""
    patience: Patience = field(default_factory=Patience)

    def __post_init__(self) -> None:
        for name in (
            "max_body_bytes",
            "body_timeout_s",
            "max_header_bytes",
            "max_headers",
            "max_head_bytes",
            "headers_timeout_s",
            "idle_timeout_s",
            "max_connections",
            "max_prompt_tokens",
            "max_requests_per_worker",
            "max_attempts",
            "connect_timeout_s",
            "first_byte_timeout_s",
            "snapshot_period_s",
            "num_recent",
        ):
            if not getattr(self, name) > 0:
                raise ValueError(f"--{name.replace('_', '-')}: {getattr(self, name)}; more than 0 is right")
        for name in ("tenant_header", "session_header"):
            header = getattr(self, name)
            if header is not None and not _TOKEN.fullmatch(header):
                raise ValueError(f"--{name.replace('_', '-')} {header!r}: no name of a header; X-Tenant is right")
        if not 0 <= self.port <= 65535:
            raise ValueError(f"--port: {self.port}; 1 to 65535 is right, or 0 for any that is free")
        if self.token is not None and len(self.token) < 16:
            raise ValueError("the administrator's token has fewer than 16 characters; 16 or more are right")
        if self.token is None and not self.is_loopback:
            raise ValueError(
                f"--host {self.host}: other hosts reach it, and so /router and /metrics; --token-file is right, or "
                "127.0.0.1"
            )

    @property
    def is_loopback(self) -> bool:
        """Whether no other host can reach the router."""
        return TcpAddress(self.host, self.port).is_loopback
