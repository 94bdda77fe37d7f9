"""The fleet in a browser: the live page of every rank of every worker, side by side.

    GET /router/ui                      a page with a frame for each rank
    GET /router/ui/INDEX/page           the page of a rank's worker, as the worker made it (`GET /marconi/ui`)
    GET /router/ui/INDEX/ui/frame       what that page asks for: frames,
    GET /router/ui/INDEX/requests       and the latest requests

Ranks are numbered in the order of `GET /router`. The router asks workers with the key that it has for them, so a
browser needs the router's token alone, as a password: it asks for one, and sends it by itself. That is taken for
reading pages only, so no other page in that browser can change the fleet.
"""

import asyncio
from html import escape
from typing import Final

import aiohttp
from aiohttp import hdrs, web

from marconi.router.gateway import access
from marconi.router.gateway.errors import Refusal
from marconi.router.gateway.gateway import Gateway
from marconi.router.gateway.worker import Rank

PAGES: Final = {"page": "/marconi/ui", "ui/frame": "/marconi/ui/frame", "requests": "/marconi/requests"}
"""What is asked for here of a rank -> where its worker has it."""
_TIMEOUT_S: Final = 30.0
_PAGE: Final = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>Prefix caches of a fleet</title>
<style>
body {{ margin: 1rem; font: 1rem/1.4 system-ui, sans-serif; }}
main {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 36rem), 1fr)); gap: 1rem; }}
h2 {{ font-size: 1rem; margin: 0 0 .3rem; overflow-wrap: anywhere; }}
iframe {{ width: 100%; height: 80vh; border: 1px solid GrayText; border-radius: .4rem; }}
</style>
</head>
<body>
<header><h1>Prefix caches of a fleet</h1></header>
<main>
{ranks}
</main>
</body>
</html>
"""
_RANK: Final = """<section aria-labelledby="rank-{index}">
<h2 id="rank-{index}">{name}</h2>
<iframe src="ui/{index}/page" title="Prefix cache of {name}"></iframe>
</section>"""


class Pages:
    """Handles what a browser asks for."""

    def __init__(self, gateway: Gateway, session: aiohttp.ClientSession) -> None:
        self._gateway = gateway
        self._session = session
        key = gateway.settings.worker_api_key
        self._headers = {} if key is None else {hdrs.AUTHORIZATION: f"Bearer {key}"}

    async def fleet(self, request: web.Request) -> web.Response:
        """Handle `GET /router/ui`."""
        access.require_reader(request, self._gateway.settings.token)
        ranks = "\n".join(_RANK.format(index=index, name=escape(rank.name)) for index, rank in enumerate(self._ranks()))
        return web.Response(text=_PAGE.format(ranks=ranks or "<p>No worker is known.</p>"), content_type="text/html")

    async def of_worker(self, request: web.Request) -> web.Response:
        """Handle `GET /router/ui/INDEX/PAGE`, a page of `PAGES`."""
        access.require_reader(request, self._gateway.settings.token)
        ranks, index = self._ranks(), request.match_info["index"]
        if not (index.isascii() and index.isdigit() and int(index) < len(ranks)):
            raise Refusal(404, f"{request.path}: ranks are numbered from 0 to {len(ranks) - 1}")
        rank = ranks[int(index)]
        url = f"{rank.worker.url}{PAGES[request.match_info['page']]}?dp_rank={rank.number or 0}"
        try:
            async with asyncio.timeout(_TIMEOUT_S), self._session.get(url, headers=self._headers) as answer:
                body = await answer.read()
        except (aiohttp.ClientError, TimeoutError) as problem:
            return web.Response(status=502, text=f"{rank.name} does not answer: {type(problem).__name__}")
        return web.Response(body=body, status=answer.status, headers={"Content-Type": answer.content_type})

    def _ranks(self) -> list[Rank]:
        return [rank for worker in self._gateway.workers.values() for rank in worker.ranks]
