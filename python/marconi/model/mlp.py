"""A feed-forward layer.

    FLOPs(L) = 2 L D F m

F intermediate width, m matrices: 3 with a gate (SwiGLU), 2 without. F = 4 D and m = 2 is the Marconi paper's 16 L D^2.
Nothing is left in memory.
"""

from dataclasses import dataclass
from typing import ClassVar, Final

from marconi.model.base import FlopCurve, Layer

GATED: Final = 3
"""Matrices of a layer with a gate: gate, up, down."""
UNGATED: Final = 2
"""Matrices of a layer without one: up, down."""


@dataclass(frozen=True, slots=True)
class Mlp(Layer):
    """A dense feed-forward layer."""

    kind: ClassVar[str] = "mlp"

    hidden_size: int
    intermediate_size: int
    num_matrices: int = GATED

    @property
    def num_parameters(self) -> int:
        """All matrices."""
        return self.hidden_size * self.intermediate_size * self.num_matrices

    @property
    def flops(self) -> FlopCurve:
        """The same for every token."""
        return FlopCurve(linear=2 * self.num_parameters)
