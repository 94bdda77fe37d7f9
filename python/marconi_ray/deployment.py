"""A replica: an SGLang server that it starts, relays for, and stops."""

import contextlib
from collections.abc import AsyncIterator
from typing import Any, Final

import aiohttp
import ray.util
from ray import serve

from marconi.router.gateway.added import with_fields
from marconi.router.gateway.upstream import STREAM, client_session, relayed_headers
from marconi_ray.call import Call, ResponseHead, ServerGone
from marconi_ray.options import Options
from marconi_ray.server import Server, kinds_alike

_CONNECT_TIMEOUT_S: Final = 5.0
_HEALTH_TIMEOUT_S: Final = 25.0
"""SGLang's own check generates a token, and answers after 20 s that it could not."""


class SGLang:
    """Serve's deployment of a server; ready once that has loaded the model."""

    def __init__(self, options: Options) -> None:
        """`RuntimeError`, one line, where the server does not start."""
        self._server = Server(options, ray.util.get_node_ip_address())
        try:
            self._server.start()
            self._server.wait_until_ready()
            self._metadata = {**self._server.description(), **_kinds(options, self._server)}
        except BaseException:
            self._server.stop()
            raise
        self._name = serve.get_replica_context().replica_id.unique_id
        self._session: aiohttp.ClientSession | None = None

    async def forward(self, call: Call) -> AsyncIterator[ResponseHead | bytes]:
        """Relay a call: yields the answer's head, then its chunks; `ServerGone` where there is none.

        An answer that is no stream is all in its head. Closing the iterator closes the connection, at which SGLang
        aborts the request.
        """
        try:
            async with self._client().request(
                call.method,
                f"{self._server.url}{call.path}",
                data=with_fields(call.body, call.added) or None,
                headers=call.headers,
            ) as answer:
                is_stream = answer.content_type == STREAM
                first = await answer.content.readany() if is_stream else await answer.read()
                kept = tuple(relayed_headers(answer.headers).items())
                yield ResponseHead(answer.status, kept, self._name, first)
                if is_stream:
                    async for chunk in answer.content.iter_any():
                        yield chunk
        except (aiohttp.ClientError, ConnectionError) as broken:
            raise ServerGone(f"replica {self._name}: {str(broken) or type(broken).__name__}") from None

    def record_replica_metadata(self) -> dict[str, Any]:
        """The server's description for the routers; Serve calls this once, when the replica is ready."""
        return self._metadata

    async def check_health(self) -> None:
        """Raise where the server has ended or fails its health check; Serve then starts another replica."""
        self._server.require_running()
        timeout = aiohttp.ClientTimeout(total=_HEALTH_TIMEOUT_S)
        async with self._client().get(f"{self._server.url}/health", timeout=timeout) as answer:
            answer.raise_for_status()

    async def __del__(self) -> None:
        """Stop the server; Serve calls and awaits this when a replica stops."""
        if getattr(self, "_session", None) is not None:
            assert self._session is not None
            with contextlib.suppress(aiohttp.ClientError):
                await self._session.close()
        server = getattr(self, "_server", None)
        if server is not None:
            server.stop()

    def _client(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = client_session(_CONNECT_TIMEOUT_S)
        return self._session


def _kinds(options: Options, server: Server) -> dict[str, Any]:
    """The kinds of prompts that a router tokenizes as the server does, or why it cannot use the server's events."""
    try:
        return {"kinds": sorted(kinds_alike(options.reader(), server.post_json, server.url))}
    except ValueError as other:
        return {"why_no_events": str(other)}
