"""A worker that costs next to nothing, so that what is measured is the router: it answers at once, in pieces.

    python worker.py PORT MODEL_FOLDER

It answers `/v1/tokenize` as the model's tokenizer does, so a router takes it for the real thing. A request says how its
answer comes: `"pieces"` of a stream, `"gap_s"` between two; the answer names the request, so that one that got lost, or
another's, is seen.
"""

import asyncio
import sys
from pathlib import Path

import msgspec
from aiohttp import web

from marconi.chat.tokenizer import TextTokenizer
from marconi.router.prompts import CHAT
from marconi.router.prompts.reader import TokenizingReader


def application(reader: TokenizingReader, tokenizer: TextTokenizer) -> web.Application:
    """The worker."""
    app = web.Application(client_max_size=1 << 30)

    async def model_info(_: web.Request) -> web.Response:
        return web.json_response({"served_model_name": "a-model", "is_generation": True})

    async def health(_: web.Request) -> web.Response:
        return web.Response()

    async def tokenize(request: web.Request) -> web.Response:
        body = await request.json()
        if "messages" in body:
            ids = reader.read(CHAT, body).ids
        else:
            ids = tokenizer.encode(body["prompt"], adds_special=body.get("add_special_tokens", True))
        return web.json_response({"tokens": list(ids or ())})

    app.router.add_get("/model_info", model_info)
    app.router.add_get("/health", health)
    app.router.add_post("/v1/tokenize", tokenize)
    for path in ("/generate", CHAT):
        app.router.add_post(path, _generate)
    return app


async def _generate(request: web.Request) -> web.StreamResponse:
    body = msgspec.json.decode(await request.read())
    pieces, gap_s = body.get("pieces", 1), body.get("gap_s", 0.0)
    if not body.get("stream"):
        return web.Response(body=msgspec.json.encode({"id": body["rid"]}), content_type="application/json")
    answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await answer.prepare(request)
    for number in range(pieces):
        if number:
            await asyncio.sleep(gap_s)
        await answer.write(b"data: " + msgspec.json.encode({"id": body["rid"], "piece": number}) + b"\n\n")
    await answer.write(b"data: [DONE]\n\n")
    await answer.write_eof()
    return answer


if __name__ == "__main__":
    port, folder = sys.argv[1:]
    reading = TokenizingReader.of(Path(folder))
    assert reading.tokenizer is not None, reading.why_not
    made = application(reading, reading.tokenizer)
    web.run_app(made, host="127.0.0.1", port=int(port), access_log=None, print=None)
