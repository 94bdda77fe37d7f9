"""Fields that the router adds to a request's body; the rest of it is sent unchanged.

    routed_dp_rank                               the data-parallel rank that was chosen, or that the client asked for
    custom_params.marconi_shared_elsewhere       where the worker should keep a state, since prompts on others diverge
                                                 there (`Decision.shared_tokens`)

SGLang reads `custom_params` in `sampling_params` on `/generate`, and at the top on OpenAI's routes. It takes a rank
from a header or from the body, in this order; without either it chooses itself.

    X-Override-Routed-Dp-Rank                    only with `SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES`
    X-Data-Parallel-Rank                         routes of OpenAI
    routed_dp_rank, data_parallel_rank           all routes, and so what the router sends

Sources: `srt/sampling/sampling_params.py:SamplingParams`, `srt/entrypoints/openai/protocol.py`,
`srt/entrypoints/request_headers.py`, `srt/managers/io_struct.py:GenerateReqInput`,
`srt/entrypoints/openai/serving_base.py:extract_routed_dp_rank_from_header`.
"""

import json
from collections.abc import Mapping
from typing import Any, Final

from marconi.events.base import SHARED_ELSEWHERE
from marconi.router.prompts import GENERATE

RANK: Final = "routed_dp_rank"
RANK_HEADERS: Final = ("X-Override-Routed-Dp-Rank", "X-Data-Parallel-Rank")
_SAMPLING: Final = "sampling_params"
_CUSTOM: Final = "custom_params"


def wanted_rank(body: Mapping[str, Any], headers: Mapping[str, str]) -> object:
    """The rank that a client asks for, on any route; None where it asks for none, and any value where it is wrong."""
    for value in (headers[name] for name in RANK_HEADERS if name in headers):
        try:
            return int(value)
        except ValueError:
            return value
    return next((body[name] for name in (RANK, "data_parallel_rank") if body.get(name) is not None), None)


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
