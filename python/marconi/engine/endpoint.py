"""`GET /marconi`: what every scheduler's cache holds and did. `GET /marconi/requests`: why its latest requests missed.

A scheduler adds its cache's status, with its data-parallel rank, to the internal state that SGLang's HTTP process asks
it for; the route, in that process, gives those parts alone, by rank. What else the cache has to say is added only to an
answer to us: SGLang's request for the state carries a `rid` that nothing reads. Both stand behind the same API key as
SGLang's own routes.
"""

from typing import Any, Final

KEY = "marconi"
REQUESTS: Final = "marconi/requests"
"""The `rid` of a request for internal state that is to list the latest requests."""
_UNSERVED: Final = "SGLang's own cache serves this model: it has no recurrent layers, or the cache is disabled"


def on_get_internal_state(result: Any, controller: Any, request: Any) -> None:
    """After `SchedulerInternalStateController.get_internal_state`: our cache's part."""
    cache = controller.scheduler.tree_cache
    status = getattr(cache, "status", None)
    if status is None:
        return
    from marconi.engine.ranks import dp_rank

    if request.rid == REQUESTS:
        part = {"requests": cache.account.explanations.latest(cache.clock())}
    else:
        part = status().as_dict()
    result.internal_state[KEY] = {"dp_rank": dp_rank(), **part}


def add_route() -> None:
    """Add the routes to SGLang's application, in the process that serves it; a second time does nothing."""
    from sglang.srt.entrypoints import http_server

    known = {getattr(route, "path", None) for route in http_server.app.routes}
    for path, answer in (("/marconi", _status), ("/marconi/requests", _requests)):
        if path not in known:
            http_server.app.add_api_route(path, answer, methods=["GET"])


async def _status() -> Any:
    return await _answer(None)


async def _requests() -> Any:
    return await _answer(REQUESTS)


async def _answer(rid: str | None) -> Any:
    """The parts of all schedulers, by rank, of an answer to `rid`."""
    from fastapi.responses import ORJSONResponse
    from sglang.srt.entrypoints import http_server
    from sglang.srt.managers.io_struct import GetInternalStateReq

    state = http_server._global_state
    parts = []
    if state is not None:
        manager = state.tokenizer_manager
        manager.auto_create_handle_loop()
        # `TokenizerManager.get_internal_state` sends a request of its own making.
        ask = vars(manager)["get_internal_state_communicator"]
        answers = await ask(GetInternalStateReq(rid=rid))
        parts = [each.internal_state[KEY] for each in answers if KEY in each.internal_state]
    if not parts:
        return ORJSONResponse({"error": _UNSERVED}, status_code=404)
    # Schedulers answer in any order.
    return ORJSONResponse({"ranks": sorted(parts, key=lambda rank: rank["dp_rank"])})
