"""The configuration of a command line's model: found and read without SGLang."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from marconi.engine.launch.weights import named_quantization
from marconi.model import catalog, huggingface

BESIDE: Final = "hf_quant_config.json"
"""The file that ModelOpt writes beside a configuration."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """The fields of a `config.json`, and where they come from."""

    spelt: str
    """How `marconi.model.load` finds it."""
    source: str
    """The file, or the name under which it is known."""
    fields: Mapping[str, Any]
    quantization: Mapping[str, Any] | None = None
    """Its `quantization_config`; None where its weights are as they were trained."""
    home: Path | None = None
    """Its folder; None for one that is known by its name or a file."""
    is_whole: bool = True
    """False if only a catalogue name is known, which suffices for decisions about the cache."""

    @classmethod
    def find(cls, model_path: str, config: Path | None) -> "Configuration":
        """From `config`, a file or its folder, else the folder `model_path`, else the catalogue; `ValueError`."""
        path = Path(model_path).expanduser() if config is None else config
        name = catalog.name_of(model_path)
        if config is not None or path.is_dir():
            try:
                huggingface.read(path)
            except (ValueError, OSError) as error:
                raise ValueError(f"{'--model-path' if config is None else '--config'}: {error}") from None
            file = path / "config.json" if path.is_dir() else path
            fields = json.loads(file.read_text(encoding="utf-8"))
            beside = file.with_name(BESIDE)
            home = path if path.is_dir() else None
            return cls(str(path), str(file), fields, _quantization(fields, beside), home)
        if name is not None and name in catalog.CONFIGS:
            fields = {"architectures": [catalog.ARCHITECTURES[name]], **catalog.CONFIGS[name]}
            quantization = named_quantization(model_path)
            if quantization is not None:
                fields["quantization_config"] = quantization
            return cls(name, name, fields, quantization, is_whole=False)
        if model_path in catalog.KINDS:
            return cls(model_path, model_path, dict(catalog.KINDS[model_path]), is_whole=False)
        raise ValueError(
            f"--model-path: no configuration of {model_path} is known here: give its config.json, or the folder of "
            "it, as --config"
        )


def own_quantization(fields: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The quantization in a configuration itself; None for none."""
    return fields.get("quantization_config") or (fields.get("text_config") or {}).get("quantization_config")


def _quantization(fields: Mapping[str, Any], beside: Path) -> Mapping[str, Any] | None:
    """The quantization in a configuration, else in the file that ModelOpt writes beside it; None for none."""
    found = own_quantization(fields)
    if not found and beside.is_file():
        found = json.loads(beside.read_text(encoding="utf-8")).get("quantization")
    return found or None
