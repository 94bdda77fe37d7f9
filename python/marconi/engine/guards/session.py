"""A turn that replaces others of its session abandons them, instead of ending the scheduler.

SGLang clears a session's turns while it walks over them, and by their ids, of which a client may give two the same:

    replace                  every turn                      RuntimeError: dictionary changed size during iteration
    replace from a turn      those that continue it          KeyError, where two of them have one id

Both end the scheduler, with all that it serves. So the replaced turns are abandoned here, before SGLang looks: each is
aborted if it has not ended, and forgotten. Sessions live in the scheduler, so the process that answers HTTP cannot
refuse any of this.
"""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput


def around_create_req(
    create_req: Callable[..., Any], session: Any, req: "TokenizedGenerateReqInput", *args: Any, **kwargs: Any
) -> Any:
    """Around `Session.create_req`: abandon the turns that `req` replaces before SGLang looks for them."""
    params = req.session_params
    if params.replace and not session.streaming:
        if params.rid is None:
            _abandon(session, session.req_nodes.values())
        elif params.rid in session.req_nodes:
            replaced = session.req_nodes[params.rid]
            _abandon(session, replaced.children)
            replaced.children = []
    return create_req(session, req, *args, **kwargs)


def _abandon(session: Any, nodes: Iterable[Any]) -> None:
    """End the turns at `nodes` and all that continue them, and forget them."""
    left = list(nodes)
    while left:
        node = left.pop()
        node.abort()
        if session.req_nodes.get(node.req.rid) is node:
            del session.req_nodes[node.req.rid]
        left.extend(node.children)
