"""What a model's folder says, read file by file."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A folder in Hugging Face's layout, with a `tokenizer.json`."""

    path: Path

    @classmethod
    def of(cls, path: Path) -> Self:
        """The folder `path`, or that of a `tokenizer.json`; `ValueError` where there is none."""
        folder = path.parent if path.name == "tokenizer.json" and path.is_file() else path
        if not folder.is_dir():
            raise ValueError(f"{path}: no folder; a model's folder with tokenizer.json is right")
        if not (folder / "tokenizer.json").is_file():
            raise ValueError(f"{path}: no tokenizer.json, so only a worker can tokenize as this model does")
        return cls(folder)

    def has(self, name: str) -> bool:
        """Whether there is a file of that name."""
        return (self.path / name).is_file()

    def text(self, name: str) -> str:
        """A file as text."""
        return (self.path / name).read_text(encoding="utf-8")

    def json(self, name: str) -> dict[str, Any]:
        """A file as an object, empty where there is none; `ValueError` naming one that is none."""
        if not self.has(name):
            return {}
        try:
            value = json.loads(self.text(name))
        except ValueError as error:
            raise ValueError(f"{self.path / name}: no JSON ({error})") from None
        if not isinstance(value, dict):
            raise ValueError(f"{self.path / name}: no object")
        return value
