"""A model folder that cannot be loaded is refused before any process is started."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from marconi.engine.model_files import require_loadable
from marconi.engine.version import Refusal


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    save_file({"weight": np.zeros(1000, np.float32)}, tmp_path / "model.safetensors")
    return tmp_path


def test_a_whole_checkpoint_passes(checkpoint: Path) -> None:
    require_loadable(str(checkpoint))


@pytest.mark.parametrize("name", ["Qwen/Qwen3-Next-80B-A3B-Instruct", "s3://bucket/model/folder"])
def test_a_name_that_is_no_local_path_is_left_to_the_loader(name: str) -> None:
    require_loadable(name)


@pytest.mark.parametrize("cut_to", [0, 4, 40, 2000])
def test_a_shard_that_was_cut_short_is_named(checkpoint: Path, cut_to: int) -> None:
    shard = checkpoint / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:cut_to])
    with pytest.raises(Refusal, match=r"model\.safetensors is not a whole safetensors file") as refused:
        require_loadable(str(checkpoint))
    assert "\n" not in str(refused.value)


def test_a_missing_shard_is_named(checkpoint: Path) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(Refusal, match=r"names 1 shard\(s\) that are not there, first 'model-2\.safetensors'"):
        require_loadable(str(checkpoint))


@pytest.mark.parametrize(
    ("content", "says"), [("{", "cannot be read as JSON"), ("[]", "holds a JSON list, expected an object")]
)
def test_a_config_that_is_not_an_object_is_named(checkpoint: Path, content: str, says: str) -> None:
    (checkpoint / "config.json").write_text(content)
    with pytest.raises(Refusal, match=says):
        require_loadable(str(checkpoint))


def test_an_index_that_maps_nothing_is_named(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors.index.json").write_text('{"weight_map": ["model.safetensors"]}')
    with pytest.raises(Refusal, match="weight_map is a JSON list, expected an object"):
        require_loadable(str(checkpoint))


def test_a_tokenizer_that_was_cut_short_is_named(checkpoint: Path) -> None:
    (checkpoint / "tokenizer.json").write_text('{"version": "1.')
    with pytest.raises(Refusal, match=r"tokenizer\.json cannot be read as JSON"):
        require_loadable(str(checkpoint))


@pytest.mark.parametrize("name", ["gone", "./gone", "a/b/gone"])
def test_a_relative_path_that_is_not_there_is_named(name: str) -> None:
    with pytest.raises(Refusal, match=f"'{name}' does not exist"):
        require_loadable(name)


def test_a_folder_without_config_or_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match=r"holds no config\.json"):
        require_loadable(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(Refusal, match="holds no weights"):
        require_loadable(str(tmp_path))
    require_loadable(str(tmp_path), weights=False)
