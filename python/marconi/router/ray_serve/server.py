"""A replica's SGLang server: a child on a loopback port of its own, with this project's cache and its events.

    HTTP      127.0.0.1:port                    who is on another host reaches it through its replica
    events    127.0.0.1:port, port + 1          with keys, the node's address instead, for ingresses on other nodes

Ports are looked for when it starts, so replicas share a node without being told: by chance, among those that neither
the kernel hands out (from 32768 on) nor Ray (10002 to 19999), for a server takes them only once it has loaded its
model. What answers there must tell its events where this one was told to. Owner: its replica.
"""

import http.client
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from random import SystemRandom
from typing import Any, Final

from marconi.events.address import TcpAddress
from marconi.router.ray_serve.options import Options

_LOOPBACK: Final = "127.0.0.1"
_POLL_S: Final = 0.5
_ASK_TIMEOUT_S: Final = 10.0
_STOP_S: Final = 10.0
_TRIES: Final = 64
_PORTS: Final = range(20_000, 30_000)
_CHANCE: Final = SystemRandom()


class Server:
    """`python -m sglang.launch_server`, from its start to its end."""

    def __init__(self, options: Options, node_host: str) -> None:
        """Start it; `OSError` where no port is free."""
        self.port = _free_ports(_LOOPBACK, 1)
        host = _LOOPBACK if options.events_keys is None else node_host
        self._events = TcpAddress(host, _free_ports(host, 2))
        self._ready_timeout_s = options.ready_timeout_s
        env = {**os.environ, **options.env}
        for name in ("NO_PROXY", "no_proxy"):
            env[name] = ",".join(filter(None, (env.get(name), _LOOPBACK)))
        self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and what the operator asked for, no shell
            [sys.executable, "-m", "marconi.router.ray_serve.guard", *self._command(options)],
            stdin=subprocess.PIPE,
            env=env,
            start_new_session=True,
        )

    @property
    def url(self) -> str:
        """Of its HTTP, without a slash at the end."""
        return f"http://{_LOOPBACK}:{self.port}"

    def wait_until_ready(self) -> None:
        """Return once it serves; `RuntimeError`, one line, where it never does."""
        give_up_s = time.monotonic() + self._ready_timeout_s
        while time.monotonic() < give_up_s:
            self.require_running()
            if self._serves():
                return
            time.sleep(_POLL_S)
        raise RuntimeError(f"the SGLang server was not ready after {self._ready_timeout_s:g} s: its log is above")

    def require_running(self) -> None:
        """Raise `RuntimeError`, one line, if it has ended."""
        status = self._process.poll()
        if status is not None:
            raise RuntimeError(f"the SGLang server exited with status {status}: its log is above")

    def told(self) -> dict[str, Any]:
        """What it says of itself that a router needs (`workers.describe`), for JSON; `OSError` where it has gone."""
        info, marconi = self._json("/model_info"), self._json("/marconi")
        wanted = ("model_path", "served_model_name", "is_generation")
        ranks = marconi["ranks"] if isinstance(marconi, dict) else []
        return {
            "url": self.url,
            "model_info": {name: info[name] for name in wanted if name in info},
            "marconi": {"ranks": [{"events": rank.get("events")} for rank in ranks]},
        }

    def ask(self, path: str, body: Mapping[str, Any]) -> Any:
        """What it answers to a body, None where that is no JSON; `OSError` where it has gone."""
        try:
            return self._json(path, json.dumps(body).encode())
        except (urllib.error.HTTPError, ValueError):
            return None

    def stop(self) -> None:
        """Kill it, and wait until it is gone. Safe to call twice."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _command(self, options: Options) -> list[str]:
        command = [sys.executable, *options.entry_point, "--model-path", options.model]
        command += ["--host", _LOOPBACK, "--port", str(self.port), "--radix-cache-backend", "marconi"]
        command += ["--marconi-events", str(self._events)]
        if options.events_keys is not None:
            command += ["--marconi-events-keys", options.events_keys]
        return [*command, *options.server_args]

    def _serves(self) -> bool:
        """Whether it answers, and no other server that has taken its port."""
        try:
            self._read("/health")
            marconi = self._json("/marconi")
        except (OSError, http.client.HTTPException, ValueError):
            return False
        events = _first_events(marconi)
        return events is None or events.get("events") == str(self._events)

    def _json(self, path: str, body: bytes | None = None) -> Any:
        return json.loads(self._read(path, body))

    def _read(self, path: str, body: bytes | None = None) -> bytes:
        request = urllib.request.Request(  # noqa: S310 - our own server
            f"{self.url}{path}", body, {"Content-Type": "application/json"}
        )
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=_ASK_TIMEOUT_S) as answer:
            read: bytes = answer.read()
        return read


def _first_events(marconi: Any) -> dict[str, Any] | None:
    """Of the first rank, where it tells any."""
    ranks = marconi.get("ranks") if isinstance(marconi, dict) else None
    first = ranks[0] if isinstance(ranks, list) and ranks else None
    events = first.get("events") if isinstance(first, dict) else None
    return events if isinstance(events, dict) else None


def _free_ports(host: str, number: int) -> int:
    """The first of so many TCP ports in a row that nobody listens on now."""
    for _ in range(_TRIES):
        port = _CHANCE.choice(_PORTS)
        if all(_is_free(host, port + offset) for offset in range(number)):
            return port
    raise OSError(f"{host}: no {number} TCP ports in a row are free, of {_PORTS.start} to {_PORTS.stop - 1}")


def _is_free(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True
