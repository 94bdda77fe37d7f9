"""The families of hybrid models that there is a small one of."""

from enum import StrEnum
from typing import Never


class Family(StrEnum):
    """A family by its recurrent layers. `Family(value)` raises ValueError for any other value."""

    GDN = "gdn"
    """The gated delta rule with full attention and a gated MLP in every layer: Qwen3.5's language model."""
    MAMBA2 = "mamba2"
    """Mamba2, MLP and attention as layers of their own: Nemotron-H."""

    SHORT_CONV = "short-conv"
    """Short convolutions and attention with an MLP in every layer: LFM2."""

    WINDOWS = "windows"
    """Short convolutions around attention in a window or in all tokens, with an MLP in every layer: Inkling."""

    @property
    def can_have_mtp(self) -> bool:
        """True if a model of it may have a head that predicts one more token."""
        return self in (Family.GDN, Family.MAMBA2)

    @classmethod
    def _missing_(cls, value: object) -> Never:
        raise ValueError(f"a tiny model's family must be one of {', '.join(cls)}, got {value!r}")
