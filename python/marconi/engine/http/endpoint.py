"""The routes of a server: what its caches hold and did, why requests missed, a page that draws the trees, and saving.

    GET /marconi             the status of every scheduler's cache                               (`reports/status.py`)
    GET /marconi/requests    the latest requests of each, or of one `?dp_rank=`, and their misses (`reports/explain.py`)
    GET /marconi/ui          a page of both for a browser, its frames and its last hour          (`reports/picture.py`)
    POST /marconi/save       write all states to the store behind the host now                   (`store/cache.py`)

A scheduler adds its cache's status, with its data-parallel rank, to the internal state that SGLang's HTTP process asks
it for; a route, in that process, gives those parts alone, by rank. What else the cache has to say is added only to an
answer to us: SGLang's request for the state carries a `rid` that nothing reads. The status is behind the same API key
as SGLang's own routes; requests and trees, which are of everybody's traffic, and saving are behind the administrator's
key if there is one.
"""

import asyncio
import math
import time
from typing import Any, Final

from marconi.engine.faults import fails_open
from marconi.engine.http.diverged import FIELD, with_text
from marconi.engine.http.parts import add_parts, add_since_to
from marconi.engine.launch.flags import of_process
from marconi.engine.reports.explain import OFF
from marconi.view.document import PageSource, document

KEY = "marconi"
REQUESTS: Final = "marconi/requests"
FRAME: Final = "marconi/frame"
HISTORY: Final = "marconi/history"
SAVE: Final = "marconi/save"
"""The `rid` of a request for internal state: for the latest requests, a frame, the last hour, or to save on."""
_NO_STORE: Final = "there is no store to save to: start the server with --hicache-storage-backend file"
_UNSERVED: Final = "SGLang's own cache serves this model: it has no recurrent layers, or the cache is disabled"
_SAVING: Final = asyncio.Lock()
"""A request that comes while another waits is answered by a save of its own."""
_PAUSE_S: Final = 0.02
_PATIENCE_S: Final = 20.0


def on_get_internal_state(result: Any, controller: Any, request: Any) -> None:
    """After `SchedulerInternalStateController.get_internal_state`: our cache's part."""
    cache = controller.scheduler.tree_cache
    status = getattr(cache, "status", None)
    if status is None:
        return
    from marconi.engine.ranks import dp_rank

    if request.rid == REQUESTS:
        part = {"requests": cache.explanations.latest(cache.clock())}
    elif request.rid == FRAME:
        part = {"frame": cache.picture.advance(cache.tree_core.hybrid, cache.clock()) or None}
    elif request.rid == HISTORY:
        part = {"history": cache.stats.history.state()}
    elif request.rid == SAVE:
        part = {"saved": cache.save()}
    else:
        part = status().as_dict()
    result.internal_state[KEY] = {"dp_rank": dp_rank(), **part}


def add_routes() -> None:
    """Add the routes to SGLang's application, in the process that serves it; a second time does nothing."""
    from sglang.srt.entrypoints import http_server
    from sglang.srt.utils.auth import AuthLevel, auth_level

    for_administrators = auth_level(AuthLevel.ADMIN_OPTIONAL)
    routes = {
        "/marconi": _status,
        "/marconi/requests": for_administrators(_requests),
        "/marconi/ui": for_administrators(_page),
        "/marconi/ui/frame": for_administrators(_frame),
        "/marconi/ui/history": for_administrators(_history),
        "/marconi/save": for_administrators(_save),
    }
    known = {getattr(route, "path", None) for route in http_server.app.routes}
    for path, answer in routes.items():
        if path not in known:
            http_server.app.add_api_route(path, answer, methods=["POST" if answer is _save else "GET"])


async def _status() -> Any:
    return _by_rank(await _parts(None))


async def _requests(dp_rank: int | None = None, rid: str = "", since: str | None = None) -> Any:
    """The latest requests: a scheduler hashes their prefixes in slices.

    With `since`, those whose ids begin with `rid` say what has changed since the one whose id begins with that.
    """
    if not of_process().explain:
        return _error(404, OFF)
    parts = await _whole(REQUESTS, "requests", dp_rank, "prefixes were not hashed")
    if not isinstance(parts, list):
        return parts
    return _by_rank([part | {"requests": _with_texts_and_parts(part["requests"], rid, since)} for part in parts])


def _with_texts_and_parts(requests: list[dict[str, Any]], rid: str, since: str | None) -> list[dict[str, Any]]:
    """The same, with the texts of tokens that a scheduler was allowed to show, and parts of chats."""
    from sglang.srt.entrypoints import http_server

    state = http_server._global_state
    manager = state.tokenizer_manager
    tokenizer = manager.tokenizer
    shown = [each | {FIELD: with_text(each[FIELD], tokenizer)} if FIELD in each else each for each in requests]
    fails_open(add_parts)(shown, manager)
    if since is not None:
        fails_open(add_since_to)(shown, manager, rid, since)
    return shown


async def _page(dp_rank: int = 0) -> Any:
    from fastapi.responses import HTMLResponse
    from sglang.srt.entrypoints import http_server

    state = http_server._global_state
    name = "" if state is None else state.tokenizer_manager.served_model_name
    ours = f"?dp_rank={dp_rank}"
    source = PageSource(f"ui/frame{ours}", f"requests{ours}", history=f"ui/history{ours}")
    return HTMLResponse(document(f"{name}, rank {dp_rank}", source=source))


async def _frame(dp_rank: int = 0) -> Any:
    """The latest frame of a rank: a scheduler walks its tree in slices."""
    from fastapi.responses import Response

    parts = await _whole(FRAME, "frame", dp_rank, "the tree was not walked")
    return Response(parts[0]["frame"], media_type="application/json") if isinstance(parts, list) else parts


async def _history(dp_rank: int = 0) -> Any:
    from fastapi.responses import ORJSONResponse

    parts = await _whole(HISTORY, "history", dp_rank, "")
    return ORJSONResponse(parts[0]["history"]) if isinstance(parts, list) else parts


async def _save() -> Any:
    """Write what the cache holds to its store: a few states at a time."""
    async with _SAVING:
        parts = await _whole(SAVE, "saved", None, "", math.inf)
    if not isinstance(parts, list):
        return parts
    if any(part["saved"] == {} for part in parts):
        return _error(404, _NO_STORE)
    errors = [part["saved"]["error"] for part in parts if "error" in part["saved"]]
    return _error(500, errors[0]) if errors else _by_rank(parts)


async def _whole(rid: str, key: str, dp_rank: int | None, late: str, patience_s: float = _PATIENCE_S) -> Any:
    """The parts of all schedulers, or of that of `dp_rank`, in answers to `rid`, or an answer that says why not.

    A scheduler does a little at a time, so it is asked again until none of its `key` is null; `late` says what it has
    not done within `patience_s`.
    """
    deadline_s = time.monotonic() + patience_s
    while time.monotonic() < deadline_s:
        parts = await _parts(rid)
        asked = [part for part in parts if dp_rank in (None, part["dp_rank"])]
        if not parts:
            return _by_rank(parts)
        if not asked:
            ranks = ", ".join(str(rank) for rank in sorted(part["dp_rank"] for part in parts))
            return _error(404, f"dp_rank must be one of {ranks}, got {dp_rank}")
        if all(part[key] is not None for part in asked):
            return asked
        await asyncio.sleep(_PAUSE_S)
    return _error(503, f"{late} within {patience_s:g} s")


async def _parts(rid: str | None) -> list[dict[str, Any]]:
    """The parts of all schedulers in an answer to `rid`."""
    from sglang.srt.entrypoints import http_server
    from sglang.srt.managers.io_struct import GetInternalStateReq

    state = http_server._global_state
    if state is None:
        return []
    manager = state.tokenizer_manager
    manager.auto_create_handle_loop()
    # `TokenizerManager.get_internal_state` sends a request of its own making.
    ask = vars(manager)["get_internal_state_communicator"]
    answers = await ask(GetInternalStateReq(rid=rid))
    return [each.internal_state[KEY] for each in answers if KEY in each.internal_state]


def _by_rank(parts: list[dict[str, Any]]) -> Any:
    from fastapi.responses import ORJSONResponse

    if not parts:
        return _error(404, _UNSERVED)
    # Schedulers answer in any order.
    return ORJSONResponse({"ranks": sorted(parts, key=lambda rank: rank["dp_rank"])})


def _error(status_code: int, error: str) -> Any:
    from fastapi.responses import ORJSONResponse

    return ORJSONResponse({"error": error}, status_code=status_code)
