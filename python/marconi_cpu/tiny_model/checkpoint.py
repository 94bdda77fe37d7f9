"""A model as a folder that appears whole or not at all.

All files are written into a scratch folder beside the destination, which is then renamed: whoever sees the
destination sees a finished model. `tiny_model.json` holds what the folder was made from and the digest of every other
file; a folder is replaced only while each of its files is as it was written here.
"""

import hashlib
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from marconi_cpu.tiny_model import gdn, mamba2, short_conv, tokenizer, vision, weights, windows
from marconi_cpu.tiny_model.family import Family

MAX_POSITIONS: Final = 32768
_ORIGIN: Final = "tiny_model.json"


def write(
    family: Family,
    out: Path,
    *,
    seed: int = 0,
    has_mtp: bool = False,
    has_vision: bool = False,
    gdn_head_dim: int = gdn.HEAD_DIM,
) -> None:
    """Write the small model of `family` and `seed`, in float32, to the folder `out`.

    With `has_mtp` it has a head that predicts one more token (multi-token prediction), to decode speculatively with;
    the families `short-conv` and `windows` have none.
    With `has_vision` it takes images (`vision.py`), which only the family `gdn` does, without such a head.
    `gdn_head_dim` are the channels of a recurrent head of the family `gdn`; no other family has any.

    Makes the folders above `out`; replaces a model that was written here before. Raises ValueError for an unknown
    family or head, and where `out` is a file or holds anything else; OSError where the file system refuses.
    """
    family = Family(family)
    if has_mtp and not family.can_have_mtp:
        able = ", ".join(each for each in Family if each.can_have_mtp)
        raise ValueError(
            f"the family of a tiny model with a head for one more token must be one of {able}, got {str(family)!r}"
        )
    if has_vision and (family is not Family.GDN or has_mtp):
        raise ValueError(
            f"a tiny model that takes images must be of the family {Family.GDN} and have no head for one more token, "
            f"got {str(family)!r}{' with one' if has_mtp else ''}"
        )
    out = out.resolve()
    _require_replaceable(out)
    files = _files(family, seed, has_mtp, has_vision, gdn_head_dim)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as scratch:
        # A folder of its own, because the scratch folder is readable by its owner alone.
        staged = Path(scratch) / "new"
        staged.mkdir()
        for name, content in files.items():
            (staged / name).write_bytes(content)
        if out.exists():
            out.rename(Path(scratch) / "old")
        staged.rename(out)


def _files(family: Family, seed: int, has_mtp: bool, has_vision: bool, gdn_head_dim: int) -> dict[str, bytes]:
    from safetensors.numpy import save

    architecture = {
        Family.GDN: gdn.ARCHITECTURE,
        Family.MAMBA2: mamba2.ARCHITECTURE,
        Family.SHORT_CONV: short_conv.ARCHITECTURE,
        Family.WINDOWS: windows.ARCHITECTURE,
    }[family]
    config = {
        **architecture.config,
        **(gdn.recurrent_heads(gdn_head_dim) if family is Family.GDN else {}),
        **(architecture.mtp.config if has_mtp and architecture.mtp is not None else {}),
        **tokenizer.token_ids(),
        "vocab_size": tokenizer.VOCAB_SIZE,
        "max_position_embeddings": MAX_POSITIONS,
        "tie_word_embeddings": False,
        "dtype": "float32",
    }
    if family is Family.WINDOWS:
        config = windows.wrapped(config)
    if has_vision:
        architecture, config = vision.ARCHITECTURE, vision.config(config)
    more_special, template = (vision.TOKENS, vision.CHAT_TEMPLATE) if has_vision else ((), tokenizer.CHAT_TEMPLATE)
    files = {
        "config.json": _json(config),
        "generation_config.json": _json(tokenizer.token_ids()),
        "model.safetensors": save(weights.draw(architecture, config, seed, has_mtp=has_mtp), metadata={"format": "pt"}),
        "tokenizer.json": tokenizer.tokenizer_json(more_special).encode(),
        "tokenizer_config.json": _json(tokenizer.tokenizer_config(MAX_POSITIONS, template)),
        **({name: _json(each) for name, each in vision.processor_configs().items()} if has_vision else {}),
    }
    digests = {name: _digest(content) for name, content in files.items()}
    options = {"has_mtp": has_mtp, **({"has_vision": True} if has_vision else {})}
    return {**files, _ORIGIN: _json({"family": str(family), "seed": seed, **options, "sha256": digests})}


def _json(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _require_replaceable(out: Path) -> None:
    wanted = "the folder of a tiny model must be empty, a tiny model's or not exist yet, got"
    if out.is_dir():
        foreign = _first_foreign(out)
        if foreign is not None:
            raise ValueError(f"{wanted} {str(out)!r}, which holds {foreign!r}")
    elif out.exists():
        raise ValueError(f"{wanted} the file {str(out)!r}")


def _first_foreign(folder: Path) -> str | None:
    """The first file in `folder` that is not as it was written here."""
    digests = _recorded_digests(folder)
    for path in sorted(folder.iterdir()):
        if digests and path.name == _ORIGIN:
            continue
        if not path.is_file() or digests.get(path.name) != _digest(path.read_bytes()):
            return path.name
    return None


def _recorded_digests(folder: Path) -> dict[str, str]:
    try:
        digests = json.loads((folder / _ORIGIN).read_bytes())["sha256"]
    except (OSError, ValueError, LookupError, TypeError):
        return {}
    return digests if isinstance(digests, dict) else {}
