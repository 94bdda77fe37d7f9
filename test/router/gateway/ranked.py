"""A worker with several data-parallel ranks behind its address, as SGLang has them with `--dp-size`."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from marconi.events.publisher import Publisher
from marconi.router.gateway.gateway import Gateway

from .stand_in import Holding, StandIn


@dataclass
class Ranked(StandIn):
    """A rank keeps what it served and publishes that itself; a request that names none goes to each in its turn."""

    num_ranks: int = 2
    is_deaf: bool = False
    """Whether it takes no notice of the rank that a request names."""
    holdings: list[Holding] = field(default_factory=list)
    publishers: list[Publisher] = field(default_factory=list)
    served_by: list[int] = field(default_factory=list)
    """The rank of each request."""

    async def start(self) -> None:
        await super().start()
        self.holdings = [self.holding, *(Holding() for _ in range(1, self.num_ranks))]
        self.publishers = [
            self._publisher(holding, f"{self.name}/{rank}", self._events_of(rank))
            for rank, holding in enumerate(self.holdings)
            if self.tells and rank
        ]

    async def kill(self) -> None:
        await super().kill()
        for publisher in self.publishers:
            await asyncio.to_thread(publisher.close)

    def names(self) -> list[str]:
        """Of its ranks, as the router has them."""
        return [f"{self.url}/{rank}" for rank in range(self.num_ranks)]

    def is_known(self, gateway: Gateway) -> bool:
        """Whether the index holds of each rank exactly what that holds."""
        index = gateway.dispatcher.fleet.index
        return all(
            index.holding(name).num_entries == sum(map(len, each.spaces.values())) + len(each.states)
            and not each.num_waiting
            for name, each in zip(self.names(), self.holdings, strict=True)
        )

    def _events_of(self, rank: int) -> tuple[str, str]:
        events, replay = self._events
        return (f"{events}{rank or ''}", f"{replay}{rank or ''}")

    async def _marconi(self, _: web.Request) -> web.Response:
        names = [self.name, *(f"{self.name}/{rank}" for rank in range(1, self.num_ranks))]
        ranks = [
            {"dp_rank": rank, "events": self._said(name, self._events_of(rank)) if self.tells else None}
            for rank, name in enumerate(names)
        ]
        return web.json_response({"ranks": ranks})

    def _holding_of(self, body: dict[str, Any]) -> Holding:
        turn = len(self.served_by) % self.num_ranks
        rank = turn if self.is_deaf else body.get("routed_dp_rank", turn)
        self.served_by.append(rank)
        return self.holdings[rank]
