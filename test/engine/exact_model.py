"""The model itself as a reference: its weights as a server in bfloat16 has them, its sums in float32.

An answer is judged token by token, by the log-probability that the model gives each token after all before it. It runs
in transformers and shares no kernel, cache or schedule with a server.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from .scenarios import Exchange

IN_FLOAT32 = "A_log"
"""What SGLang keeps of the checkpoint as it is: rates of decay, which a thousand tokens multiply."""

FASTER = ("causal_conv1d", "fla", "mamba_ssm")
"""Packages whose kernels transformers prefers to its own sums in torch; `fla` has those that SGLang's began as."""


@contextmanager
def not_installed(packages: Sequence[str]) -> Iterator[None]:
    """Let an import of these packages fail, as transformers asks for them where it imports a model."""
    found = {name: sys.modules[name] for name in packages if name in sys.modules}
    sys.modules.update(dict.fromkeys(packages))  # type: ignore[arg-type] # None, as Python says "not found"
    try:
        yield
    finally:
        for name in packages:
            del sys.modules[name]
        sys.modules.update(found)


class ExactModel:
    """A tiny model, on the accelerator if there is one."""

    def __init__(self, path: Path):
        from transformers import AutoModelForCausalLM

        device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        self._device = device or torch.device("cpu")
        with not_installed(FASTER):
            model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self._model = model.eval().to(self._device)
        with torch.no_grad():
            for name, weight in self._model.named_parameters():
                if not name.endswith(IN_FLOAT32):
                    weight.copy_(weight.bfloat16())

    @torch.inference_mode()
    def logprobs(self, prompt: Sequence[int], answer: Sequence[int]) -> list[float]:
        """The log-probability of each token of `answer` after all that is before it."""
        tokens = torch.tensor([[*prompt, *answer[:-1]]], device=self._device)
        logits = self._model(tokens, logits_to_keep=len(answer)).logits[0]
        chosen = torch.tensor(answer, device=self._device)[:, None]
        found: list[float] = logits.log_softmax(-1).gather(1, chosen)[:, 0].tolist()
        return found

    def error(self, exchange: Exchange) -> float:
        """The largest error of an answer's log-probabilities."""
        answer = exchange.completion
        exact = self.logprobs(exchange.prompt, answer.token_ids)
        return max(abs(a - b) for a, b in zip(answer.logprobs, exact, strict=True))
