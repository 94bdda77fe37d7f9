"""From the log of a cache's tree to the sockets of its rank.

    MarconiTreeCore --append--> TreeLog --Mirror--> Publisher --> PUB, ROUTER
    LoadReporter ----publish_load-------------------> Publisher
    scheduler's thread                 the publisher's thread

Only a rank that SGLang would publish events from does: the first of those that share one cache.

Owner: the cache, which closes it with itself.
"""

import logging
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.disaggregation.kv_events import is_kv_publisher_rank
from sglang.srt.runtime_context import num_dp_ranks_of

from marconi.engine.events.sockets import sockets_of
from marconi.engine.events.status import EventsStatus
from marconi.engine.launch.flags import Flags
from marconi.engine.ranks import dp_rank
from marconi.engine.version import Refusal
from marconi.events.base import WorkerLoad
from marconi.events.codec import FULL_ATTENTION, MLA_ATTENTION, VERSION
from marconi.events.mirror import Mirror
from marconi.events.publisher import Publisher, PublisherOptions
from marconi.events.tree_log import Tenant, TreeLog

if TYPE_CHECKING:
    from sglang.srt.mem_cache.events import KvEventLoraNames
    from sglang.srt.mem_cache.registry import TreeCacheBuildContext

logger = logging.getLogger(__name__)

BLOCK_TOKENS = 64
"""Tokens of a block where a page has one token."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model as one rank of a server serves it."""

    model: str
    page_tokens: int
    max_context_tokens: int
    http_port: int
    rank: int
    num_ranks: int
    truncates_prompts: bool = False
    kv_kind: str = FULL_ATTENTION

    @classmethod
    def of(cls, ctx: "TreeCacheBuildContext") -> "ServedModel":
        """The one of this scheduler."""
        args = ctx.server_args
        model = args.served_model_name or args.model_path
        context_tokens = int(ctx.model_config.context_len)
        num_ranks, truncates = num_dp_ranks_of(args), args.allow_auto_truncate
        kind = MLA_ATTENTION if ctx.model_config.attention_arch is AttentionArch.MLA else FULL_ATTENTION
        return cls(model, ctx.params.page_size, context_tokens, args.port, dp_rank(), num_ranks, truncates, kind)

    @property
    def worker(self) -> str:
        """A name that no other worker of a fleet has, and that stays."""
        return f"{socket.gethostname()}:{self.http_port}/{self.rank}"

    @property
    def block_tokens(self) -> int:
        """The size of a block."""
        return self.page_tokens if self.page_tokens > 1 else BLOCK_TOKENS


def publishes(flags: Flags) -> bool:
    """True if this scheduler publishes events: the flag is given, and it is the first of those that share a cache."""
    return flags.events is not None and is_kv_publisher_rank(str(flags.events))


class CachePublisher:
    """Publishes the events of one cache, from its first change until it is closed."""

    def __init__(self, log: TreeLog, flags: Flags, served: ServedModel, lora_names: "KvEventLoraNames") -> None:
        """Bind the sockets and begin; raises `Refusal` for those that cannot be bound."""
        assert flags.events is not None, "events without --marconi-events"
        self._flags, self._served = flags, served

        def adapter_of(tenant: Tenant) -> str | None:
            name: str | None = lora_names.resolve(tenant.extra_key)
            return name

        self._mirror = Mirror(log, served.block_tokens, served.model, flags.events_tokens, adapter_of=adapter_of)
        try:
            events, replay = map(str, sockets_of(flags.events, served.rank, served.num_ranks))
            options = PublisherOptions(
                served.worker,
                events,
                replay,
                served.block_tokens,
                dp_rank=served.rank,
                kv_kind=served.kv_kind,
                keys=flags.events_keys,
            )
            self._publisher = Publisher(self._mirror, options)
        except ValueError as error:
            raise Refusal(f"--marconi-events: {error}") from None
        logger.info(
            "marconi: publishes events on %s, replays and snapshots on %s, as %s, in blocks of %d tokens, of %r%s",
            *(events, replay, served.worker, served.block_tokens, served.model),
            ", with tokens, salts and adapters" if flags.events_tokens else "",
        )

    def publish_load(self, load: WorkerLoad) -> None:
        """Publish the worker's load as it is now."""
        self._publisher.publish_load(load)

    def status(self) -> EventsStatus:
        """The publisher as it stands."""
        publisher, served = self._publisher, self._served
        options = publisher.options
        return EventsStatus(
            version=VERSION,
            worker=options.worker,
            epoch=publisher.epoch,
            events=options.events,
            replay=options.replay,
            needs_keys=options.keys is not None,
            model=served.model,
            block_tokens=options.block_tokens,
            page_tokens=served.page_tokens,
            max_context_tokens=served.max_context_tokens,
            truncates_prompts=served.truncates_prompts,
            has_tokens=self._flags.events_tokens,
            is_publishing=publisher.is_publishing,
            num_batches=publisher.sequence + 1,
            num_events=publisher.num_events,
            num_waiting=self._mirror.num_waiting,
        )

    def close(self) -> None:
        """Publish what waits, and stop; a second time does nothing."""
        self._publisher.close()
