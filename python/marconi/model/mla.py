"""Multi-head latent attention: keys and values are stored as one latent vector a token.

    per token 2 (D rq + rq H (dn + dr)  or  D H (dn + dr)) + 2 D (rkv + dr) + 2 rkv H (dn + dv) + 2 H dv D
    per key   2 H (dn + dr + dv)
    KV bytes a token = (rkv + dr) b, on every worker: the latent has no heads to split

rq and rkv ranks of the query and key-value projections, dn and dr widths of a head without and with rotary embedding,
dv width of a value. This is the expanded form that prefill runs (DeepSeek-V2, arXiv 2405.04434, section 2.1). Resuming
from a cached prefix expands its latents again; that, 2 rkv H (dn + dv) a cached token, is not counted.
"""

from dataclasses import dataclass
from typing import ClassVar

from marconi.model.base import FlopCurve, Layer, Storage, causal


@dataclass(frozen=True, slots=True)
class LatentAttention(Layer):
    """Full causal attention over latents."""

    kind: ClassVar[str] = "mla"

    hidden_size: int
    num_heads: int
    q_lora_rank: int
    """0 where queries are projected directly."""
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    gate_channels: int = 0
    """Width of a projected output gate; 0 for none."""

    @property
    def num_parameters(self) -> int:
        """Query, latent, expansion, gate and output projections."""
        query_channels = self.num_heads * (self.qk_nope_head_dim + self.qk_rope_head_dim)
        if self.q_lora_rank:
            queries = self.q_lora_rank * (self.hidden_size + query_channels)
        else:
            queries = self.hidden_size * query_channels
        latent = self.hidden_size * (self.kv_lora_rank + self.qk_rope_head_dim)
        expansion = self.kv_lora_rank * self.num_heads * (self.qk_nope_head_dim + self.v_head_dim)
        output = self.hidden_size * (self.num_heads * self.v_head_dim + self.gate_channels)
        return queries + latent + expansion + output

    @property
    def flops(self) -> FlopCurve:
        """Projections and the causal triangle of scores."""
        per_key = 2 * self.num_heads * (self.qk_nope_head_dim + self.qk_rope_head_dim + self.v_head_dim)
        return causal(2 * self.num_parameters, per_key)

    def kv_bytes_per_token(self, storage: Storage) -> int:
        """The latent and the shared rotary key, replicated."""
        storage.shard(self.num_heads, "the number of attention heads")
        return (self.kv_lora_rank + self.qk_rope_head_dim) * storage.kv_itemsize
