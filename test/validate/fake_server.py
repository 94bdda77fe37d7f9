"""A server over HTTP whose cache is a replay: what `marconi validate` holds it against it must find equal."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from marconi.engine.reports.explain import EXPLAIN
from marconi.engine.reports.moments import Moments, Steps
from marconi.engine.reports.status import CacheSettings, Use
from marconi.model import load
from marconi.policy.request import Request, pack
from marconi.replay.server import ServerReplay
from marconi.validate.prediction import replay_of
from marconi.validate.server import ServedCache

MODEL = "nemotron-h-8b"
SETTINGS = CacheSettings(
    admission="judicious",
    ttft_budget_s=None,
    step_tokens=4096,
    max_ghosts=1000,
    max_ghost_tokens=None,
    page_tokens=1,
    chunk_tokens=128,
    num_rows=2,
    num_working_slots=1,
    num_lent_slots=2,
    ends="its working slot",
    track_tokens=256,
    vocab_size=4000,
)
CACHE = ServedCache("best", None, 1000, 200_000, Use(6000, 0, 0), Use(14, 0, 0), None, SETTINGS)

Lie = Callable[[int, int], int]
"""What is reported of a request, by its number and what it had from the cache."""


class Fake:
    """The server's state; requests are served one after the other, whoever asks."""

    def __init__(self, cache: ServedCache, lie: Lie, **status: Any) -> None:
        self.cache = cache
        self.lie = lie
        self.changed = status
        self.info: dict[str, Any] = {"model_path": MODEL, "speculative_algorithm": None}
        self.flush_code = 200
        self.num_flushes = 0
        self.num_running = 0
        self.latest: list[tuple[str, float]] = []
        """Id and age in seconds of each request, whoever sent it."""
        self.max_prompt_tokens = cache.kv_tokens.size
        self.replay = self._new()
        self.num_served = 0
        self.prompts: list[list[int]] = []
        self._now_s = 0.0
        self._moments = Moments(lambda: self._now_s)
        self._serving = threading.Lock()

    def _new(self) -> ServerReplay:
        return replay_of(self.cache, load(MODEL).prefix_flops)

    def get(self, path: str) -> tuple[int, Any]:
        if path == "/server_info":
            return 200, self.info
        if path.startswith("/v1/loads"):
            return 200, {"loads": [{"num_running_reqs": self.num_running, "num_waiting_reqs": 0}]}
        if path == "/marconi/requests":
            return 200, {"ranks": [{"requests": [{"rid": rid, "seconds_ago": ago} for rid, ago in self.latest]}]}
        rank = {
            **asdict(self.cache),
            "dp_rank": 0,
            "host": None,
            "why_not_planned": None,
            "num_requests": self.num_served,
            "num_requests_uncached": 0,
        }
        return 200, {"ranks": [rank | self.changed]}

    def post(self, path: str, body: Any) -> tuple[int, Any]:
        with self._serving:
            if path.startswith("/flush_cache"):
                self.replay = self._new()
                self.num_flushes += 1
                return self.flush_code, "flushed"
            if len(body["input_ids"]) > self.max_prompt_tokens:
                return 400, {"error": {"message": "too long"}}
            return 200, self._generate(body)

    def _generate(self, body: Any) -> Any:
        prompt, sampling = body["input_ids"], body["sampling_params"]
        num_output = sampling["max_new_tokens"]
        output = [(sum(prompt) + 7 * position) % 4000 for position in range(num_output)]
        namespace = int(body.get("extra_key", "validate-0").removeprefix("validate-"))
        path = pack([*prompt, *output])
        request = Request(path, len(prompt), num_output, len(prompt) + num_output, self._now_s, namespace=namespace)
        steps, run = Steps(began=self._moments.now()), self.replay.run(request, self._now_s)
        run.begin()
        chunk_tokens = self.replay.scheduling.chunk_tokens
        for start in range(run.num_hit_tokens, len(prompt), chunk_tokens):
            run.now_s = self._now_s
            end = min(start + chunk_tokens, len(prompt))
            steps.computes(end, self._moments.now())
            run.take_chunk(end)
            self._now_s += 0.125
            run.now_s = self._now_s
            steps.computed(self._moments.now())
            run.leave_chunk()
        started_s, num_steps = self._now_s, num_output - 1
        for number in range(num_steps):
            self._moments.decodes()
            run.now_s = started_s + 0.0625 * num_output * number / num_steps
            run.decode(len(prompt) + number + 1)
        self._now_s += 0.0625 * num_output
        run.now_s = self._now_s
        steps.ended = self._moments.now()
        run.finish()
        self._now_s += 1.0
        number, self.num_served = self.num_served, self.num_served + 1
        self.prompts.append(prompt)
        self.latest.append((body.get("rid", ""), 0.0))
        told = self.lie(number, run.num_hit_tokens)
        explained = {"line": f"hit {told:,} of {len(prompt):,}", "steps": steps.as_dict()}
        meta = {"cached_tokens": told, "prompt_tokens": len(prompt), EXPLAIN: explained}
        return {"output_ids": output, "meta_info": meta}


def honest(_number: int, num_cached_tokens: int) -> int:
    """The truth."""
    return num_cached_tokens


@contextmanager
def serving(fake: Fake) -> Iterator[str]:
    """Its address, while it answers."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(*fake.get(self.path))

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            self._answer(*fake.post(self.path, json.loads(body)))

        def _answer(self, code: int, content: Any) -> None:
            self.send_response(code)
            self.end_headers()
            self.wfile.write(json.dumps(content).encode())

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{running.server_port}"
        finally:
            running.shutdown()
            thread.join()


def with_settings(**changed: Any) -> ServedCache:
    """The cache with other settings."""
    return replace(CACHE, settings=replace(SETTINGS, **changed))
