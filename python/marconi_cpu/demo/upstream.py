"""Every change that the demo makes to SGLang; `marconi.engine.upstream` says how such a list is read."""

from typing import Final

from marconi.engine.touch import Group, Kind, Touch

_ENDPOINT: Final = "sglang.lang.backend.runtime_endpoint.RuntimeEndpoint"

DEMO = Group(
    "The demo",
    "In the process of `marconi demo`, a client of its servers.",
    "the frontend timing the first token, and returning meta-information of every request",
    (
        Touch(Kind.SUBCLASS, _ENDPOINT, "`TimedEndpoint` extends it"),
        Touch(Kind.OVERRIDE, _ENDPOINT + ".generate", "a generation is streamed, so that its first token can be timed"),
        Touch(
            Kind.OVERRIDE,
            _ENDPOINT + ".commit_lazy_operations",
            "the prefill of a forked prefix becomes a row of the demo's table",
        ),
    ),
)

GROUPS: Final = (DEMO,)
