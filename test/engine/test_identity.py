"""States are of the weights that made them: whatever moves, changes or goes gives another digest."""

from collections.abc import Callable
from threading import Event

import pytest
import torch

from marconi.engine.store import identity as module
from marconi.engine.store.identity import ModelWeights, Unusable, digest_of_weights

Change = Callable[[dict[str, torch.Tensor]], object]
EMBEDDING, HEAD = "embedding.weight", "head.weight"


def parameters() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(3)
    return {name: torch.randn(64, 48, generator=draw).to(torch.bfloat16) for name in (EMBEDDING, HEAD)}


def model_of(values: dict[str, torch.Tensor]) -> torch.nn.Module:
    model = torch.nn.Module()
    for name, value in values.items():
        model.register_parameter(name.replace(".", "_"), torch.nn.Parameter(value, requires_grad=False))
    return model


def altered(change: Change) -> dict[str, torch.Tensor]:
    values = parameters()
    change(values)
    return values


CHANGES: dict[str, Change] = {
    "rows permuted": lambda values: values.update({EMBEDDING: values[EMBEDDING].flip(0)}),
    "two rows exchanged": lambda values: values.update({EMBEDDING: values[EMBEDDING][[1, 0, *range(2, 64)]]}),
    "columns permuted": lambda values: values.update({EMBEDDING: values[EMBEDDING].roll(1, 1)}),
    "parameters exchanged": lambda values: values.update({EMBEDDING: values[HEAD], HEAD: values[EMBEDDING]}),
    "scaled": lambda values: values[HEAD].mul_(2),
    "another sign": lambda values: values[HEAD].neg_(),
    "one bit": lambda values: values[HEAD].view(torch.int16)[5, 7].bitwise_xor_(1),
    "a name": lambda values: values.update({"tail.weight": values.pop(HEAD)}),
    "a type": lambda values: values.update({HEAD: values[HEAD].view(torch.float16)}),
    "a shape": lambda values: values.update({HEAD: values[HEAD].view(48, 64)}),
    "transposed": lambda values: values.update({HEAD: values[HEAD].view(48, 64).t()}),
    "one less": lambda values: values.pop(HEAD),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("slice_bytes", [1 << 24, 100])
def test_other_weights_have_another_digest(change: Change, slice_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = digest_of_weights(model_of(parameters()))
    monkeypatch.setattr(module, "_SLICE_BYTES", slice_bytes)
    digest = digest_of_weights(model_of(parameters()))
    assert digest == whole, "the control: by the bytes, not by how they were sliced"
    assert digest_of_weights(model_of(altered(change))) != digest


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(), (0,), (1,), (4097,), (3, 5, 7)])
def test_every_type_and_shape_has_a_digest(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    value = torch.ones(shape).to(dtype)
    assert len(digest_of_weights(model_of({"weight": value}))) == 32


def test_a_digest_is_taken_beside_the_server_and_what_cannot_be_digested_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    may_end = Event()
    with monkeypatch.context() as patch:
        patch.setattr(module, "digest_of_weights", lambda *_: may_end.wait(20) and "known")
        weights = ModelWeights(model_of(parameters()))
        assert weights.digest is None
        may_end.set()
        weights._digest.result(20)
        assert weights.digest == "known"

    def broken(*_: object) -> str:
        raise RuntimeError("no memory")

    monkeypatch.setattr(module, "digest_of_weights", broken)
    weights = ModelWeights(model_of(parameters()))
    with pytest.raises(Unusable, match="the weights cannot be digested: RuntimeError: no memory"):
        weights._digest.result(20)
    with pytest.raises(Unusable):
        _ = weights.digest


def test_weights_that_change_while_they_are_served_are_others_when_they_are_digested_again() -> None:
    model = model_of(parameters())
    before = digest_of_weights(model)
    # As a loader of weights writes, of which PyTorch's counter of versions knows nothing.
    next(model.parameters()).data.copy_(parameters()[EMBEDDING].flip(0))
    assert digest_of_weights(model) != before
