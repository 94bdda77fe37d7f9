"""The data-parallel rank that serves a request: the one that its client asks for, and the field that names it.

SGLang takes it from a header or from the body, in this order; without either it chooses itself.

    X-Override-Routed-Dp-Rank                    only with `SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES`
    X-Data-Parallel-Rank                         routes of OpenAI
    routed_dp_rank, data_parallel_rank           all routes, and so what the router sends

Sources: `srt/entrypoints/request_headers.py`, `srt/managers/io_struct.py:GenerateReqInput`,
`srt/entrypoints/openai/serving_base.py:extract_routed_dp_rank_from_header`.
"""

from collections.abc import Mapping
from typing import Any, Final

FIELD: Final = "routed_dp_rank"
HEADERS: Final = ("X-Override-Routed-Dp-Rank", "X-Data-Parallel-Rank")


def wanted_rank(body: Mapping[str, Any], headers: Mapping[str, str]) -> object:
    """The rank that a client asks for, on any route; None where it asks for none, and any value where it is wrong."""
    for value in (headers[name] for name in HEADERS if name in headers):
        try:
            return int(value)
        except ValueError:
            return value
    return next((body[name] for name in (FIELD, "data_parallel_rank") if body.get(name) is not None), None)
