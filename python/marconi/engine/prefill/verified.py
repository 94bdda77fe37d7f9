"""Which models' prefills can keep planned states: by names alone, of a model that is loaded or of one that would be."""

from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

HYBRID_BACKEND: Final = "HybridLinearAttnBackend"
VERIFIED_BACKENDS: Final = MappingProxyType(
    {
        **dict.fromkeys(
            ("GDNAttnBackend", "KDAAttnBackend", "LightningAttentionBackend", "Mamba2AttnBackend"), HYBRID_BACKEND
        ),
        "ShortConvAttnBackend": "ShortConvHybridAttnBackend",
    }
)
"""Linear backends, and the hybrid one of each, whose layers all run through the two forwards that are hooked, with all
they know in metadata; or whose models run kernels of their own on such metadata, which are hooked as well."""
_CAPTURED_IN_SEGMENTS: Final = frozenset({"FalconH1ForCausalLM"})
"""Models whose recurrent layers lie inside the segments of a breakable prefill graph.

SGLang keeps that graph for a model in whose every layer it finds attention, and these have Mamba-2 beside it, with no
break around it (`models/falcon_h1.py`; `model_executor/model_runner_components/layer_setup.py`,
`compute_attention_and_moe_layers`). A replay runs it on the sequences and the slots of the capture, and no hook runs.
"""


def are_captured_in_segments(architectures: Sequence[str] | None) -> bool:
    """True if a breakable prefill graph holds recurrent layers of a model of these `architectures` in its segments."""
    return not _CAPTURED_IN_SEGMENTS.isdisjoint(architectures or ())


@dataclass(frozen=True, slots=True)
class RecurrentLayers:
    """How SGLang runs a model's recurrent layers: the classes of its attention backends, and what else matters."""

    hybrid_backend: str
    linear_backend: str | None
    """None for a model that has none."""
    are_captured: bool = False
    """True if a prefill graph captures them."""

    @property
    def why_not_planned(self) -> str | None:
        """Why prefills can keep no planned states; None if they can."""
        if self.linear_backend is None or VERIFIED_BACKENDS.get(self.linear_backend) != self.hybrid_backend:
            return f"recurrent layers on {self.linear_backend or self.hybrid_backend}"
        if self.are_captured:
            return "a prefill graph that captures the recurrent layers"
        return None
