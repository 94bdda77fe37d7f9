"""Fields that the router adds to a request's body; the rest of it is sent unchanged.

    routed_dp_rank                               the data-parallel rank that was chosen (`ranks.py`)
    custom_params.marconi_shared_elsewhere       where the worker should keep a state, since prompts on others diverge
                                                 there (`Decision.shared_tokens`)

SGLang reads `custom_params` in `sampling_params` on `/generate`, and at the top on OpenAI's routes. Sources:
`srt/sampling/sampling_params.py:SamplingParams`, `srt/entrypoints/openai/protocol.py`.
"""

import json
from collections.abc import Mapping
from typing import Any, Final

from marconi.events.base import SHARED_ELSEWHERE
from marconi.router.prompts import GENERATE

_SAMPLING: Final = "sampling_params"
_CUSTOM: Final = "custom_params"


def asking_for_state(route: str, body: Mapping[str, Any], num_tokens: int) -> dict[str, Any]:
    """The fields by which a request on `route` asks for a state after so many tokens of its prompt.

    None where its own are not what SGLang takes, for the worker to refuse, or where each prompt of a batch has its own.
    """
    if route != GENERATE:
        custom = _asking(body, num_tokens)
        return {} if custom is None else {_CUSTOM: custom}
    sampling = body.get(_SAMPLING) or {}
    custom = _asking(sampling, num_tokens) if isinstance(sampling, dict) else None
    return {} if custom is None else {_SAMPLING: {**sampling, _CUSTOM: custom}}


def _asking(fields: Mapping[str, Any], num_tokens: int) -> dict[str, Any] | None:
    own = fields.get(_CUSTOM) or {}
    return {**own, SHARED_ELSEWHERE: num_tokens} if isinstance(own, dict) else None


def with_fields(body: bytes, fields: Mapping[str, Any]) -> bytes:
    """A body, a JSON object, with these fields in place of its own, and the rest unchanged, byte for byte.

    Of several fields of one name the last one counts.
    """
    if not fields:
        return body
    encoding = json.detect_encoding(body)
    if not encoding.startswith("utf-8"):
        body = body.decode(encoding, "surrogatepass").encode("utf-8", "surrogatepass")
    head = body[: body.rindex(b"}")].rstrip()
    return b"%b%b%b" % (head, b"" if head.endswith(b"{") else b", ", json.dumps(dict(fields)).encode()[1:])
