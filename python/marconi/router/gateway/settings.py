"""What an operator asks of a router, checked once."""

import re
from dataclasses import dataclass, field, fields
from typing import Any, Final

from marconi.router.workers.health import Patience

_TOKEN: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
"""What a header's name is made of (RFC 9110, 5.6.2)."""


def _limit(default: float, words: str) -> Any:
    """An option of the command line, and of what it is."""
    return field(default=default, metadata={"help": words})


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
    max_body_bytes: int = _limit(32 << 20, "of a request's body")
    body_timeout_s: float = _limit(60.0, "seconds until a request's body has come in")
    max_header_bytes: int = _limit(16 << 10, "of one header, and of a request's line")
    max_headers: int = 100
    max_head_bytes: int = _limit(128 << 10, "of all headers of a request")
    headers_timeout_s: float = _limit(20.0, "seconds until a request's headers have come in")
    idle_timeout_s: float = _limit(75.0, "seconds until a connection without a request is closed")
    max_connections: int = _limit(
        8192,
        "of clients at a time, or fewer where the limit of open files has no room for three for each; more get 503",
    )
    max_prompt_tokens: int = _limit(1 << 20, "of a prompt")
    max_requests_per_worker: int = _limit(
        512, "given to a worker and not finished; where all have so many, more get 503"
    )
    max_attempts: int = _limit(
        3, "workers that a request is tried on while none has sent a byte; a second one that goes with it is the last"
    )
    connect_timeout_s: float = 5.0
    first_byte_timeout_s: float = _limit(600.0, "seconds until a worker's answer begins or goes on")
    snapshot_period_s: float = _limit(5.0, "seconds between two snapshots of a worker")
    num_recent: int = _limit(256, "requests that GET /router tells of")
    patience: Patience = field(default_factory=Patience)

    def __post_init__(self) -> None:
        for name in (*LIMITS, "max_headers", "connect_timeout_s"):
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
        from marconi.events.address import TcpAddress

        return TcpAddress(self.host, self.port).is_loopback


LIMITS: Final = {each.name: each for each in fields(Settings) if "help" in each.metadata}
"""Those of the command line, by name."""
