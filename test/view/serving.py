"""A server of the page: it answers with frame after frame, the last one again, and with the requests of the moment."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from marconi.view.document import PageSource, document


@contextmanager
def serving(
    frames: list[dict[str, Any]],
    requests: Callable[[], tuple[int, Any]],
    history: dict[str, Any] | None = None,
) -> Iterator[str]:
    """Serves the page, `/frame`, `/requests`, whose status and answer `requests` makes, and `/history`, if any.

    Yields the address.
    """
    asked = iter(range(1 << 30))
    page = document("a server", source=PageSource("/frame", "/requests", "" if history is None else "/history", 0.05))

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, values = 200, None
            if self.path == "/requests":
                status, values = requests()
            elif self.path == "/frame":
                values = frames[min(next(asked), len(frames) - 1)]
            elif self.path == "/history":
                values = history
            text = page if values is None else json.dumps(values)
            self.send_response(status)
            self.send_header("Content-Type", "text/html; charset=utf-8" if values is None else "application/json")
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    listener = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=listener.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.server_port}/"
    finally:
        listener.shutdown()
        thread.join()
        listener.server_close()
