"""`GET /marconi`: what every scheduler's cache holds and did.

A scheduler adds its cache's status, with its data-parallel rank, to the internal state that SGLang's HTTP process asks
it for; the route, in that process, gives those parts alone, by rank. It stands behind the same API key as SGLang's own
routes.
"""

from typing import Any

KEY = "marconi"


def on_get_internal_state(result: Any, controller: Any, _request: Any) -> None:
    """After `SchedulerInternalStateController.get_internal_state`: our cache's part."""
    status = getattr(controller.scheduler.tree_cache, "status", None)
    if status is not None:
        from marconi.engine.ranks import dp_rank

        result.internal_state[KEY] = {"dp_rank": dp_rank(), **status().as_dict()}


def add_route() -> None:
    """Add the route to SGLang's application, in the process that serves it; a second time does nothing."""
    from sglang.srt.entrypoints import http_server

    if all(getattr(route, "path", None) != "/marconi" for route in http_server.app.routes):
        http_server.app.add_api_route("/marconi", _status, methods=["GET"])


async def _status() -> Any:
    from fastapi.responses import ORJSONResponse
    from sglang.srt.entrypoints import http_server

    state = http_server._global_state
    states = [] if state is None else await state.tokenizer_manager.get_internal_state()
    # Schedulers answer in any order.
    ranks = sorted((each[KEY] for each in states if KEY in each), key=lambda rank: rank["dp_rank"])
    if not ranks:
        message = "SGLang's own cache serves this model: it has no recurrent layers, or the cache is disabled"
        return ORJSONResponse({"error": message}, status_code=404)
    return ORJSONResponse({"ranks": ranks})
