"""The recurrent layers of published models, unsharded: what of a configuration a state and its operands depend on.

Sources are the `config.json` of each model on the Hugging Face hub, those that `marconi.model.catalog` lists from there
(a test holds them together), and for the chunk sizes of Mamba2 the same files' `chunk_size` or `mamba_chunk_size`.
Chunks of the other families are 64 tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Final


class Family(StrEnum):
    """A recurrence, by its operator's name."""

    GATED_DELTA_RULE = "gated_delta_rule"
    KDA = "kda"
    MAMBA2 = "mamba2"


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One layer: a head's state is (num_rows, num_columns).

    Rows are of the value (x in Mamba2) and columns of the key (B). `num_shared_heads` are the key heads, or groups,
    that heads of the state share.
    """

    model: str
    family: Family
    num_heads: int
    num_shared_heads: int
    num_rows: int
    num_columns: int
    chunk_size: int
    source: str
    conv_width: int = 4

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """A slot's heads, rows and columns."""
        return self.num_heads, self.num_rows, self.num_columns

    @property
    def num_channels(self) -> int:
        """Channels of the convolution: values, keys and queries (x, B and C)."""
        return self.num_heads * self.num_rows + 2 * self.num_shared_heads * self.num_columns

    def narrowed(self, most_heads: int) -> "LayerShape":
        """Return this layer with its heads divided to at most `most_heads`, and one shared head at least."""
        times = max(1, -(-self.num_heads // most_heads))
        return replace(self, num_heads=self.num_heads // times, num_shared_heads=max(1, self.num_shared_heads // times))


def _mamba2(model: str, num_heads: int, head_dim: int, state_dim: int, groups: int, chunk: int, hub: str) -> LayerShape:
    return LayerShape(model, Family.MAMBA2, num_heads, groups, head_dim, state_dim, chunk, hub)


_ALL = (
    LayerShape("qwen3-next-80b-a3b", Family.GATED_DELTA_RULE, 32, 16, 128, 128, 64, "Qwen/Qwen3-Next-80B-A3B-Instruct"),
    _mamba2("nemotron-h-8b", 128, 64, 128, 8, 128, "nvidia/Nemotron-H-8B-Base-8K"),
    _mamba2("nemotron-h-56b", 256, 64, 256, 8, 128, "nvidia/Nemotron-H-56B-Base-8K"),
    LayerShape("kimi-linear-48b-a3b", Family.KDA, 32, 32, 128, 128, 64, "moonshotai/Kimi-Linear-48B-A3B-Instruct"),
    _mamba2("granite-4.0-h-small", 128, 64, 128, 1, 256, "ibm-granite/granite-4.0-h-small"),
    _mamba2("granite-4.0-h-tiny", 48, 64, 128, 1, 256, "ibm-granite/granite-4.0-h-tiny"),
    _mamba2("falcon-h1-7b", 24, 128, 256, 1, 128, "tiiuae/Falcon-H1-7B-Instruct"),
)

LAYERS: Final[Mapping[str, LayerShape]] = MappingProxyType({layer.model: layer for layer in _ALL})
"""The layers by the name that the command line takes."""
