"""Table 1 and figure 5: what a layer and a model save for the memory that they keep.

FLOP efficiency is FLOPs of computing a prefix over bytes of all its states (section 4.2, equation 1), convolution
windows included, as in the paper's experiments.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from marconi.model import KindCost, load, paper

from .base import Claim, Figure, Numbers, Scale
from .canvas import Canvas
from .cells import Cell, Sample
from .setups import seven_billion
from .table import rows

_LENGTHS: Final = tuple(128 * 2**power for power in range(9))
_D, _N = 4096, 128


class LayerTable(Figure):
    """Table 1."""

    id = "table-1"
    title = "Marconi, table 1: FLOPs and bytes of a layer"
    shows = (
        "The formulas of the paper and, below each, what this project's profile `marconi-7b` counts at D = 4096 and "
        "N = 128 for a prefix of L tokens."
    )

    def numbers(self, scale: Scale, samples: Mapping[Cell, Sample]) -> Numbers:
        """Formulas, coefficients, and how many values of both were compared and equal."""
        profile = load("marconi-7b")
        found = {row.kind: row for row in rows(profile)}
        layers = [
            {
                "layer": kind,
                "number": found[kind].num_layers,
                "paper": {"flops": flops, "bytes": held, "flops_per_byte": efficiency},
                "here": {
                    "flops": found[kind].flops,
                    "bytes": found[kind].state_bytes,
                    "flops_per_byte": found[kind].flops_per_byte,
                },
                "convolution_bytes": found[kind].convolution_bytes,
            }
            for kind, flops, held, efficiency in paper.TABLE_1
        ]
        costs = {cost.kind: cost for cost in profile.kinds}
        compared = [
            (_of_paper(kind, length), _of_profile(cost, length)) for kind, cost in costs.items() for length in _LENGTHS
        ]
        ssm = costs["ssm"]
        share = ssm.convolution_bytes / (ssm.convolution_bytes + ssm.recurrent_bytes)
        return {
            "layers": layers,
            "num_compared": len(compared),
            "num_equal": sum(expected == found for expected, found in compared),
            "convolution_share": round(share, 4),
        }

    def draw(self, numbers: Numbers, canvas: Canvas) -> None:
        """Two lines a layer."""
        table = []
        for layer in numbers["layers"]:
            for source in ("paper", "here"):
                cells = layer[source]
                table.append([layer["layer"], source, cells["flops"], cells["bytes"], cells["flops_per_byte"]])
        canvas.panels[0].table(["layer", "", "FLOPs", "bytes", "FLOPs a byte"], table)

    def claims(self, numbers: Numbers) -> Sequence[Claim]:
        """Equality, and the share of convolution windows."""
        share = numbers["convolution_share"]
        return (
            Claim(
                "the FLOPs and bytes of each layer are those of its formulas",
                "",
                f"{numbers['num_equal']} of {numbers['num_compared']} values are equal to the last digit",
                numbers["num_equal"] == numbers["num_compared"],
            ),
            Claim(
                "convolution windows, which the table leaves out, are a small part of the states",
                "6.1 %",
                f"{100 * share:.2f} %",
                abs(share - 0.061) < 0.001,
            ),
        )


def _of_paper(kind: str, length: int) -> tuple[int, int]:
    """FLOPs and bytes of one layer by table 1."""
    return {
        "attention": (8 * length * _D**2 + 4 * length**2 * _D, 4 * length * _D),
        "mlp": (16 * length * _D**2, 0),
        "ssm": (12 * length * _D**2 + 16 * length * _D * _N + 10 * length, 2 * _D * _N),
    }[kind]


def _of_profile(cost: KindCost, length: int) -> tuple[float, float]:
    """FLOPs and bytes of one layer, its convolution window left out as in the table."""
    return cost.flops.at(length) / cost.num_layers, (cost.bytes_of(length) - cost.convolution_bytes) / cost.num_layers


class FlopEfficiency(Figure):
    """Figure 5."""

    id = "5"
    title = "Marconi, figure 5: FLOP efficiency of 7B models"
    shows = (
        "FLOPs saved for each byte of cached states, over the length of the prefix, of three models of equal size: "
        "32 attention and 32 MLP layers, 4 attention, 24 SSM and 28 MLP layers, 64 SSM layers."
    )

    def numbers(self, scale: Scale, samples: Mapping[Cell, Sample]) -> Numbers:
        """FLOPs a byte by model and length."""
        models = {
            "Transformer": seven_billion(paper.hybrid(32, 0, 32)),
            "hybrid (1:6)": seven_billion(paper.hybrid()),
            "Mamba": seven_billion(paper.hybrid(0, 64, 0)),
        }
        efficiency = {
            name: [
                round(model.prefix_flops(length) / (model.kv_bytes_per_token * length + model.state_bytes))
                for length in _LENGTHS
            ]
            for name, model in models.items()
        }
        return {"length_tokens": list(_LENGTHS), "flops_per_byte": efficiency}

    def draw(self, numbers: Numbers, canvas: Canvas) -> None:
        """A line a model."""
        panel = canvas.panels[0]
        panel.lines(numbers["length_tokens"], numbers["flops_per_byte"], "xy")
        panel.name("prefix, tokens", "FLOPs a byte")

    def claims(self, numbers: Numbers) -> Sequence[Claim]:
        """Steeper with more SSM layers."""
        growth = {name: values[-1] / values[0] for name, values in numbers["flops_per_byte"].items()}
        return (
            Claim(
                "the more SSM layers, the steeper FLOP efficiency rises with length, and that of KV alone hardly does",
                "",
                f"from {_LENGTHS[0]} to {_LENGTHS[-1]:,} tokens it grows "
                + ", ".join(f"{factor:.3g}x for {name}" for name, factor in growth.items()),
                growth["Transformer"] < 8 and growth["Transformer"] < growth["hybrid (1:6)"] < growth["Mamba"],
            ),
        )
