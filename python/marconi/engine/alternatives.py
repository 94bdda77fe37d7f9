"""Other divisions of memory that a launch could have, for advice from live traffic (`advice.py`).

    launching process    asks SGLang's resolution and this cache's refusals, as `split.py` does, and notes the answer on
                         the record of SGLang's arguments, which takes it to every process
    scheduler            asks this cache's refusals again, by the model that is loaded

Two pools are served wherever one pool is. A host tier lies below two pools, so one pool is asked for without one.
"""

from dataclasses import dataclass, replace
from typing import Any, Final

from marconi.engine import service, split
from marconi.engine.flags import Flags
from marconi.engine.service import Facts
from marconi.policy.catalog import SGLANG_MAMBA_RATIO

_GIVEN: Final = (*split.DIVIDING, "enable_hierarchical_cache", "hicache_size")
_NOTED: Final = "_marconi_alternatives"


@dataclass(frozen=True, slots=True)
class Alternatives:
    """Divisions that a server supports beside its present one."""

    one_pool: bool = False
    host_tier: bool = False
    given: tuple[str, ...] = ()
    """Flags of the operator's that divide memory or make a host tier."""
    link_bytes_per_s: float = 0.0
    """Bandwidth from the host's memory; 0 if it was not measured."""

    @classmethod
    def of(cls, server_args: Any, given: Flags, facts: Facts) -> "Alternatives":
        """The noted ones, as far as the model that is loaded supports them; none if none were noted."""
        noted: Alternatives = getattr(server_args, _NOTED, cls())
        joined = replace(facts, has_one_pool=True, has_host_tier=False)
        tiered = replace(facts, has_one_pool=False, has_host_tier=True)
        return replace(
            noted,
            one_pool=noted.one_pool and not any(service.against_cache(server_args, given, joined)),
            host_tier=noted.host_tier and not any(service.against_cache(server_args, given, tiered)),
        )


def note(server_args: Any) -> None:
    """Before `server_args` are resolved and memory is divided: ask for each alternative, and note the answer."""
    if hasattr(server_args, _NOTED):
        return
    given = tuple("--" + name.replace("_", "-") for name in _GIVEN if getattr(server_args, name))
    # The copies that are asked about are resolved and come by here, and a copy has none of its record's notes.
    seen = {_NOTED: Alternatives()}
    joined = split.why_not(server_args, enable_unified_memory=True, enable_hierarchical_cache=False, **seen)
    tiered = split.why_not(
        server_args,
        enable_unified_memory=False,
        mamba_full_memory_ratio=server_args.mamba_full_memory_ratio or SGLANG_MAMBA_RATIO,
        enable_hierarchical_cache=True,
        hicache_ratio=1.0,
        hicache_size=0,
        **seen,
    )
    setattr(server_args, _NOTED, Alternatives(joined is None, tiered is None, given))
