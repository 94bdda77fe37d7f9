"""The name space of a request, as its worker's tree names it.

    adapter    = what follows "base:" in `model`, else `lora_path`
    extra_key  = `extra_key` + the adapter's id                 empty texts are none
    id         = uuid5(NAMESPACE_URL, name "\\0" path)           of an adapter given by `--lora-paths`

An adapter that was loaded while serving has a random id, so a router cannot know its space.

Sources: `srt/entrypoints/openai/serving_base.py:_resolve_lora_path`, `srt/lora/lora_registry.py:deterministic_id`,
`srt/managers/schedule_batch.py:Req.__init__`, `srt/managers/io_struct.py:_normalize_extra_key`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self
from uuid import NAMESPACE_URL, uuid5

from marconi.router.prompts.base import Unknowable


@dataclass(frozen=True, slots=True)
class Adapters:
    """The LoRA adapters of a fleet, which all workers name alike."""

    served_model: str | None
    ids: Mapping[str, str]

    @classmethod
    def of(cls, served_model: str | None, paths: Mapping[str, str]) -> Self:
        """Those of `--lora-paths name=path ...`."""
        return cls(served_model, {name: uuid5(NAMESPACE_URL, f"{name}\0{path}").hex for name, path in paths.items()})

    def named(self, body: Mapping[str, Any], reads_model: bool, index: int) -> str | None:
        """The name of the adapter for the prompt at `index` of a batch."""
        model = body.get("model")
        if reads_model and isinstance(model, str) and ":" in model and model != self.served_model:
            served = f"{self.served_model}:"
            name = model[len(served) :] if model.startswith(served) else model.split(":", 1)[1]
            if name.strip():
                return name.strip()
        path = body.get("lora_path")
        if isinstance(path, list):
            path = path[index] if index < len(path) else None
        if path is not None and not isinstance(path, str):
            raise Unknowable("an adapter without a name")
        return path or None

    def extra_key(self, key: str | None, name: str | None) -> str | None:
        """The tree's key of a request's own and an adapter; `Unknowable` for an adapter that is not known."""
        if name is None:
            return key
        if name not in self.ids:
            raise Unknowable(f"adapter {name!r}")
        return (key or "") + self.ids[name]


def key_of(body: Mapping[str, Any], name: str, index: int, num_prompts: int) -> str | None:
    """`extra_key` or `cache_salt` of the prompt at `index` of a batch: one text for all, or one for each."""
    value = body.get(name)
    if isinstance(value, list):
        value = value[index] if len(value) == num_prompts else value
    if value is not None and not isinstance(value, str):
        raise Unknowable(f"{name} that is no text")
    return value or None
