"""A replica's SGLang server: a child on a loopback port of its own, with this project's cache and its events.

    HTTP      127.0.0.1:port                    other hosts reach it through its replica
    events    127.0.0.1:port, port + 1          with keys, the node's address instead, for ingresses on other nodes

Ports are found when it starts, so replicas share a node without configuration. A server that answers at its port counts
as ready only if its events are at the address that this one was given: another one may have taken the port.
"""

import json
import urllib.error
from collections.abc import Callable, Mapping
from typing import Any

from marconi.events.address import TcpAddress
from marconi.process import LOOPBACK, GuardedServer, free_ports
from marconi.router.prompts import PromptKind
from marconi.router.prompts.check import TOKENIZE, probes, verify, without
from marconi.router.prompts.reader import TokenizingReader
from marconi_ray.options import Options


class Server(GuardedServer):
    """`python -m sglang.launch_server`, from its start to its end."""

    def __init__(self, options: Options, node_host: str) -> None:
        """`OSError` where no port is free."""
        port, host = free_ports(1), LOOPBACK if options.events_keys is None else node_host
        self._events = TcpAddress(host, free_ports(2, host))
        keys = () if options.events_keys is None else ("--marconi-events-keys", options.events_keys)
        arguments = (
            *(*options.entry_point, "--model-path", options.model, "--host", LOOPBACK, "--port", str(port)),
            *("--radix-cache-backend", "marconi", "--marconi-events", str(self._events), *keys),
        )
        super().__init__(
            [*arguments, *options.server_args], port, env=options.env, ready_timeout_s=options.ready_timeout_s
        )

    def description(self) -> dict[str, Any]:
        """The server's answers that describe it to a router (`describe`), for JSON; `OSError` where it has ended."""
        info, marconi = json.loads(self.request("/model_info")), json.loads(self.request("/marconi"))
        wanted = ("model_path", "served_model_name", "is_generation")
        ranks = marconi["ranks"] if isinstance(marconi, dict) else []
        return {
            "url": self.url,
            "model_info": {name: info[name] for name in wanted if name in info},
            "marconi": {"ranks": [{name: rank.get(name) for name in ("dp_rank", "events")} for rank in ranks]},
        }

    def post_json(self, path: str, body: Mapping[str, Any]) -> Any:
        """The JSON that it answers to a body, None where that is none; `OSError` where it has ended."""
        try:
            return json.loads(self.request(path, body))
        except (urllib.error.HTTPError, ValueError):
            return None

    def is_ready(self) -> bool:
        """True if this server answers its health check, and no other one that has taken its port."""
        try:
            events = json.loads(self.request("/marconi"))["ranks"][0].get("events")
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            return False
        return super().is_ready() and (events is None or events.get("events") == str(self._events))


def kinds_alike(
    reader: TokenizingReader, post: Callable[[str, Mapping[str, Any]], Any], server: str
) -> frozenset[PromptKind]:
    """The kinds of prompts whose ids are the reader's at a server; `post` posts a body to a path of it.

    `ValueError`, one line, where texts are unlike, or chats that the reader has ids of.
    """
    kinds = frozenset(PromptKind)
    for probe in probes(reader):
        if probe.kind not in kinds:
            continue
        try:
            verify(probe, post(TOKENIZE, probe.body), server)
        except ValueError:
            if probe.kind in (PromptKind.TEXTS, PromptKind.CHATS) and probe.expected_hash is not None:
                raise
            kinds = without(kinds, probe.kind)
    return kinds
