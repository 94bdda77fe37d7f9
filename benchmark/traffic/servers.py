"""The servers that shapes are asked of, and how much memory they have."""

from enum import StrEnum
from typing import NamedTuple

from marconi.engine.launch.flags import BACKEND
from marconi_cpu.demo.stream import REASONING_TEMPLATE


class Server(StrEnum):
    """A backend and where its states may stand."""

    STOCK_NO_BUFFER = "stock-no-buffer"
    STOCK = "stock"
    STOCK_WRITE_BACK = "stock-write-back"
    """Its other write policy, where there is a host tier."""
    MARCONI = "marconi"
    MARCONI_NO_BUFFER = "marconi-no-buffer"
    MARCONI_ONE_POOL = "marconi-one-pool"
    """In as many bytes, as a server divides them that no flag tells how."""

    @property
    def is_ours(self) -> bool:
        """Whether the cache is this project's."""
        return self in (Server.MARCONI, Server.MARCONI_NO_BUFFER, Server.MARCONI_ONE_POOL)

    @property
    def has_no_buffer(self) -> bool:
        """Whether its strategy is `no_buffer`."""
        return self in (Server.STOCK_NO_BUFFER, Server.MARCONI_NO_BUFFER)

    @property
    def write_policy(self) -> str:
        """Its `--hicache-write-policy`."""
        return "write_back" if self is Server.STOCK_WRITE_BACK else "write_through"

    @property
    def args(self) -> list[str]:
        """Of its command line."""
        strategy = ["--mamba-radix-cache-strategy", "no_buffer" if self.has_no_buffer else "extra_buffer"]
        strategy += ["--disable-overlap-schedule"] if self.has_no_buffer else []
        strategy += ["--enable-unified-memory"] if self is Server.MARCONI_ONE_POOL else []
        return [*strategy, *(["--radix-cache-backend", BACKEND] if self.is_ours else [])]


DEFAULTS = (Server.MARCONI, Server.MARCONI_ONE_POOL)
"""What this project serves unasked, where flags divide the memory and where none does."""


class Memory(StrEnum):
    """Whether all that may come again fits."""

    PLENTIFUL = "plentiful"
    SHORT = "short"
    TIERED = "short-with-host"

    def is_for(self, server: Server) -> bool:
        """Whether `server` differs from the others with it."""
        return self is Memory.TIERED or server is not Server.STOCK_WRITE_BACK

    def args(self, server: Server, times: int = 1) -> list[str]:
        """Flags of a server with `times` its memory."""
        pools = POOLS[self].times(times)
        tier = ["--enable-hierarchical-cache", "--hicache-ratio", str(pools.host_ratio)]
        tier += ["--hicache-write-policy", server.write_policy, "--hicache-io-backend", "direct"]
        tier += ["--hicache-mem-layout", "page_first_direct"]
        return [
            *(tier if pools.host_ratio else []),
            *("--max-total-tokens", str(pools.num_kv_tokens), "--max-mamba-cache-size", str(pools.num_slots)),
            *("--max-running-requests", str(pools.num_running)),
        ]


class Pools(NamedTuple):
    """How much memory, and how many requests may take it at a time."""

    num_kv_tokens: int
    num_slots: int
    num_running: int
    host_ratio: float = 0.0
    """Of a host tier to these; 0 without one."""

    def times(self, factor: int) -> "Pools":
        """`factor` times the memory, for as many requests at a time."""
        return self._replace(num_kv_tokens=factor * self.num_kv_tokens, num_slots=factor * self.num_slots)


POOLS = {
    Memory.PLENTIFUL: Pools(131_072, 768, 48),
    Memory.SHORT: Pools(4_608, 20, 4),
    Memory.TIERED: Pools(4_608, 20, 4, host_ratio=2.0),
}
"""Short: what runs at once fits, what one shape would keep does not."""

CHUNK_TOKENS = 8_192
"""`--chunked-prefill-size`, as SGLang has it on a GPU of 80 GB: what arrives at once is computed in such parts."""

COMMON_ARGS = (
    *("--enable-cache-report", "--random-seed", "0", "--log-level", "warning"),
    *("--chunked-prefill-size", str(CHUNK_TOKENS), "--stream-interval", "64"),
    *("--chat-template", str(REASONING_TEMPLATE)),
)
