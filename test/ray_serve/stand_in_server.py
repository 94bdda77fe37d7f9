"""A server in place of SGLang's, started as a replica starts one; its prompts are `input_ids`, each below 128."""

import argparse
import asyncio
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from aiohttp import web
from tokenizers import Tokenizer

from marconi.events.address import TcpAddress
from marconi.events.publisher import Publisher, PublisherOptions
from router.gateway.stand_in import BLOCK_TOKENS, Fault, StandIn


class Server(StandIn):
    """Takes ids, and has a tokenizer for who asks."""

    num_left_out = 0
    """Of each text's ids, where it tokenizes as nobody else does."""

    async def serve(self, events: TcpAddress) -> None:
        """Until the process ends; what it tells, it tells at `events`."""
        app = web.Application()
        for path, answer in {
            "/model_info": self._model_info,
            "/v1/models": self._models,
            "/marconi": self._marconi,
            "/health": self._health,
        }.items():
            app.router.add_get(path, answer)
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/v1/tokenize", self._tokenize)
        if self.tells:
            self._events = str(events), str(events.offset(1))
            self.publisher = Publisher(
                self.holding, PublisherOptions(self.name, *self._events, BLOCK_TOKENS, period_s=0.02)
            )
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", self.port).start()
        await asyncio.Event().wait()

    async def _answer(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        self.fault = Fault(body.get("fault", Fault.NONE))
        self.step_s = body.get("step_s", 0.0)
        return await super()._answer(request, {**body, "text": bytes(body["input_ids"]).decode("ascii")})

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        if "prompt" not in body:
            return web.Response(status=400)
        tokenizer = Tokenizer.from_file(str(Path(self.model) / "tokenizer.json"))
        ids = tokenizer.encode(body["prompt"], add_special_tokens=body["add_special_tokens"]).ids
        return web.json_response({"tokens": ids[self.num_left_out :]})

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"from": self.name, "num_aborted": self.num_aborted})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--radix-cache-backend", required=True)
    parser.add_argument("--marconi-events", type=TcpAddress.parse, required=True)
    parser.add_argument("--mute", action="store_true")
    parser.add_argument("--other-tokenizer", action="store_true")
    args = parser.parse_args()
    server = Server(f"{args.host}:{args.port}:0", args.port, model=args.model_path, tells=not args.mute)
    server.num_left_out = int(args.other_tokenizer)
    asyncio.run(server.serve(args.marconi_events))


if __name__ == "__main__":
    main()
