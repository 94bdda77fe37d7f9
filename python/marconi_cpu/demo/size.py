"""How long the demo's texts are, and how little memory both servers get, so that what may come again does not fit."""

from dataclasses import dataclass
from typing import Final

_NUM_CONTEXT_TOKENS: Final = 1000
_CHARS_PER_TOKEN: Final = 4
"""About, of a tokenizer that merges; of the small models' one."""
_PAGE: Final = 64
NUM_STATES: Final = 64
NUM_RUNNING: Final = 4


@dataclass(frozen=True, slots=True)
class Size:
    """Characters of a context, of which other texts have a share, and tokens of an answer."""

    num_context_chars: int
    max_new_tokens: int
    chars_per_token: int

    @classmethod
    def of(cls, num_context_chars: int | None, max_new_tokens: int, *, is_small_model: bool) -> "Size":
        """Take the sizes given; without a number of characters, those of about 1,000 tokens."""
        chars_per_token = 1 if is_small_model else _CHARS_PER_TOKEN
        num_chars = num_context_chars or _NUM_CONTEXT_TOKENS * chars_per_token
        return cls(num_chars, max_new_tokens, chars_per_token)

    def chars(self, share: float) -> int:
        """That share of a context's characters."""
        return max(8, round(share * self.num_context_chars))

    @property
    def num_kv_tokens(self) -> int:
        """Room for sixteen contexts and their answers: what runs at once fits, what may come again does not."""
        num_tokens = 16 * self.num_context_chars // self.chars_per_token + 16 * self.max_new_tokens
        return -(-num_tokens // _PAGE) * _PAGE

    @property
    def server_args(self) -> tuple[str, ...]:
        """Flags of both servers; those of the command line stand behind them, and win."""
        return (
            *("--max-total-tokens", str(self.num_kv_tokens), "--max-mamba-cache-size", str(NUM_STATES)),
            *("--max-running-requests", str(NUM_RUNNING)),
        )
