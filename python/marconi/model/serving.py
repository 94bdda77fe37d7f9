"""Whether SGLang 0.5.23 and this cache serve a model, and with which flags, by its `model_type`: for a plan's advice.

`marconi check` asks SGLang itself. A plan is made where SGLang need not be installed, so it has a table, which a test
holds against `check`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final


@dataclass(frozen=True, slots=True)
class Serving:
    """How a model is served with this cache."""

    why_not: str | None = None
    """Why it is not; None if it is."""
    flags: str = ""
    """Flags of SGLang's without which the cache refuses it on a GPU."""
    has_planned_states: bool = True
    """False where SGLang keeps states itself, with which one pool and checkpoints in int8 are refused."""


SERVED: Final = Serving()
"""By the backend's flag alone."""
_ABSENT: Final = Serving("SGLang 0.5.23 does not serve this model")
_UNCACHED: Final = Serving("SGLang 0.5.23 serves this model without a prefix cache alone")
_CHUNK_END: Final = Serving(has_planned_states=False)
NO_CHECKPOINT: Final = Serving("this model is the Marconi paper's, and no server has it")
WINDOWED: Final = Serving("a model with recurrent layers and sliding windows is not supported: leave the backend out")

BY_TYPE: Final[Mapping[str, Serving]] = MappingProxyType(
    {
        **dict.fromkeys(("jamba", "rwkv7", "minimax", "minimax_text_01"), _ABSENT),
        **dict.fromkeys(("mamba", "falcon_mamba", "mamba2"), _UNCACHED),
        **dict.fromkeys(("glm5_next", "glm5_next_text"), _CHUNK_END),
        **dict.fromkeys(("inkling_model", "inkling_mm_model"), _CHUNK_END),
        "falcon_h1": Serving(flags="--cuda-graph-backend-prefill disabled"),
    }
)
"""Types that are not served by the backend's flag alone, in one pool if nothing else is asked for."""
