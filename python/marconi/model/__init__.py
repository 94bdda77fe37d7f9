"""The cost of computing and of keeping a prefix, from a model's configuration.

`load` makes a `ModelProfile`; `PrefillLatency` turns it into seconds on a device. Kinds of layers are in `attention`,
`mla`, `feed_forward` and `recurrent`, each with its formula, behind the contract of `base`.
"""

from pathlib import Path

from marconi.model import catalog, huggingface, paper
from marconi.model.base import FlopCurve, Layer, Precision, Storage
from marconi.model.device import DEVICES, DeviceProfile
from marconi.model.latency import LatencyModel, PrefillLatency
from marconi.model.measured_latency import MeasuredLatency
from marconi.model.profile import KindCost, ModelProfile, profile_of
from marconi.model.serving import NO_CHECKPOINT

__all__ = [
    "DEVICES",
    "DeviceProfile",
    "FlopCurve",
    "KindCost",
    "LatencyModel",
    "Layer",
    "MeasuredLatency",
    "ModelProfile",
    "Precision",
    "PrefillLatency",
    "Storage",
    "load",
    "profile_of",
]


def load(name_or_path: str, *, precision: Precision | None = None, tensor_parallel: int = 1) -> ModelProfile:
    """The profile of a model of the catalog, by its name here or on the hub, or of the `config.json` at or in a path.

    What is there as a path is not taken for a hub name. `ValueError` for what is neither (with the known names), a
    configuration that cannot be read, an unknown architecture, a missing field, an unknown dtype, or a number of
    workers that does not divide the model's heads.
    """
    path = Path(name_or_path).expanduser()
    is_path = "/" in name_or_path and path.exists()
    name = None if is_path else catalog.name_of(name_or_path)
    if name == catalog.MARCONI_7B:
        return profile_of(name, paper.hybrid(), paper.STORAGE.over(precision, tensor_parallel), serving=NO_CHECKPOINT)
    if name is not None:
        config = huggingface.from_mapping(catalog.CONFIGS[name], name)
        return huggingface.profile(config, name, precision=precision, tensor_parallel=tensor_parallel)
    if not path.exists():
        near = " or ".join(map(repr, catalog.near(name_or_path)))
        meant = f": did you mean {near}?" if near else ""
        known = ", ".join(catalog.NAMES)
        raise ValueError(f"a model must be a config.json, its folder or one of {known}, got {name_or_path!r}{meant}")
    config = huggingface.read(path)
    path = path.resolve()
    own_name = path.name if path.is_dir() else path.parent.name
    return huggingface.profile(config, own_name, precision=precision, tensor_parallel=tensor_parallel)
