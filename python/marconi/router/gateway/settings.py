"""The settings of a gateway, checked once; those with a `help` are limits that the command line offers."""

import re
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final

from marconi.events.address import TcpAddress

_HEADER: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
"""The characters of a header's name (RFC 9110, 5.6.2)."""


def _limit(default: float, words: str) -> Any:
    """A field that is an option of the command line, with its help."""
    return field(default=default, metadata={"help": words})


@dataclass(frozen=True, slots=True)
class HealthLimits:
    """The limits of health checks; `ValueError` for one that is not above 0."""

    max_failures: int = 3
    period_s: float = 5.0
    first_retry_s: float = 0.5
    timeout_s: float = 25.0
    """SGLang's own check generates a token, and answers after 20 s that it could not."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class Settings:
    """Addresses, access and limits; `ValueError`, one line, for a wrong one."""

    host: str = "127.0.0.1"
    port: int = 30000
    token: str | None = field(default=None, repr=False)
    """The administrator's: `/router` and `/metrics` need it as `Authorization: Bearer`."""
    worker_api_key: str | None = field(default=None, repr=False)
    """Sent to workers with the router's own requests."""
    tenant_header: str | None = None
    """Names a request's tenant; each tenant's prefixes are a namespace of their own."""
    session_header: str | None = None
    """Names a session; its requests have one key for rules and ties."""
    record: Path | None = None
    """The file of the record of served requests, in a folder that is there."""
    max_body_bytes: int = _limit(32 << 20, "of a request's body")
    body_timeout_s: float = _limit(60.0, "seconds until a request's body has come in")
    max_header_bytes: int = _limit(16 << 10, "of one header, and of a request's line")
    max_headers: int = 100
    idle_timeout_s: float = _limit(
        75.0, "seconds until a connection is closed that has sent no request, or only some of its headers"
    )
    max_connections: int = _limit(
        8192,
        "of clients at a time, or fewer where the limit of open files has no room for three for each; more get 503",
    )
    max_prompt_tokens: int = _limit(1 << 20, "of a prompt")
    max_requests_per_worker: int = _limit(
        512, "given to a worker, or to each of its ranks, and not finished; where all have so many, more get 503"
    )
    max_attempts: int = _limit(
        3, "workers that a request is tried on while none has sent a byte; a second one that fails with it is the last"
    )
    connect_timeout_s: float = 5.0
    first_byte_timeout_s: float = _limit(600.0, "seconds until a worker's answer begins or continues")
    snapshot_period_s: float = _limit(5.0, "seconds between two snapshots of a worker")
    num_recent: int = _limit(256, "latest requests that GET /router shows")
    health: HealthLimits = field(default_factory=HealthLimits)

    @property
    def worker_headers(self) -> dict[str, str]:
        """The headers of the router's own requests to workers."""
        return {} if self.worker_api_key is None else {"Authorization": f"Bearer {self.worker_api_key}"}

    def __post_init__(self) -> None:
        for name in (*LIMITS, "max_headers", "connect_timeout_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"--{name.replace('_', '-')} must be above 0, got {getattr(self, name)}")
        for name in ("tenant_header", "session_header"):
            header = getattr(self, name)
            if header is not None and not _HEADER.fullmatch(header):
                raise ValueError(f"--{name.replace('_', '-')} must be a header's name like X-Tenant, got {header!r}")
        if self.record is not None and not self.record.parent.is_dir():
            raise ValueError(f"--record must be a file in a folder that is there, got {self.record}")
        if not 0 <= self.port <= 65535:
            raise ValueError(f"--port must be 1 to 65535, or 0 for any that is free, got {self.port}")
        if self.token is not None and len(self.token) < 16:
            raise ValueError(f"the administrator's token must have 16 characters or more, got {len(self.token)}")
        if self.token is None and not TcpAddress(self.host, self.port).is_loopback:
            raise ValueError(
                f"--host must be an address that no other host reaches, or --token-file given, got {self.host}"
            )


LIMITS: Final = {each.name: each for each in fields(Settings) if "help" in each.metadata}
"""The limits of the command line, by name."""
