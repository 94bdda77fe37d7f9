"""Logarithms in whole steps, the same on every processor: bounds are compared, nothing is rounded.

    step(x) = floor(log2(x) * steps per octave)

What ranks order by must not hang on the last bit of a logarithm, which libraries and processors round differently. The
bounds within an octave are the powers of two to 28 digits, as floats; a power of two itself is exact.
"""

from bisect import bisect_right
from decimal import Decimal
from math import frexp


class Octaves:
    """Steps of 1 / `steps_per_octave` of log2."""

    __slots__ = ("_bounds", "_num_steps")

    def __init__(self, steps_per_octave: int) -> None:
        self._num_steps = steps_per_octave
        self._bounds = [
            float(Decimal(2) ** (Decimal(step) / steps_per_octave - 1)) for step in range(1, steps_per_octave)
        ]

    def step(self, number: float) -> int:
        """The step of a number above 0."""
        mantissa, exponent = frexp(number)
        return (exponent - 1) * self._num_steps + bisect_right(self._bounds, mantissa)
