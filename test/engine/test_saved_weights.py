"""States are of the weights that made them: whatever moves, changes or goes gives another digest."""

import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from threading import Event

import pytest
import torch

from marconi.engine.persistence import weights as module
from marconi.engine.persistence.files import Unusable
from marconi.engine.persistence.lock import FolderLock
from marconi.engine.persistence.weights import ModelWeights, digest_of_weights, word_sums
from marconi.engine.version import Refusal

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


@pytest.mark.parametrize("change", ["rows permuted", "two rows exchanged", "columns permuted", "scaled", "one bit"])
@pytest.mark.parametrize("width", [32, 48, 4096])
def test_the_sums_of_a_gpu_see_what_moved(change: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_WIDTH", width)
    before, after = parameters(), altered(CHANGES[change])
    assert [word_sums(each) for each in before.values()] == [word_sums(each) for each in parameters().values()]
    assert [word_sums(each) for each in before.values()] != [word_sums(each) for each in after.values()]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(), (0,), (1,), (4097,), (3, 5, 7)])
def test_every_type_and_shape_has_a_digest_and_sums(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    value = torch.ones(shape).to(dtype)
    assert len(digest_of_weights(model_of({"weight": value}))) == 32
    assert len(word_sums(value)) == 24


def test_an_update_in_place_is_seen() -> None:
    model = model_of(parameters())
    weights = ModelWeights(model)
    weights.digest(lambda: True)
    assert not weights.were_updated()
    # As a loader of weights writes, of which PyTorch's counter of versions knows nothing.
    next(model.parameters()).data.copy_(parameters()[EMBEDDING].flip(0))
    assert weights.were_updated()


def test_a_digest_that_is_not_known_in_time_or_cannot_be_taken_makes_states_unusable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    may_end = Event()
    with monkeypatch.context() as patch:
        patch.setattr(module, "digest_of_weights", lambda *_: may_end.wait(20) and "known")
        weights = ModelWeights(model_of(parameters()))
        with pytest.raises(Unusable, match="the weights must be digested by now, and are not yet"):
            weights.digest(lambda: False)
        may_end.set()
        assert weights.digest(lambda: True) == "known"

    def broken(*_: object) -> str:
        raise RuntimeError("no memory")

    monkeypatch.setattr(module, "digest_of_weights", broken)
    with pytest.raises(Unusable, match="the weights cannot be digested: RuntimeError: no memory"):
        ModelWeights(model_of(parameters())).digest(lambda: True)


# Two servers on one folder

HOLD = (
    "import sys; from pathlib import Path; from marconi.engine.persistence.lock import FolderLock as Lock; "
    "lock = Lock(Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
)


def test_a_second_server_on_a_folder_is_refused_in_a_line_until_the_first_has_ended(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    command = [sys.executable, "-c", HOLD, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == b"held\n"
        with pytest.raises(Refusal) as refused:
            FolderLock(folder)
        first.kill()
    assert str(refused.value) == (
        f"--marconi-save-dir must be a folder of this server's own, got {folder}, which process {first.pid} uses: "
        "give each server another"
    )
    lock = FolderLock(folder)
    with pytest.raises(Refusal):
        FolderLock(folder)
    lock.release()
    lock.release()
    FolderLock(folder).release()


def test_a_folder_that_cannot_be_locked_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        FolderLock(tmp_path / "file" / "saved").release()
    (record,) = caplog.records
    assert record.message.startswith(f"marconi: --marconi-save-dir {tmp_path}/file/saved cannot be locked: ")
