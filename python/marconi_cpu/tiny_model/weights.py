"""Random parameters, each a function of the seed and of its own name and shape.

The values of a parameter come from a Philox stream keyed by sha256(seed, name): the order in which parameters are
visited, the other parameters and the number of threads do not matter. They are uniform rather than normal: bits of
the stream, a subtraction and a product, each rounded alike on every machine.
"""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from marconi_cpu.tiny_model.tokenizer import GENERATED_IDS

Values: TypeAlias = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter to be filled: its name in the checkpoint, its shape, and the seed of the model."""

    name: str
    shape: tuple[int, ...]
    seed: int

    def uniform(self, std: float) -> Values:
        """Independent values of mean 0 and standard deviation `std`."""
        digest = hashlib.sha256(f"{self.seed} {self.name}".encode()).digest()
        stream = np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little")))
        unit = stream.random(self.shape, dtype=np.float32) - np.float32(0.5)
        return unit * np.float32(std * math.sqrt(12))


Rule: TypeAlias = Callable[[Parameter], Values]


@dataclass(frozen=True, slots=True)
class Architecture:
    """A family's `config.json` without the vocabulary, and its rules.

    A rule is found by the end of a parameter's name; the first that fits applies, and every parameter has one.
    """

    config: Mapping[str, Any]
    rules: Sequence[tuple[str, Rule]]
    mtp: "MtpHead | None"
    """None for a family without."""
    shapes: Callable[[Mapping[str, Any]], Mapping[str, tuple[int, ...]]] | None = None
    """The shapes of the parameters by their names, from `config.json`; None where transformers has them by theirs."""


@dataclass(frozen=True, slots=True)
class MtpHead:
    """A head that predicts one more token (multi-token prediction), changed so that some of its drafts are accepted.

    It passes the last token on; the model's own head is changed to like the token that follows it in the alphabet.
    """

    config: Mapping[str, Any]
    """Further entries of `config.json`."""
    layer: str
    """The layer of attention that the head's is like, by the beginning of its parameters' names,"""
    parameters: Mapping[str, tuple[int, ...]]
    """and the shapes of its other parameters."""
    embedding: str
    """The parameter that embeds a token."""
    succession: float
    """How much the model likes the next token of the alphabet."""


def draw(architecture: Architecture, config: Mapping[str, Any], seed: int, *, has_mtp: bool) -> dict[str, Values]:
    """Every parameter of the model that `config` describes, by its name in the checkpoint."""
    shapes, mtp = dict((architecture.shapes or _shapes)(config)), architecture.mtp if has_mtp else None
    if mtp is not None:
        layer = {name.removeprefix(mtp.layer): shape for name, shape in shapes.items() if name.startswith(mtp.layer)}
        shapes |= {**{f"mtp.layers.0.{name}": shape for name, shape in layer.items()}, **mtp.parameters}
    values = {
        name: np.ascontiguousarray(_rule(architecture, name)(Parameter(_alone(name), shape, seed)))
        for name, shape in shapes.items()
    }
    if mtp is not None:
        embedding, alphabet = values[mtp.embedding], list(GENERATED_IDS)
        liking = np.float32(mtp.succession / math.sqrt(embedding.shape[1]))
        head = values["lm_head.weight"]
        head[alphabet[1:] + alphabet[:1]] += liking * embedding[alphabet]
        # Logits nearly twice as large are rounded by twice as much; half of them has the same winners.
        head *= np.float32(0.5)
    return values


def constant(value: float) -> Rule:
    """The same value everywhere."""
    return lambda parameter: np.full(parameter.shape, value, np.float32)


def projection(gain: float) -> Rule:
    """Inputs of variance 1 come out with standard deviation `gain`."""
    return lambda parameter: parameter.uniform(gain / math.sqrt(parameter.shape[-1]))


def passed_on(parameter: Parameter) -> Values:
    """Project a token and the hidden state before it, concatenated, to the token, plus a little of the state."""
    width = parameter.shape[0]
    return np.concatenate([np.eye(width, dtype=np.float32), parameter.uniform(0.02)[:, width:]], 1)


def short_convolution() -> Rule:
    """Inputs of variance 1 come out small enough for the SiLU that follows to be nearly linear.

    Large ones it gives a mean, and in a state with a long memory a mean grows with the number of tokens, where what
    tells one prompt from another grows with its square root.
    """
    return projection(0.35)


def vocabulary_head(logit_std: float) -> Rule:
    """A projection to logits in which a token that is not to be generated has logit 0.

    Among as many generated tokens as there are, the best is several `logit_std` above 0.
    """

    def rule(parameter: Parameter) -> Values:
        weight = projection(logit_std)(parameter)
        others = np.ones(len(weight), np.bool_)
        others[list(GENERATED_IDS)] = False
        weight[others] = 0.0
        return weight

    return rule


def log_decay_rates(num_heads: int, half_lives: tuple[float, float], step: float) -> list[float]:
    """log(A) of heads whose states halve within geometrically spaced numbers of tokens, the longest first.

    The decay of a token is exp(-A * step); `half_lives` are the longest and the shortest.
    """
    longest, shortest = half_lives
    ratios = ((shortest / longest) ** (head / (num_heads - 1)) for head in range(num_heads))
    return [math.log(math.log(2.0) / (longest * ratio) / step) for ratio in ratios]


def _alone(name: str) -> str:
    """The name that a parameter of the language model in a larger model has where there is only the former."""
    return name.replace("model.language_model.", "model.")


def _rule(architecture: Architecture, name: str) -> Rule:
    for ending, rule in architecture.rules:
        if name.endswith(ending):
            return rule
    raise AssertionError(f"no rule fills the parameter {name!r}")


def _shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    import torch
    import transformers

    # Not AutoConfig: SGLang puts its own configuration classes into it, which the models here do not take.
    model_class = getattr(transformers, config["architectures"][0])
    with torch.device("meta"):
        model = model_class(model_class.config_class(**config))
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
