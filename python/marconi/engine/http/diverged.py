"""Tokens on both sides of a divergence, from the cache to whoever may read them, under `--marconi-explain text`.

the scheduler                    the tokens, of the request's own name space       (`policy/divergence.py`)
the process that answers HTTP    takes them from the answer before SGLang builds its meta-information, which it
                                 logs, dumps and exports; decodes them
                                 the explanation of a request with a `cache_salt`
                                 of its own that asks for it                       (`hints.py`)
                                 `GET /marconi/requests`                           (`endpoint.py`)

"diverged": {"position": 200, "before": {"token_ids": [...], "text": "..."}, "prompt": {...}, "known": {...}}
"""

import json
from array import array
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from marconi.policy.divergence import Divergence

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import BatchStrOutput

DIVERGED: Final = "marconi_diverged"
"""In `cached_tokens_details`, and on SGLang's object of a request: the tokens as JSON."""
FIELD: Final = "diverged"
"""The key of an explanation that holds them."""
_SIDES: Final = ("before", "prompt", "known")


def as_dict(diverged: Divergence) -> dict[str, Any]:
    """The position and the token ids, for JSON."""
    return {"position": diverged.position, **{side: _ids(getattr(diverged, side)) for side in _SIDES}}


def before_handle_batch_output(manager: Any, recv_obj: "BatchStrOutput") -> None:
    """Before `TokenizerManager._handle_batch_output`: takes the tokens out before SGLang logs details."""
    for rid, details in zip(recv_obj.rids, recv_obj.cached_tokens_details or (), strict=False):
        if details and DIVERGED in details:
            tokens, state = details.pop(DIVERGED), manager.rid_to_state.get(rid)
            if state is not None:
                setattr(state.obj, DIVERGED, tokens)


def of_answer(obj: Any, tokenizer: Any) -> dict[str, Any]:
    """The part of an explanation beside its misses; `obj` is SGLang's object of the request."""
    tokens = getattr(obj, DIVERGED, None)
    return {} if tokens is None else {FIELD: with_text(json.loads(tokens), tokenizer)}


def with_text(values: Mapping[str, Any], tokenizer: Any) -> dict[str, Any]:
    """The values of `as_dict`, decoded; texts are None without a `tokenizer`, as under `--skip-tokenizer-init`."""
    sides = {side: {"token_ids": values[side], "text": _text(values[side], tokenizer)} for side in _SIDES}
    return {"position": values["position"], **sides}


def _ids(path: bytes) -> list[int]:
    ids = array("q")
    ids.frombytes(path)
    return ids.tolist()


def _text(ids: list[int], tokenizer: Any) -> str | None:
    if tokenizer is None:
        return None
    try:
        return str(tokenizer.decode(ids))
    except (ArithmeticError, LookupError, TypeError, ValueError):
        # Ids that stand for images are beyond every vocabulary.
        return None
