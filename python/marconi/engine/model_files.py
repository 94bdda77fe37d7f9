"""Whether a model folder can be loaded at all, found out before any process is started.

A shard cut short by a full disk, an index that names a missing file or a `config.json` that is not JSON would
otherwise show as a traceback from a child process, after seconds of loading. Only headers are read.
"""

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from marconi.engine.version import Refusal

_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
_INDEX = "model.safetensors.index.json"
_JSON_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


def is_local(model_path: str) -> bool:
    """Whether `model_path` can only be meant as a path here, not as a hub name (`organisation/model`) or a URL."""
    if "://" in model_path:
        return False
    return Path(model_path).exists() or model_path.startswith(("/", ".", "~")) or model_path.count("/") != 1


def require_loadable(model_path: str, *, weights: bool = True) -> None:
    """Raise `Refusal` if the local `model_path` cannot be a Hugging Face checkpoint; a hub name passes.

    `weights` is false where none are read (`--load-format dummy`).
    """
    if not is_local(model_path):
        return
    path = Path(model_path)
    if not path.exists():
        raise Refusal(
            f"model path {model_path!r} does not exist: give a checkpoint folder or a hub name (organisation/model)"
        )
    if path.is_file():
        return
    config = path / "config.json"
    if not config.is_file():
        raise Refusal(f"model path {model_path!r} holds no config.json: give a Hugging Face checkpoint folder")
    for name in _JSON_FILES:
        if (path / name).is_file():
            _read_json(path / name)
    if weights:
        _require_weights(path)


def _require_weights(path: Path) -> None:
    if not any(True for pattern in _WEIGHTS for _ in path.glob(pattern)):
        raise Refusal(f"model path {str(path)!r} holds no weights ({', '.join(_WEIGHTS)})")
    index = path / _INDEX
    if index.is_file():
        weight_map = _read_json(index).get("weight_map", {})
        if not isinstance(weight_map, dict):
            raise Refusal(f"{index}: weight_map is a JSON {type(weight_map).__name__}, expected an object")
        absent = sorted({shard for shard in weight_map.values() if not (path / shard).is_file()})
        if absent:
            raise Refusal(f"{index} names {len(absent)} shard(s) that are not there, first {absent[0]!r}")
    for shard in sorted(path.glob("*.safetensors")):
        try:
            with safe_open(shard, framework="np"):
                pass
        except (SafetensorError, OSError) as error:
            reason = str(error).splitlines()[0]
            raise Refusal(f"{shard} is not a whole safetensors file ({reason}): fetch or write it again") from None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise Refusal(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(content, dict):
        raise Refusal(f"{path} holds a JSON {type(content).__name__}, expected an object")
    return content
