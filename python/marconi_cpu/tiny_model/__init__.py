"""Small hybrid models with random weights and a long memory, for tests and demonstrations.

A model is a function of (family, seed) alone: the same bytes in every file, whatever machine, thread count or time.
It is a Hugging Face checkpoint folder of a few megabytes that SGLang and transformers load as they load any other.
Three properties make a wrong cached state visible, and a right one provably equal:

- Memory: a token's trace in a recurrent state halves within hundreds to thousands of tokens, so a state that is
  missing, of another prefix, or a few tokens stale moves the logits by far more than rounding does.
- Clear winners: two best logits that differ by less than rounding can change are rare, so greedy tokens do not
  depend on the order of a sum.
- Text that survives: the model generates printable ASCII and no special token, so an answer always has the length
  that was asked for, and a client that sends it back as text sends back the same tokens.
"""

from marconi_cpu.tiny_model.checkpoint import write
from marconi_cpu.tiny_model.family import Family

__all__ = ["Family", "write"]
