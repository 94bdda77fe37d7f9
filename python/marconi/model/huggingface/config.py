"""A model's `config.json`, read field by field with errors that name the field.

A multimodal configuration describes its language model in a part of its own (`text_config`, `llm_config`,
`language_config`); that part is what is read, and a field that it lacks is looked for outside.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

_LANGUAGE_PARTS: Final = ("text_config", "llm_config", "language_config")


@dataclass(frozen=True, slots=True)
class Config:
    """The fields of the language model, and where they were read."""

    fields: Mapping[str, Any]
    source: str
    """A file, or the name of a catalog entry, for messages."""

    def has(self, field: str) -> bool:
        """True if `field` is there and not null."""
        return self.fields.get(field) is not None

    def integer(self, *names: str, default: int | None = None) -> int:
        """The first of `names` that is there, else `default`; `ValueError` if there is neither, or no whole number."""
        name, value = self._first(names, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ValueError(f"{self.source}: {name} must be a whole number that is not negative, got {value!r}")
        return value

    def positive(self, *names: str, default: int | None = None) -> int:
        """Read an integer above 0; errors like `integer`."""
        value = self.integer(*names, default=default)
        if not value:
            raise ValueError(f"{self.source}: {names[0]} must be a positive whole number, got 0")
        return value

    def text(self, *names: str, default: str | None = None) -> str:
        """Read a string; errors like `integer`."""
        name, value = self._first(names, default)
        if not isinstance(value, str):
            raise ValueError(f"{self.source}: {name} must be a string, got {value!r}")
        return value

    def sequence(self, *names: str, default: list[Any] | None = None) -> list[Any]:
        """Read a list; errors like `integer`."""
        name, value = self._first(names, default)
        if not isinstance(value, list):
            raise ValueError(f"{self.source}: {name} must be a list, got {value!r}")
        return value

    def indices(self, *names: str, default: list[Any] | None = None) -> set[int]:
        """Read a list of whole numbers as a set; errors like `sequence`."""
        values = self.sequence(*names, default=default)
        for value in values:
            if isinstance(value, bool) or not isinstance(value, int):
                raise ValueError(f"{self.source}: {names[0]} must hold whole numbers, got {value!r}")
        return set(values)

    def number(self, name: str, *, default: float) -> float:
        """The number `name`."""
        value = self.fields.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{self.source}: {name} must be a number, got {value!r}")
        return float(value)

    def require_known(self, field: str, values: list[Any], known: tuple[str, ...]) -> None:
        """`ValueError` if one of the `values` of `field` is none of `known`."""
        for value in values:
            if value not in known:
                raise self.unexpected(field, value, known)

    def part(self, name: str) -> "Config":
        """The object under `name`; `ValueError` if it is not one."""
        _, value = self._first((name,), None)
        if not isinstance(value, dict):
            raise ValueError(f"{self.source}: {name} must be an object, got {value!r}")
        return Config(value, f"{self.source}: {name}")

    def flag(self, name: str, *, default: bool) -> bool:
        """The boolean `name`."""
        value = self.fields.get(name)
        return default if value is None else bool(value)

    def per_layer(self, *names: str) -> list[Any]:
        """Read a list of one entry a layer; errors like `sequence`, and if `num_hidden_layers` is not its length."""
        kinds = self.sequence(*names)
        if self.has("num_hidden_layers") and len(kinds) != self.integer("num_hidden_layers"):
            raise ValueError(
                f"{self.source}: {names[0]} must have {self.integer('num_hidden_layers')} entries "
                f"(num_hidden_layers), got {len(kinds)}"
            )
        return kinds

    def unexpected(self, field: str, value: object, known: tuple[str, ...]) -> ValueError:
        """The error for a `value` of `field` that is none of `known`."""
        return ValueError(f"{self.source}: {field} must hold {', '.join(known)} alone, got {value!r}")

    def _first(self, names: tuple[str, ...], default: object) -> tuple[str, object]:
        for name in names:
            if self.has(name):
                return name, self.fields[name]
        if default is None:
            raise ValueError(f"{self.source}: missing field {' or '.join(repr(name) for name in names)}")
        return names[0], default


def from_mapping(fields: Mapping[str, Any], source: str) -> Config:
    """The language model's part of a configuration."""
    for name in _LANGUAGE_PARTS:
        part = fields.get(name)
        if isinstance(part, dict):
            outside = {key: value for key, value in fields.items() if key not in ("model_type", "architectures", name)}
            fallback = {"model_type": fields.get("model_type")}
            return from_mapping({**fallback, **outside, **part}, f"{source}: {name}")
    return Config(fields, source)


def read(path: Path) -> Config:
    """The configuration in `path`, a `config.json` or the folder that holds one.

    `ValueError` if there is none, or if it is no JSON object.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{file} must hold a JSON object, got a {type(fields).__name__}")
    return from_mapping(fields, str(file))
