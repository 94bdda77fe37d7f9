"""Table 1 of the Marconi paper, for any profile: FLOPs, bytes and FLOPs a byte of each kind of layer.

Rows are of one layer of a kind (kinds whose layers differ: of their mean). As in the paper, the bytes of a recurrent
layer are those of its state, and its convolution window stands beside it; `L` is the length of the prefix. For
`marconi-7b` the numbers are those of the paper's formulas at D = 4096 and N = 128 (see `marconi.model.paper`).
"""

from dataclasses import dataclass
from fractions import Fraction

from marconi.model.profile import KindCost, ModelProfile


@dataclass(frozen=True, slots=True)
class Row:
    """One kind of layer, as polynomials in the length L of a prefix."""

    kind: str
    num_layers: int
    flops: str
    state_bytes: str
    convolution_bytes: int
    flops_per_byte: str


def rows(profile: ModelProfile) -> tuple[Row, ...]:
    """The table's rows, in the order of `profile.kinds`."""
    return tuple(_row(kind) for kind in profile.kinds)


def _row(cost: KindCost) -> Row:
    linear, quadratic = (Fraction(flops, cost.num_layers) for flops in (cost.flops.linear, cost.flops.quadratic))
    kv_bytes, recurrent_bytes = (
        Fraction(count, cost.num_layers) for count in (cost.kv_bytes_per_token, cost.recurrent_bytes)
    )
    flops = [_term(quadratic, "L^2"), _term(linear, "L")]
    flops += [_term(Fraction(per_key, cost.num_layers), f"S_{window}(L)") for window, per_key in cost.flops.windows]
    held = [_term(kv_bytes, "L"), _term(recurrent_bytes, "")]
    held += [_term(Fraction(size, cost.num_layers), f"min(L, {window})") for window, size in cost.windows]
    return Row(
        kind=cost.kind,
        num_layers=cost.num_layers,
        flops=_join(flops),
        state_bytes=_join(held),
        convolution_bytes=cost.convolution_bytes // cost.num_layers,
        flops_per_byte=_efficiency(linear, quadratic, kv_bytes, recurrent_bytes),
    )


def _efficiency(linear: Fraction, quadratic: Fraction, kv_bytes: Fraction, recurrent_bytes: Fraction) -> str:
    """FLOPs over bytes where that is a polynomial: layers that keep KV for every token, and recurrent ones."""
    if kv_bytes:
        return _join([_term(quadratic / kv_bytes, "L"), _term(linear / kv_bytes, "")])
    if recurrent_bytes:
        return _join([_term(quadratic / recurrent_bytes, "L^2"), _term(linear / recurrent_bytes, "L")])
    return "-"


def _term(factor: Fraction, power: str) -> str:
    if not factor:
        return ""
    number = f"{int(factor):,}" if factor.denominator == 1 else f"{float(factor):,.10g}"
    if factor == 1 and power:
        return power
    return f"{number} {power}".rstrip()


def _join(terms: list[str]) -> str:
    return " + ".join(term for term in terms if term) or "0"
