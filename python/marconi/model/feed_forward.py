"""Feed-forward layers, dense and sparse. They leave nothing in memory and cost the same for every token."""

from dataclasses import dataclass
from typing import ClassVar, Final

from marconi.model.base import FlopCurve, Layer

GATED: Final = 3
"""Matrices of a layer with a gate (SwiGLU): gate, up, down."""
UNGATED: Final = 2
"""Matrices of a layer without one: up, down."""


@dataclass(frozen=True, slots=True)
class Mlp(Layer):
    """A dense feed-forward layer.

        FLOPs(L) = 2 L D F m

    F intermediate width, m matrices. F = 4 D and m = 2 is the Marconi paper's 16 L D^2.
    """

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
        """A multiply-add for each parameter."""
        return FlopCurve(linear=2 * self.num_parameters)


@dataclass(frozen=True, slots=True)
class MixtureOfExperts(Layer):
    """A mixture of experts: every token passes the router, k of E routed experts, and the shared ones.

        FLOPs(L) = 2 L (D E + k W Fe m + D Fs m + 2 D W [W != D])

    Fe width of a routed expert, Fs of all shared experts together, m matrices of one, W the width that experts work at
    (D, unless they share a projection down to a latent width and one back).
    """

    kind: ClassVar[str] = "moe"

    hidden_size: int
    num_experts: int
    num_active_experts: int
    expert_intermediate_size: int
    shared_intermediate_size: int = 0
    num_matrices: int = GATED
    latent_size: int = 0
    """Width that the routed experts work at; 0 for the hidden width."""

    @property
    def _parameters_per_expert(self) -> int:
        return (self.latent_size or self.hidden_size) * self.expert_intermediate_size * self.num_matrices

    @property
    def num_expert_parameters(self) -> int:
        """All routed experts."""
        return self.num_experts * self._parameters_per_expert

    @property
    def num_parameters(self) -> int:
        """Router, routed and shared experts, projections to and from the latent width."""
        shared = self.hidden_size * self.shared_intermediate_size * self.num_matrices
        router_and_latent = self.hidden_size * (self.num_experts + 2 * self.latent_size)
        return router_and_latent + shared + self.num_expert_parameters

    @property
    def num_active_parameters(self) -> int:
        """All but the routed experts that a token does not use."""
        num_idle = self.num_experts - self.num_active_experts
        return self.num_parameters - num_idle * self._parameters_per_expert

    @property
    def flops(self) -> FlopCurve:
        """Count the active parameters, which are the same for every token."""
        return FlopCurve(linear=2 * self.num_active_parameters)
